"""The tables of the comparison with Ray Serve LLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.comparison.table import KINDS, LONGEST, spread
from benchmarks.report import markdown, result

_STOCK: Final = "Ray Serve LLM"
_SERVERS: Final = {
    "stock-shipped": f"{_STOCK} as shipped",
    "stock-chunked": f"{_STOCK}, chunks of {{chunks}}",
    "stock-priority": f"{_STOCK}, vLLM's priorities, {{chunks}}",
    "stock-pools": f"{_STOCK}, a pool for each tier",
    "slackserve-chunked": "SlackServe, no preemption, chunks of {chunks}",
    "slackserve-sedf": "SlackServe, S-EDF and its rule when to stop",
    "slackserve-whole": "SlackServe, whole prompts",
    "slackserve": "**SlackServe**",
}


def comparison() -> str:
    """Who had how many in time on one machine, and when first tokens came."""
    found = result("comparison")
    rows = []
    for row in found["summary"]:
        ttft = row["ttft_ms"]
        rows.append(
            [
                f"{row['load']:g}",
                _server(row["arm"], found),
                str(row["rounds"]),
                *(_attained(row[kind]) for kind in ("urgent", "long")),
                *(_first_tokens(ttft[kind], end) for kind, end in zip(KINDS, LONGEST, strict=True)),
                f"{row['prompt_tokens_ps']:.0f}",
                f"{row['preemptions']:,}" if row["preemptions"] else "",
                f"{row['unserved']}" if row["unserved"] else "",
            ]
        )
    columns = ["Load", "", "Rounds", "Urgent in time", "Long in time", "Urgent TTFT p50 / p99"]
    return markdown([*columns, "Long p50 / longest", "Tokens/s", "Stops", "Not served"], rows)


def comparison_in_short() -> str:
    """Stock as shipped, tuned in both ways, with two pools, and ours, at each load."""
    found = result("comparison")
    rows = []
    for load in sorted({row["load"] for row in found["summary"]}):
        here = {row["arm"]: row for row in found["summary"] if row["load"] == load}
        for arm in ("stock-shipped", "stock-chunked", "stock-priority", "stock-pools", "slackserve"):
            row = here[arm]
            cells = [_attained(row["urgent"]), _attained(row["long"]), f"{row['prompt_tokens_ps']:.0f}"]
            rows.append([f"{load:g}", _server(arm, found), *cells])
    return markdown(["Load", "", "Urgent in time", "Long in time", "Prompt tokens/s"], rows)


def comparison_paired() -> str:
    """What ours has more in time than each other arm, on the same requests."""
    found = result("comparison")
    rows = [
        [
            f"{row['load']:g}",
            _server(row["arm"], found),
            *(_points(row[kind]) for kind in ("urgent", "long")),
            f"{row['throughput_ratio'] - 1:+.1%}",
        ]
        for row in found["paired"]
    ]
    return markdown(["Load", "SlackServe and", "Urgent in time", "Long in time", "Prompt tokens/s"], rows)


def comparison_tpot() -> str:
    """Time per output token after the first, by arm and kind, in each round that all arms served."""
    found = result("comparison")
    arms, runs = found["settings"]["arms"], found["runs"]
    by_arm = [{run["round"] for run in runs if run["arm"] == arm} for arm in arms]
    rounds = sorted(set.intersection(*by_arm))
    at = {(run["load"], run["arm"], run["round"]): run["tpot_ms"] for run in runs}
    rows = [
        [
            f"{load:g}",
            _server(arm, found),
            *(
                f"{', '.join(f'{at[load, arm, number][kind][point]:.0f}' for number in rounds)} ms"
                for kind in KINDS
                for point in ("p50", "p99")
            ),
        ]
        for load in found["settings"]["loads"]
        for arm in arms
    ]
    return markdown(["Load", "", "Urgent TPOT p50", "p99", "Long TPOT p50", "p99"], rows)


def _points(cell: Mapping[str, Any]) -> str:
    def shown(share: float) -> str:
        return f"{100 * share:+.0f}"

    return f"{shown(cell['points'])} points ({spread(cell, shown)})"


def _server(arm: str, found: Mapping[str, Any]) -> str:
    chunks = found["chosen"].get(arm, "")
    step, _, of_one = chunks.partition("/")
    if of_one:
        chunks = f"steps of {step}, at most {of_one} of a long one"
    return _SERVERS[arm].format(chunks=chunks)


def _attained(cell: Mapping[str, Any]) -> str:
    return f"{cell['attained']:.0%} ({spread(cell, '{:.0%}'.format)})"


def _first_tokens(cell: Mapping[str, float], end: str) -> str:
    return f"{cell['p50'] / 1e3:.2f} / {cell[end] / 1e3:.1f} s" if cell else ""


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "comparison": comparison,
    "comparison-in-short": comparison_in_short,
    "comparison-paired": comparison_paired,
    "comparison-tpot": comparison_tpot,
}
