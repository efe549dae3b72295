"""The servers' boundaries, vote, checkpoint and launch-ahead on a decoder of Llama-3-8B's shape, on one GPU.

Needs PyTorch, NumPy and msgspec, neither vLLM nor Ray. Each part is written as soon as it is measured.

    python -m benchmarks.gpu.mechanism                                     # bounded for about five minutes
    python -m benchmarks.gpu.mechanism --quick                             # fewer repetitions
    python -m benchmarks.gpu.mechanism --part stops --ahead-ms 0.5 1 2     # only this, of the finest variants
    python -m benchmarks.gpu.mechanism --tiny                              # a small model, also without a GPU
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.gpu.decoder import fast_attention, random_decoder
from benchmarks.gpu.device import Device
from benchmarks.gpu.exactness import against_float64, exactness, resume_overhead
from benchmarks.gpu.operator_times import time_operators, time_passes, write_operators, write_profile
from benchmarks.gpu.stops import stop_latencies, stopping, urgent_alone
from benchmarks.gpu.variants import UNBOUNDED, Bench, Fitted, Variant, idle_overhead
from benchmarks.report import Measurements, print_rows, print_table
from prefill_node.board.board import Board
from prefill_node.worker.boundary import BoundaryLevel
from simulator.cost.operators import LLAMA_3_8B, ModelShape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


STOP_P50_MS: Final = 2.0
STOP_P99_MS: Final = 5.0
IDLE_OVERHEAD: Final = 0.005
_WARM_UP: Final = "warm up"
SMALL: Final = ModelShape(layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32)


@dataclass(frozen=True, slots=True)
class MechanismPlan:
    """What is measured, and for how long at most.

    Attributes:
        model: Its name in the table of operator times.
        tokens: Length of the prompt that is stopped.
        other_tokens: Further lengths, for the two variants that matter most.
        moments: Stops of the variants that matter; others get a third, and half the time.
        row_s: Seconds for the stops of one variant.
        longest_delay_s: A stop is ordered within so long after a pass has begun or gone on: several layers.
        idle_tokens: Prompt lengths of the idle overhead, the first in any case.
        idle_s: Seconds for the first, and for all variants at that length; others get a third.
        exact_tokens: Prompt that is stopped at every boundary, or at `exact_most` of them.
        operator_tokens: Lengths of the profiles.
        float64_tokens: Length of the prompt that is computed in float64 as well.
        limit_s: After so many seconds no further part is begun.
        parts: Names of those that are measured; empty for all.
        ahead_ms: Launch-aheads that are compared at the finest boundaries, in place of all variants.
    """

    shape: ModelShape = LLAMA_3_8B
    vocabulary: int = 128_256
    model: str = "Meta-Llama-3-8B"
    tokens: int = 8192
    other_tokens: tuple[int, ...] = (2048, 16_384)
    urgent_tokens: int = 64
    moments: int = 500
    row_s: float = 16.0
    longest_delay_s: float = 0.040
    idle_tokens: tuple[int, ...] = (8192, 2048, 512, 16_384)
    idle_rounds: int = 40
    idle_s: float = 30.0
    exact_tokens: int = 2048
    exact_max_stops: int = 64
    resume_repeats: int = 15
    resume_s: float = 8.0
    operator_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
    operator_repeats: int = 15
    float64_tokens: int = 300
    limit_s: float = 480.0
    parts: tuple[str, ...] = ()
    ahead_ms: tuple[float, ...] = ()


FULL: Final = MechanismPlan()
QUICK: Final = replace(
    FULL,
    moments=100,
    row_s=4.0,
    other_tokens=(),
    idle_tokens=(8192, 512),
    idle_rounds=8,
    idle_s=10.0,
    exact_max_stops=8,
    resume_repeats=4,
    operator_tokens=(512, 2048, 8192),
    operator_repeats=5,
    limit_s=90.0,
)
TINY: Final = replace(
    FULL,
    shape=SMALL,
    vocabulary=256,
    model="small",
    tokens=256,
    other_tokens=(128,),
    urgent_tokens=16,
    moments=6,
    row_s=0.3,
    longest_delay_s=0.002,
    idle_tokens=(128,),
    idle_rounds=3,
    idle_s=1.0,
    exact_tokens=96,
    exact_max_stops=20,
    resume_repeats=2,
    resume_s=0.5,
    operator_tokens=(32, 64, 128),
    operator_repeats=3,
    float64_tokens=64,
    limit_s=600.0,
)


def variants() -> list[Variant]:
    """All that are compared; those that matter most come first."""
    finest, *coarser = list(BoundaryLevel)[::-1]
    ours = [Variant(finest, 2), Variant(BoundaryLevel.LAYER, 2)]
    baselines = [Variant(finest, UNBOUNDED, "sync"), Variant(BoundaryLevel.LAYER, UNBOUNDED, "all-reduce")]
    others = [Variant(each, ahead) for each in (finest, *coarser) for ahead in (1, 2, 4)]
    unbounded = [Variant(each, UNBOUNDED) for each in (finest, *coarser)]
    return [*dict.fromkeys([*ours, *baselines, *others, *unbounded])]


def _chosen(plan: MechanismPlan) -> list[Variant]:
    finest = list(BoundaryLevel)[-1]
    return [Variant(finest, ahead) for ahead in plan.ahead_ms] or variants()


class Mechanism:
    """One run: measures part after part and keeps what it has found."""

    def __init__(
        self, plan: MechanismPlan, bench: Bench, board: Board, findings: Measurements, seed: int
    ) -> None:
        self.plan = plan
        self.bench = bench
        self.board = board
        self.findings = findings
        self.seed = seed
        self.until_s = time.monotonic() + plan.limit_s
        fitted = [(variant, bench.fit(variant)) for variant in _chosen(plan)]
        self.fitted = [each for _, each in fitted if each is not None]
        missing = sorted({variant.granularity.value for variant, each in fitted if each is None})
        findings.add("fitted", {"variants": [each.variant.name for each in self.fitted], "missing": missing})
        self.urgent = bench.prompt("urgent", plan.urgent_tokens)

    def run(self) -> None:
        """Everything, the most important first."""
        with fast_attention(self.bench.device.torch):
            self._measure()
        self._stage("float64", self._float64)

    def _measure(self) -> None:
        plan = self.plan
        self._stage(_WARM_UP, self._warm_up)
        # The finest and the coarsest with the default launch-ahead, and the two baselines.
        ours, main, others = self.fitted[:2], self.fitted[:4], self.fitted[4:]
        third = plan.moments // 3
        self._stage("exactness", lambda: self._exactness(ours, plan.exact_tokens, plan.exact_max_stops))
        with stopping(self.board) as stopper:
            stops = partial(self._stops, stopper)
            self._stage("stops", lambda: stops(main, plan.tokens, plan.moments, plan.row_s))
            self._stage("idle", lambda: self._idle(plan.idle_tokens[0], main, plan.idle_s))
            self._stage("resume", lambda: self._resume(ours))
            self._stage("profiles", self._profiles)
            for tokens in plan.idle_tokens[1:]:
                self._stage(f"idle at {tokens}", partial(self._idle, tokens, main, plan.idle_s / 3))
            self._stage("stops, others", lambda: stops(others, plan.tokens, third, plan.row_s / 2))
            for tokens in plan.other_tokens:
                self._stage(f"stops at {tokens}", partial(stops, ours, tokens, third, plan.row_s / 2))
        self._stage("exactness, long", lambda: self._exactness(ours, plan.tokens, plan.exact_max_stops // 8))
        self._stage("idle, others", lambda: self._idle(plan.idle_tokens[0], others, plan.idle_s))
        self.bench.use(None)

    def _stage(self, name: str, work: Callable[[], None]) -> None:
        if self.plan.parts and name not in (_WARM_UP, *self.plan.parts):
            return
        if time.monotonic() > self.until_s:
            self.findings.add("left_out", {"part": name, "why": "no time left"})
            return
        started_s = time.monotonic()
        work()
        self.findings.add("parts", {"part": name, "seconds": round(time.monotonic() - started_s, 2)})

    def _warm_up(self) -> None:
        self.bench.warm_up(self.fitted, self.bench.prompt("warm-up", self.plan.tokens))
        self.bench.warm_up([], self.bench.prompt("warm-up", max(self.plan.idle_tokens)))

    def _exactness(self, chosen: Sequence[Fitted], tokens: int, max_stops: int) -> None:
        prompt, rng = self.bench.prompt("exact", tokens), self._rng(f"exact {tokens}")
        rows = []
        for fitted in chosen:
            rows.append(exactness(self.bench, fitted, prompt, self.urgent, max_stops, rng))
            self.findings.add("exactness", rows[-1])
        columns = ("variant", "tokens", "stopped_at", "bitwise_equal", "checkpoint_bytes", "two_rows_bytes")
        title = "Stopped, another prompt in between, resumed; logits and KV bit by bit"
        print_rows(title, rows, {column: column for column in columns})

    def _stops(
        self, stopper: Connection, chosen: Sequence[Fitted], tokens: int, moments: int, limit_s: float
    ) -> None:
        victim, rng, rows = self.bench.prompt("victim", tokens), self._rng(f"stops {tokens}"), []
        delays_s = (rng.uniform(0.0, self.plan.longest_delay_s) for _ in itertools.count())
        for fitted in chosen:
            if time.monotonic() > self.until_s:
                break
            alone = urgent_alone(self.bench, fitted, self.urgent, 20)
            found = stop_latencies(
                self.bench, fitted, stopper, victim, self.urgent, (moments, limit_s), delays_s
            )
            row = {"variant": fitted.variant.name, "tokens": len(victim)}
            rows.append(row | found | {"urgent_alone_ms": alone})
            self.findings.add("stops", rows[-1])
        print_rows(
            f"Signal to idle device at {tokens} tokens, ms; then the urgent prompt",
            rows,
            {
                "variant": "variant",
                "n": "moments",
                **{point: f"idle_ms.{point}" for point in ("p50", "p90", "p99", "max")},
                "1st kernel p50": "first_kernel_ms.p50",
                "urgent p50": "urgent_ttft_ms.p50",
                "urgent p99": "urgent_ttft_ms.p99",
                "alone p50": "urgent_alone_ms.p50",
            },
        )

    def _idle(self, tokens: int, chosen: Sequence[Fitted], limit_s: float) -> None:
        prompt, rng = self.bench.prompt("idle", tokens), self._rng(f"idle {tokens}")
        rows = idle_overhead(self.bench, chosen, prompt, self.plan.idle_rounds, limit_s, rng)
        self.findings.add("idle", *rows)
        print_rows(
            f"Boundaries that never stop, {tokens} tokens",
            [
                row
                | {
                    "overhead": f"{row['overhead']:+.2%}",
                    "quartiles": " to ".join(f"{edge:+.2%}" for edge in row["quartiles"]),
                }
                for row in rows
            ],
        )

    def _resume(self, chosen: Sequence[Fitted]) -> None:
        plan, rng = self.plan, self._rng("resume")
        prompt, rows = self.bench.prompt("resumed", plan.tokens), []
        for fitted in chosen:
            rows.append(resume_overhead(self.bench, fitted, prompt, plan.resume_repeats, plan.resume_s, rng))
            self.findings.add("resume", rows[-1])
        print_rows(f"Stopped at a random boundary and resumed at once, {plan.tokens} tokens", rows)

    def _profiles(self) -> None:
        plan, directory, about = self.plan, self.findings.path.parent, self.findings.about
        device = self.bench.device
        rows = time_operators(self.bench.decoder, device, plan.operator_tokens, plan.operator_repeats)
        self.findings.add("operators", *rows)
        write_operators(directory / "operators.csv", about["device"]["name"], plan.model, rows)
        samples = time_passes(self.bench, plan.operator_tokens, max(2, plan.operator_repeats // 3))
        write_profile(directory / "profile.json", samples, about)
        self.findings.add("passes", *({"tokens": s.tokens, "ms": s.measured_s * 1e3} for s in samples))

    def _float64(self) -> None:
        device, tokens = self.bench.device, self.plan.float64_tokens
        rows = [
            against_float64(SMALL, 256, Variant(each, 1), device, self.board, self.seed, tokens)
            for each in BoundaryLevel
        ]
        self.findings.add("float64", *(row for row in rows if row is not None))

    def _rng(self, part: str) -> random.Random:
        return random.Random(f"{self.seed} {part}")


def verdicts(results: dict[str, list[dict[str, Any]]], *, is_gpu: bool) -> list[list[str]]:
    """What was to be reached, what was, and by which variant; times of a host say nothing."""
    rows = _times_reached(results) if is_gpu else []
    for row in results.get("exactness", []):
        equal = f"{row['bitwise_equal']}/{row['stopped_at']}"
        rows.append(["resumed exactly", "all", equal, row["variant"], _met(not row["differing"])])
        limit, mib = (f"{row[name] / 2**20:.2f}" for name in ("two_rows_bytes", "checkpoint_bytes"))
        rows.append(["checkpoint, MiB", limit, mib, row["variant"], _met(row["within_two_rows"])])
    return rows


def _times_reached(results: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Of our variant that stops soonest."""
    rows = []
    stops = [row for row in results.get("stops", []) if "ahead" in row["variant"] and row["idle_ms"]]
    stops = [row for row in stops if row["tokens"] == stops[0]["tokens"]]
    if stops:
        best = min(stops, key=lambda row: row["idle_ms"]["p99"])
        for point, target in (("p50", STOP_P50_MS), ("p99", STOP_P99_MS)):
            value = best["idle_ms"][point]
            met = _met(value <= target)
            rows.append([f"stop {point}, ms", f"{target:g}", f"{value:.2f}", best["variant"], met])
    idle = [row for row in results.get("idle", []) if "ahead" in row["variant"]]
    for tokens in dict.fromkeys(row["tokens"] for row in idle):
        chosen = [row for row in idle if row["tokens"] == tokens]
        row = next((row for row in chosen if stops and row["variant"] == best["variant"]), chosen[0])
        met = _met(row["overhead"] <= IDLE_OVERHEAD)
        measured = f"{row['overhead']:+.2%}"
        rows.append([f"idle overhead, {tokens}", f"{IDLE_OVERHEAD:.1%}", measured, row["variant"], met])
    return rows


