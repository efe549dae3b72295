"""What is compared: where a pass can stop, how far the host may run ahead, and how peers check.

Owns the passes of a decoder with one variant's boundaries or with none, and what boundaries cost that never
stop anything. The boundaries, the vote, the launch-ahead and the checkpoint are the servers'; the two
baselines replace one of them each.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.decoder import Decoder, KVCache
from benchmarks.gpu.device import Device
from benchmarks.report import overhead
from prefill_node.worker.boundary import BoundaryLevel, install
from prefill_node.worker.checkpoint import Checkpoint
from prefill_node.worker.forward import Forward, Signal, Stop
from prefill_node.worker.launch_ahead import HostOnly, TimeBound
from prefill_node.worker.vote import SoleVote
from slo.predict.pass_shape import PassShape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


UNBOUNDED = 0
BARE = "bare"
BARE_AGAIN = "bare again"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to make a forward pass stoppable.

    Attributes:
        launch_ahead_ms: Work that may be launched and not done; `UNBOUNDED` for any.
        check: "" for the servers' own; "sync": the device is waited for at every boundary, as FlowPrefill
            does; "all-reduce": so it is, after an all-reduce, as the vLLM fork that aborts does.
    """

    granularity: BoundaryLevel
    launch_ahead_ms: float
    check: str = ""

    @property
    def name(self) -> str:
        """For the tables."""
        if self.check:
            return f"{self.granularity.value}, {self.check}"
        ahead = "unbounded" if self.launch_ahead_ms == UNBOUNDED else f"{self.launch_ahead_ms:g} ms"
        return f"{self.granularity.value}, ahead {ahead}"


