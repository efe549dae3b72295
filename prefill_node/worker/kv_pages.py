"""Checkpoints in KV blocks that their own step has not filled yet.

All blocks of a step are allocated before it runs, for every layer. Of the layers behind the one where it
stopped they are empty; the step fills them when it goes on, and until then nobody reads them. So a checkpoint
lies there as long as it is not needed, and what does not fit stays in memory of its own. Only blocks are used
that the step fills whole: nothing of a checkpoint is left in them once it has. Owns which blocks those are,
and the way of a checkpoint there and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from prefill_node.worker.boundary import Boundaries
from prefill_node.worker.checkpoint import Checkpoint, Rows, map_tensors

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

Blocks: TypeAlias = "Mapping[str, Sequence[Sequence[int]]]"
"""By request: the blocks that a step fills whole, for each of the engine's groups of KV caches."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The KV cache of one layer.

    Attributes:
        group: The group of KV caches whose blocks it has.
        pages: [blocks, ...].
        block_tokens: Tokens of a block.
    """

    group: int
    pages: torch.Tensor
    block_tokens: int

    @property
    def page(self) -> int:
        """Elements of a block."""
        return math.prod(self.pages.shape[1:])

    @property
    def bytes_per_token(self) -> float:
        return float(self.page * self.pages.itemsize / self.block_tokens)

    def write(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Put at most as many values as these blocks hold; the rest of the last one is zero."""
        with torch.inference_mode():  # as the caches were made
            missing = len(blocks) * self.page - values.numel()
            whole = torch.cat([values, values.new_zeros(missing)]) if missing else values
            self.pages.index_copy_(0, blocks, whole.view(len(blocks), *self.pages.shape[1:]))

    def read(self, blocks: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` values of these blocks."""
        return self.pages.index_select(0, blocks).reshape(-1)[:count]

    def is_exact(self) -> bool:
        """Whether a block gives what it was given. It is as before afterwards."""
        block = torch.tensor([len(self.pages) - 1], device=self.pages.device)
        before = self.read(block, self.page).clone()
        values = torch.arange(self.page, device=before.device).remainder(251).to(before.dtype)
        self.write(block, values)
        is_so = torch.equal(self.read(block, self.page), values)
        self.write(block, before)
        return bool(is_so and torch.equal(self.read(block, self.page), before))


@dataclass(frozen=True, slots=True)
class _Stored:
    """Of one request: what lies in its blocks, in order, and behind that what found no room.

    Attributes:
        places: (layer, blocks, values in them).
    """

    places: tuple[tuple[_Layer, torch.Tensor, int], ...]
    left_over: torch.Tensor

    def load(self) -> torch.Tensor:
        """All values."""
        return torch.cat(
            [*(layer.read(blocks, count) for layer, blocks, count in self.places), self.left_over]
        )


@dataclass(frozen=True, slots=True)
class PagedCheckpoint:
    """A checkpoint whose rows lie in KV blocks, each request's in its own.

    Attributes:
        shell: The checkpoint with nothing in the tensors whose rows are stored.
        numbers: Which of its tensors those are, counted in its order.
        stored: By request.
    """

    shell: Checkpoint
    numbers: frozenset[int]
    stored: Mapping[str, _Stored]

    @property
    def boundary(self) -> int:
        """Where it goes on."""
        return self.shell.boundary

    @property
    def size_bytes(self) -> int:
        """Bytes that it keeps alive beside KV blocks."""
        return self.shell.size_bytes + sum(int(part.left_over.nbytes) for part in self.stored.values())

    def select(self, rows: Rows) -> Checkpoint | None:
        """See `Checkpoint.select`. Blocks of requests that are gone are not read: others may have them."""
        shell = self.shell.select(rows)
        if shell is None:
            return None
        parts = [(tokens, self.stored[request].load()) for request, tokens in rows]
        starts = [0] * len(parts)

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            row = tensor.shape[1:]
            pieces = []
            for number, (tokens, values) in enumerate(parts):
                start, count = starts[number], tokens * math.prod(row)
                pieces.append(values[start : start + count].view(tokens, *row))
                starts[number] += count
            return torch.cat(pieces)

        return _map_some(shell, self.numbers, fill)


class KVPages:
    """The KV blocks of one rank, as room for checkpoints.

    Args:
        layers: In the order in which a pass fills them; None for one whose blocks cannot be used, as those of
            another type than the first one's.
        begun: By boundary, how many layers may have been written to.
    """

    def __init__(self, layers: Sequence[_Layer | None], begun: Sequence[int]) -> None:
        self._begun = tuple(begun)
        self._dtype = next((layer.pages.dtype for layer in layers if layer is not None), None)
        self._layers = [
            layer if layer is not None and layer.pages.dtype == self._dtype else None for layer in layers
        ]

    @staticmethod
    def of(kv_cache: KVCacheConfig, caches: Mapping[str, Any], boundaries: Boundaries) -> KVPages:
        """Those of an engine whose KV caches are there.

        Args:
            kv_cache: How the engine has laid out its blocks.
            caches: The KV cache of each layer by its name; its first dimension are blocks, several to each of
                the scheduler's where a kernel wants smaller ones.
            boundaries: Of its passes, with the names of its layers.
        """
        of_layer = {
            name: (number, _spec_of(name, group.kv_cache_spec))
            for number, group in enumerate(kv_cache.kv_cache_groups)
            for name in group.layer_names
        }
        seen: set[tuple[int, int]] = set()
        layers: list[_Layer | None] = []
        for name in boundaries.attentions:
            layer = None
            if name in of_layer:
                group, spec = of_layer[name]
                layer = _layer(group, spec, caches.get(name), kv_cache.num_blocks)
            if layer is not None:
                place = layer.group, layer.pages.data_ptr()
                layer = None if place in seen else layer  # written to with the layer whose cache it shares
                seen.add(place)
            layers.append(layer)
        return KVPages(layers, boundaries.begun)

    def why_inexact(self) -> str:
        """What keeps values from coming back out of a block as they were; empty for nothing."""
        for layer in self._layers:
            if layer is not None and not layer.is_exact():
                return f"a block of shape {list(layer.pages.shape[1:])} gives other values than it was given"
        return ""

    def room(self) -> tuple[float, ...]:
        """By boundary, how many bytes of a checkpoint find room, for each token of the step."""
        per_layer = [0.0 if layer is None else layer.bytes_per_token for layer in self._layers]
        behind = [*accumulate(reversed(per_layer), initial=0.0)][::-1]
        return tuple(behind[begun] for begun in self._begun)

    def keep(self, checkpoint: Checkpoint, stopped_at: int, blocks: Blocks) -> Checkpoint | PagedCheckpoint:
        """Move a checkpoint, taken by a pass that stopped at a boundary, to the blocks of its requests.

        What cannot lie there stays where it is: tensors that are not laid out by token, and those with values
        that somebody else could not read as a key or a value, of another type than the KV cache has or no
        finite number. Among these is memory that a compiled pass has ready for a result.
        """
        layers = [layer for layer in self._layers[self._begun[stopped_at] :] if layer is not None]
        total = sum(tokens for _, tokens in checkpoint.rows)
        moved: dict[int, torch.Tensor] = {
            number: tensor
            for number, tensor in enumerate(checkpoint.tensors())
            if self._can_lie_there(tensor, total)
        }
        has_room = any(blocks[request][layer.group] for request, _ in checkpoint.rows for layer in layers)
        if not moved or not has_room:
            return checkpoint
        stored, start = {}, 0
        for request, tokens in checkpoint.rows:
            rows = [tensor[start : start + tokens].reshape(-1) for tensor in moved.values()]
            stored[request] = _store(torch.cat(rows), layers, blocks[request])
            start += tokens
        shell = _map_some(checkpoint, moved.keys(), lambda tensor: tensor.new_empty((0, *tensor.shape[1:])))
        return PagedCheckpoint(shell, frozenset(moved), stored)

    def _can_lie_there(self, tensor: torch.Tensor, total: int) -> bool:
        return (
            not tensor.is_meta
            and tensor.dtype == self._dtype
            and tensor.dim() > 0
            and tensor.shape[0] == total
            and tensor.is_contiguous()
            and bool(tensor.isfinite().all())
        )


def filled_whole(
    block_ids: Sequence[Sequence[int]], block_tokens: Sequence[int], computed: int, tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The blocks that a step fills whole, for each group.

    Args:
        block_ids: Of one request, by group.
        block_tokens: Tokens of a block, by group.
        computed: Tokens of the request that were computed before the step.
        tokens: Tokens that the step computes.
    """
    return tuple(
        tuple(ids[-(-computed // size) : (computed + tokens) // size])
        for ids, size in zip(block_ids, block_tokens, strict=True)
    )


def _store(values: torch.Tensor, layers: Sequence[_Layer], blocks: Sequence[Sequence[int]]) -> _Stored:
    own = [torch.tensor(ids, device=values.device, dtype=torch.long) for ids in blocks]
    places: list[tuple[_Layer, torch.Tensor, int]] = []
    at, total = 0, values.numel()
    for layer in layers:
        if at == total:
            break
        some = own[layer.group][: math.ceil((total - at) / layer.page)]
        count = min(len(some) * layer.page, total - at)
        if count:
            layer.write(some, values[at : at + count])
            places.append((layer, some, count))
            at += count
    return _Stored(tuple(places), values[at:].clone())


def _spec_of(name: str, spec: KVCacheSpec) -> KVCacheSpec:
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _layer(group: int, spec: KVCacheSpec, cache: Any, blocks: int) -> _Layer | None:
    """None where a block is not what the tokens of a step fill, one after the other, and nothing else."""
    if not isinstance(spec, FullAttentionSpec) or spec.tokens_per_state != 1:
        return None
    is_blocks = isinstance(cache, torch.Tensor) and cache.ndim > 1 and not cache.shape[0] % blocks
    if not is_blocks or not cache.is_floating_point() or cache.itemsize == 1:
        return None
    return _Layer(group, cache.unflatten(0, (blocks, cache.shape[0] // blocks)), spec.block_size)


def _map_some(
    checkpoint: Checkpoint, numbers: Collection[int], apply: Callable[[torch.Tensor], torch.Tensor]
) -> Checkpoint:
    """With `apply` on those of its tensors whose numbers these are."""
    number = -1

    def some(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return apply(tensor) if number in numbers else tensor

    entering, replies = map_tensors((checkpoint.entering, checkpoint.replies), some)
    return replace(checkpoint, entering=entering, replies=replies)