def _met(holds: bool) -> str:  # noqa: FBT001 - a word for a truth
    return "met" if holds else "MISSED"


@contextmanager
def lone_group(device: Device) -> Iterator[ProcessGroup]:
    """A process group of this process alone, over the device's own transport."""
    with tempfile.TemporaryDirectory() as directory:
        torch.distributed.init_process_group(
            "nccl" if device.is_gpu else "gloo",
            init_method=f"file://{directory}/store",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=60),
        )
        try:
            yield torch.distributed.group.WORLD
        finally:
            torch.distributed.destroy_process_group()


def measure(plan: MechanismPlan, device: Device, out: Path, seed: int) -> Measurements:
    """Measure a plan; results are in `mechanism.json`, `operators.csv` and `profile.json`."""
    findings = Measurements(
        out / "mechanism.json", {"device": device.about(), "seed": seed, "model": plan.model}
    )
    with ExitStack() as stack, torch.inference_mode():
        board = stack.enter_context(Board.create(1))
        group = stack.enter_context(lone_group(device))
        dtype = torch.bfloat16 if device.is_gpu else torch.float32
        decoder = random_decoder(plan.shape, plan.vocabulary, dtype, device.torch, seed)
        Mechanism(plan, Bench(decoder, device, board, group, seed), board, findings, seed).run()
    rows = verdicts(findings.results, is_gpu=device.is_gpu)
    columns = ["what", "target", "measured", "variant", "verdict"]
    findings.add("targets", *(dict(zip(columns, row, strict=True)) for row in rows))
    print_table("Targets", columns, rows)
    return findings


def main() -> None:
    """Measure with the plan that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--tiny", action="store_true", help="a small model; its times say nothing")
    parser.add_argument(
        "--part", nargs="+", action="extend", default=[], help='such as stops, "idle at 512", profiles'
    )
    parser.add_argument(
        "--ahead-ms", nargs="+", action="extend", type=float, default=[], help="with the finest boundaries"
    )
    parser.add_argument("--limit-s", type=float, help="after so many seconds no further part is begun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    arguments = parser.parse_args()
    device = Device.found()
    if not device.is_gpu:
        torch.set_num_threads(1)
    plan = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    plan = replace(plan, parts=tuple(arguments.part), ahead_ms=tuple(arguments.ahead_ms))
    if arguments.limit_s:
        plan = replace(plan, limit_s=arguments.limit_s)
    if not device.is_gpu and not arguments.tiny:
        parser.error("there is no GPU that PyTorch can use; --tiny runs on the host")
    print(measure(plan, device, arguments.out, arguments.seed).path)


if __name__ == "__main__":
    main()