class SyncEach:
    """A launch-ahead of nothing: the device is waited for at every boundary."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def start(self, at_s: Sequence[float]) -> None:
        """Nothing to do."""

    def reach(self, boundary: int) -> None:  # noqa: ARG002 - the protocol
        """Wait until everything launched has run."""
        self._device.wait()


class AllReduceSync:
    """A vote by an all-reduce on the device, whose result the host waits for at every boundary."""

    is_first_pass = False

    def __init__(self, group: ProcessGroup, device: Device) -> None:
        self._group = group
        self._device = device

    def vote(self, step_id: int, boundary: int, wish: bool) -> bool:  # noqa: ARG002, FBT001 - the protocol
        """Whether any rank wishes to stop."""
        ballot = torch.tensor([int(wish)], device=self._device.torch)
        torch.distributed.all_reduce(ballot, torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(ballot.item())


@dataclass(frozen=True, slots=True)
class Fitted:
    """A variant, wrapped around a decoder's modules."""

    variant: Variant
    forward: Forward
    shape: PassShape
    wrappers: tuple[tuple[Any, Callable[..., Any]], ...]

    @property
    def count(self) -> int:
        """Boundaries of a pass."""
        return self.shape.boundaries


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: its tokens and its own KV cache."""

    name: str
    tokens: torch.Tensor
    cache: KVCache

    def __len__(self) -> int:
        """Tokens."""
        return int(self.tokens.shape[0])


class Bench:
    """A decoder, the variants that were fitted to it, and its passes."""

    def __init__(
        self, decoder: Decoder, device: Device, signal: Signal, group: ProcessGroup | None, seed: int
    ) -> None:
        self.decoder = decoder
        self.device = device
        self.signal = signal
        self.steps: Iterator[int] = itertools.count(1)
        self._whole_s: dict[int, float] = {}
        """What bare passes took last, by tokens: what is predicted of the next one."""
        self._group = group
        self._generator = torch.Generator(device.torch).manual_seed(seed)

    def prompt(self, name: str, tokens: int) -> Prompt:
        """A request of random tokens."""
        high = self.decoder.embed_tokens.shape[0]
        ids = torch.randint(high, (tokens,), device=self.device.torch, generator=self._generator)
        return Prompt(name, ids, KVCache(self.decoder, tokens))

    def fit(self, variant: Variant) -> Fitted | None:
        """Wrap the layers for a variant, then take the wrappers off; None if they cannot stop so finely."""
        vote = AllReduceSync(self._group, self.device) if variant.check == "all-reduce" else SoleVote()
        if variant.check == "sync":
            ahead: Any = SyncEach(self.device)
        elif variant.launch_ahead_ms == UNBOUNDED or variant.check:
            ahead = HostOnly()
        else:
            ahead = TimeBound(variant.launch_ahead_ms / 1e3, self.device.mark)
        forward = Forward(0, self.signal, vote, ahead)
        boundaries = install(self.decoder, variant.granularity, forward)
        wrappers = tuple(
            (module, vars(module)["forward"])
            for module in self.decoder.modules()
            if "forward" in vars(module)
        )
        self.use(None)
        is_so_fine = boundaries.granularity == variant.granularity
        return Fitted(variant, forward, boundaries.shape, wrappers) if is_so_fine else None

    def use(self, fitted: Fitted | None) -> None:
        """The decoder with a variant's boundaries, or without any."""
        for module in self.decoder.modules():
            vars(module).pop("forward", None)
        if fitted is not None:
            for module, wrapper in fitted.wrappers:
                module.forward = wrapper

    def run(
        self,
        fitted: Fitted | None,
        prompt: Prompt,
        resume: Checkpoint | None = None,
        *,
        step_id: int | None = None,
        first: Any = None,
    ) -> tuple[torch.Tensor, Stop | None]:
        """One pass as a step of its own; the device may still be at it when this returns.

        Args:
            fitted: The variant in use; None for the bare decoder.
            prompt: What is computed.
            resume: The checkpoint to go on from.
            step_id: The step's number; by default the next.
            first: Recorded when the pass's first kernel has been launched.

        Returns:
            The logits of the last token, meaningless after a stop; where it stopped.
        """
        if fitted is not None:
            rows = ((prompt.name, len(prompt)),)
            whole_s = self._whole_s.get(len(prompt), 0.0)
            at_s = [part.tokens * whole_s for part in fitted.shape.done]
            fitted.forward.begin(step_id or next(self.steps), lambda: rows, resume, at_s)
        stop = None
        try:
            hidden = self.decoder.embed(prompt.tokens)
            if first is not None:
                first.record()
            logits = self.decoder.decode(hidden, prompt.cache)
        finally:
            if fitted is not None:
                stop = fitted.forward.end()
        return logits, stop

    def seconds(self, fitted: Fitted | None, prompt: Prompt) -> float:
        """How long a pass takes, until the device is idle."""
        started_s = time.perf_counter()
        self.run(fitted, prompt)
        self.device.wait()
        took_s = time.perf_counter() - started_s
        if fitted is None:
            self._whole_s[len(prompt)] = took_s
        return took_s

    def warm_up(self, fitted: list[Fitted], prompt: Prompt) -> None:
        """Touch memory and kernels, and tell each variant what a layer returns."""
        for each in [None, None, *fitted]:
            self.use(each)
            self.seconds(each, prompt)


def idle_overhead(
    bench: Bench,
    variants: Sequence[Fitted],
    prompt: Prompt,
    rounds: int,
    limit_s: float,
    rng: random.Random,
) -> list[dict[str, Any]]:
    """A row for each variant, and one for the bare decoder against itself.

    Every variant and the bare decoder prefill the same prompt once in each round, in random order; a ratio is
    of two passes of one round. The bare decoder runs twice, so that the table also says how much is noise.
    There are at most `rounds`; after `limit_s` none but the first is begun.
    """
    contenders: dict[str, Fitted | None] = {BARE: None, BARE_AGAIN: None}
    contenders |= {fitted.variant.name: fitted for fitted in variants}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    until_s = time.monotonic() + limit_s
    for done in range(rounds):
        if done and time.monotonic() > until_s:
            break
        for name in rng.sample(sorted(contenders), len(contenders)):
            bench.use(contenders[name])
            times[name].append(bench.seconds(contenders[name], prompt))
    return [
        {
            "variant": name,
            "tokens": len(prompt),
            "rounds": len(own),
            "bare_ms": statistics.median(times[BARE]) * 1e3,
            "ms": statistics.median(own) * 1e3,
            **overhead(own, times[BARE]),
        }
        for name, own in times.items()
        if name != BARE
    ]
