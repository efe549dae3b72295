"""The whole application on one GPU, Ray included: both tiers share it, and KV moves between them over NIXL.

Serves dummy weights of Llama-3-8B's shape, once in each way to run prefill. In each, rounds alternate between
an urgent prompt alone, a long one alone, and an urgent one that arrives while the long one is prefilled; then
streams are decoded together. Prompts are random tokens, so nothing comes from the prefix cache.

    python -m benchmarks.gpu.serving                              # all modes
    python -m benchmarks.gpu.serving --mode resume --rounds 20    # one of them
    python -m benchmarks.gpu.serving --tiny                       # a small model, on a host without a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.device import Device
from benchmarks.gpu.governed_engine import write_model
from benchmarks.harness.in_turn import in_turn
from benchmarks.harness.local_server import client, embedded_settings, logged, served
from benchmarks.harness.tiny_models import write_tokenizer
from benchmarks.harness.urgent_among_long import rounds
from benchmarks.report import Measurements, print_rows, summary, summary_ms
from simulator.cost.operators import LLAMA_3_8B, ModelShape
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

PORT: Final = 18441
SEED: Final = 21
MODES: Final = {
    "resume": {"mode": "resume"},
    "compiled": {"mode": "resume", "compiled": True},
    "off": {"mode": "off"},
}
"""Prefill that stops, eager and compiled; and vLLM's own, compiled, which does not."""
_FIRST_TOKEN: Final = 300
"""Prompts are drawn from the tokens behind those of the tokenizer's alphabet and marks."""
_URGENT: Final = Arrival(0, 0.0, "urgent", 64, 2, ttft_s=0.08, tier=PREMIUM)
_LONG: Final = Arrival(0, 0.0, "long", 8192, 2, ttft_s=None, tier=BACKGROUND)
_STREAM: Final = Arrival(0, 0.0, "stream", 512, 128, ttft_s=None, tier=STANDARD)


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What is measured.

    Attributes:
        urgent: Arrives while the long prompt is prefilled.
        stream: One of those that are decoded together.
        kv_bytes: KV memory of each tier on a GPU.
    """

    shape: ModelShape = LLAMA_3_8B
    vocabulary: int = 128_256
    longest: int = 32_768
    urgent: Arrival = _URGENT
    long: Arrival = _LONG
    stream: Arrival = _STREAM
    streams: int = 8
    rounds: int = 30
    kv_bytes: int = 12 * 2**30


FULL: Final = ServingPlan()
TINY: Final = replace(
    FULL,
    shape=ModelShape(layers=16, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32),
    vocabulary=512,
    longest=8192,
    urgent=replace(FULL.urgent, tokens=16, ttft_s=0.5),
    long=replace(FULL.long, tokens=6144),  # so long that the urgent ones cannot wait for its end
    stream=replace(FULL.stream, tokens=64, output_tokens=16),
    streams=2,
    rounds=2,
)


def settings(plan: ServingPlan, model: Path, mode: str, *, is_gpu: bool) -> dict[str, Any]:
    """The configuration of one mode; on a GPU each tier has half of it."""
    engine: dict[str, Any] = {"load_format": "dummy"}
    pool: dict[str, Any] = {"engine_kwargs": engine}
    given: dict[str, Any] = {"preemption": MODES[mode]}
    if is_gpu:
        engine["kv_cache_memory_bytes"] = plan.kv_bytes
        pool["gpus_per_worker"] = 0.5
        given |= {"accelerator": "cuda", "handoff_ms": 5}
    return embedded_settings(
        port=PORT,
        model=str(model),
        max_model_len=plan.longest,
        monitor={"shed": False},
        prefill=pool,
        decode=pool,
        **given,
    )


async def measured(plan: ServingPlan) -> dict[str, Any]:
    """Milliseconds to first tokens, and between tokens of streams that are decoded together."""
    vocabulary = range(_FIRST_TOKEN, plan.vocabulary)
    async with client(PORT, SEED, vocabulary) as asked:
        times = await rounds(asked, plan.urgent, plan.long, plan.rounds)
        await asked.answers(plan.stream)
        answers = await asked.answers(*[plan.stream] * plan.streams)
    tpots_s = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    return {
        "ttft_ms": {name: summary_ms(values) for name, values in times.items()},
        "tpot_ms": summary_ms(tpots_s),
        "streams": plan.streams,
        "output_tokens": [answer.output_tokens for answer in answers],
    }


def serve(plan: ServingPlan, mode: str, directory: Path, out: Path, *, is_gpu: bool) -> dict[str, Any]:
    """Serve and measure one mode; its log is kept as `serving-MODE.log`."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    write_model(model, plan.shape, plan.vocabulary, plan.longest)
    write_tokenizer(model, plan.vocabulary)
    log = directory / "log"
    try:
        with served(directory, settings(plan, model, mode, is_gpu=is_gpu)):
            found = asyncio.run(measured(plan))
    finally:
        if log.exists():
            (out / f"serving-{mode}.log").write_bytes(log.read_bytes())
    text = log.read_text()
    stops_ms = logged(text, "prefill_stopped", "stop_ms")
    overheads_s = logged(text, "prefill_resumed", "overhead_s")
    return {
        "mode": mode,
        **found,
        "stops": len(stops_ms),
        "order_to_stop_ms": summary(stops_ms),
        "resume_overhead_ms": summary_ms(overheads_s),
    }


def main() -> None:
    """Measure each mode on a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mode", choices=[*MODES], action="append", help="may be repeated; all by default")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tiny", action="store_true", help="a small model; its times say nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    arguments = parser.parse_args()
    device = Device.found()
    if not device.is_gpu and not arguments.tiny:
        parser.error("there is no GPU that PyTorch can use; --tiny runs on the host")
    plan = TINY if arguments.tiny else FULL
    if arguments.rounds:
        plan = replace(plan, rounds=arguments.rounds)
    findings = Measurements(
        arguments.out / "serving.json", {"device": device.about(), "seed": SEED, "plan": asdict(plan)}
    )

    def measured(mode: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            found = serve(plan, mode, Path(directory), arguments.out, is_gpu=device.is_gpu)
        findings.add("modes", found)
        times = [{"time": name, **row} for name, row in found["ttft_ms"].items()]
        print_rows(f"{mode}: {found['stops']} stops; time to first token, ms", times)
        print(f"between tokens of {plan.streams} streams, ms: {found['tpot_ms']}", flush=True)

    try:
        in_turn(arguments.mode or [*MODES], measured)
    finally:
        print(findings.path)


if __name__ == "__main__":
    main()
