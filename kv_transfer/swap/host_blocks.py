"""KV blocks on their way to host memory and back: a worker's side of swapping.

Whole blocks move, bit for bit, on the stream that computes: what goes out is read before the step overwrites
it, and what comes back is there before the step reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

from kv_transfer.swap.book import Move, runs

_MEASURED_BLOCKS: Final = 64
_MEASUREMENTS: Final = 3
_AT_ONCE: Final = 64


class NoHostMemoryError(RuntimeError):
    """The host has no memory for the pool."""


@dataclass(frozen=True, slots=True)
class SwapSpeed(KVConnectorWorkerMetadata):  # type: ignore[misc] # vLLM ships no types for it
    """What a worker has measured, on its way to the scheduler.

    Attributes:
        block_s: Seconds to move a block one way.
    """

    block_s: float

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several workers: that of the slowest, for which the others wait."""
        return SwapSpeed(max(self.block_s, other.block_s))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Of one cache tensor: [blocks, ...] in the engine, and [slots, ...] in host memory."""

    engine: torch.Tensor
    host: torch.Tensor


class HostBlocks:
    """The host's pool of one worker.

    Args:
        caches: The engine's KV caches, one a layer; their first dimension are blocks, several to each of the
            scheduler's where a kernel wants smaller ones.
        blocks: Of the scheduler's.
        slots: Blocks that the pool has room for.

    Raises:
        NoHostMemoryError: There is not so much.
        ValueError: A cache is not made of blocks.
    """

    def __init__(self, caches: Iterable[torch.Tensor], blocks: int, slots: int) -> None:
        self._layers: list[_Layer] = []
        seen: set[tuple[int, torch.Size]] = set()
        for cache in caches:
            has_blocks = isinstance(cache, torch.Tensor) and cache.ndim > 1 and not cache.shape[0] % blocks
            if not has_blocks:
                raise ValueError("the KV cache of this model is not made of blocks; set pressure.swap_gib: 0")
            if (place := (cache.data_ptr(), cache.shape)) in seen:  # layers that share one
                continue
            seen.add(place)
            moved = (
                cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            )  # 8-bit floats have no index
            engine = moved.unflatten(0, (blocks, cache.shape[0] // blocks))
            try:
                host = torch.empty((slots, *engine.shape[1:]), dtype=moved.dtype)
                host.zero_()  # so that the host hands its memory out now, or refuses
                if cache.device.type == "cuda":
                    pin_tensor(host)
            except RuntimeError as error:
                raise NoHostMemoryError(
                    f"no host memory for {slots} KV blocks of streams that lose theirs; set "
                    f"pressure.swap_gib to less ({error})"
                ) from error
            self._layers.append(_Layer(engine, host))

    def take(self, moves: Sequence[Move]) -> None:
        """Copy blocks to their slots; they are there when this returns, and the blocks can be written to."""
        for some in _batches(moves):
            for layer in self._layers:
                blocks, at = layer.engine.index_select(0, _indices(some, layer)), 0
                for first, number in runs(some):
                    layer.host[first : first + number].copy_(blocks[at : at + number], non_blocking=True)
                    at += number
        if moves:
            self._wait()

    def give(self, moves: Sequence[Move]) -> None:
        """Copy slots to their blocks."""
        for some in _batches(moves):
            for layer in self._layers:
                shape = (len(some), *layer.engine.shape[1:])
                blocks, at = torch.empty(shape, dtype=layer.engine.dtype, device=layer.engine.device), 0
                for first, number in runs(some):
                    blocks[at : at + number].copy_(layer.host[first : first + number], non_blocking=True)
                    at += number
                layer.engine.index_copy_(0, _indices(some, layer), blocks)

    def measure(self) -> SwapSpeed:
        """Move blocks out and back, which changes none; the best of several times."""
        number = min(_MEASURED_BLOCKS, *(min(len(one.host), len(one.engine)) for one in self._layers))
        moves = [Move(block, block) for block in range(number)]
        times_s = []
        for _ in range(_MEASUREMENTS):
            self._wait()
            began_s = time.perf_counter()
            self.take(moves)
            self.give(moves)
            self._wait()
            times_s.append((time.perf_counter() - began_s) / (2 * number))
        return SwapSpeed(min(times_s))

    def _wait(self) -> None:
        device = self._layers[0].engine.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _batches(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """So few at once that what is copied between takes little of the engine's memory."""
    for first in range(0, len(moves), _AT_ONCE):
        yield moves[first : first + _AT_ONCE]


def _indices(moves: Sequence[Move], layer: _Layer) -> torch.Tensor:
    return torch.tensor([move.block for move in moves], device=layer.engine.device)
