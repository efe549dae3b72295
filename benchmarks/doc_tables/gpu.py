"""The tables of docs/gpu.md, from the results of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.report import RESULTS, markdown, result
from slo.predict.prefill_time import Sample, fit

_ARMS: Final = {"stock": "vLLM as shipped", "slackserve": "**SlackServe**, eager"}


def stops() -> str:
    """From an order to the idle device, by variant, measured and as the simulator has it."""
    said = {row["variant"]: row for row in result("gpu/predicted")["stops"]}
    rows = []
    for name, row in [*_by_variant("mechanism"), *_by_variant("mechanism_ahead")]:
        idle, guess = row["idle_ms"], said.get(name)
        predicted = "" if guess is None else f"{guess['p50']:.2f} / {guess['p99']:.2f}"
        decided = f"{row['decided_ms']['p50']:.2f} / {row['decided_ms']['p99']:.2f}"
        measured = [f"{idle['p50']:.2f} / {idle['p99']:.2f}", f"{idle['max']:.2f}"]
        rows.append([name, str(row["moments"]), decided, *measured, predicted])
    columns = ["stops at", "stops", "seen by the host", "device idle", "longest", "predicted"]
    return markdown(columns, rows)


def _by_variant(name: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(row["variant"], row) for row in result(f"gpu/{name}")["stops"]]


def idle() -> str:
    """What boundaries cost a pass that nobody stops."""
    rows = [[row["variant"], f"{row['ms']:.1f}", *_cost(row)] for row in result("gpu/mechanism")["idle"]]
    (row,) = result("gpu/engine-slackserve")["idle"]
    rows.append([_ARMS["slackserve"] + ", in vLLM", f"{row['with_ms']:.1f}", *_cost(row)])
    return markdown(["", "pass, ms", "longer by", "95 % interval"], rows)


def _cost(row: Mapping[str, Any]) -> list[str]:
    low, high = row["interval"]
    return [f"{row['overhead']:+.1%}", f"{low:+.1%} to {high:+.1%}"]


def urgent() -> str:
    """First tokens of an urgent prompt, alone and during a long prefill, by arm."""
    rows = []
    for arm, title in _ARMS.items():
        (row,) = result(f"gpu/engine-{arm}")["urgent"]
        steps = [row[step] for step in ("order_to_stop_ms", "stop_to_service_ms", "resume_overhead_ms")]
        rows.append(
            [
                title,
                _span(row["alone_ms"]),
                _span(row["during_ms"]),
                f"{row['added_p99_ms']:+.1f}",
                f"{row['victim_alone_ms']:.0f}",
                f"{row['victim_ms']['p50']:.0f}",
                *(_span(step) if step else "" for step in steps),
            ]
        )
    columns = ["", "alone", "during the long one", "added at p99", "long one alone", "with it"]
    stages = ["order to stop", "stop to the urgent one's first operator", "resume to the long one's"]
    return markdown([*columns, *stages], rows)


def _span(times: Mapping[str, float]) -> str:
    return f"{times['p50']:.1f} / {times['p99']:.1f}"


def passes() -> str:
    """Whole passes of the plain decoder by length: measured, by the simulator, and as a replica predicts.

    A replica measures the lengths of its warm-up, each twice, and goes by the shorter.
    """
    profile = json.loads((RESULTS / "gpu" / "profile.json").read_text())
    samples = [Sample(**sample) for sample in profile["samples"]]

    def warm_up(lengths: Sequence[int]) -> list[Sample]:
        twice = {tokens: [one for one in samples if one.tokens == tokens][:2] for tokens in lengths}
        return [Sample(tokens, min(one.measured_s for one in found)) for tokens, found in twice.items()]

    short, long = warm_up((64, 256, 1024)), warm_up((64, 512, 2048, 8192))
    said = [fit(short), fit(short, has_floor=True), fit(long, has_floor=True)]
    rows = [
        [
            f"{row['tokens']:,}",
            f"{row['measured_ms']:.1f}",
            f"{row['predicted_ms']:.1f}",
            *[f"{each.predictor.prefill_s(row['tokens']) * 1e3:.1f}" for each in said],
        ]
        for row in result("gpu/predicted")["passes"]
    ]
    lines = ["a line through 64, 256 and 1,024 tokens", "with a floor", "with a floor, up to 8,192 tokens"]
    return markdown(["tokens", "measured, ms", "the simulator", *lines], rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "gpu-stops": stops,
    "gpu-idle": idle,
    "gpu-urgent": urgent,
    "gpu-passes": passes,
}
