"""The tables of the presets and traces in virtual time: goodput, who is late, how soon passes stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.report import markdown, result
from simulator.arms.arms import ARMS

_OURS: Final = "slackserve"
_FIRST: Final = "fcfs"
_PEERS: Final = ("sedf-resume", "sedf-chunked", "sedf-recompute")
MODELS: Final = {"8b": "Llama-3-8B", "14b": "Qwen2.5-14B", "70b": "Llama-3-70B, TP 4"}
MIXES: Final = {f"flowprefill-{model}": title for model, title in MODELS.items()}
"""By preset with one of FlowPrefill's mixes: its model."""
_TRACES: Final = {
    "flowprefill-8b@mooncake_conversation": "Mooncake, conversation",
    "flowprefill-8b@azure_llm_2023_conv": "Azure 2023, conversation",
}
_LEVELS: Final = {"0.90": "90 % in time", "0.99": "99 % in time"}
_BLOG: Final = "blog-70b"
_BLOG_RATES: Final = (2.0, 4.0, 6.0)
_URGENT: Final = "urgent"
_TIERS: Final = "tiers-70b"
_NAMED_TIERS: Final = ("premium", "standard", "background")
_SHOWN_RATES: Final = 6


def _title(arm: str, ours: str = _OURS) -> str:
    title = ARMS[arm].title
    return f"**{title}**" if arm == ours else title


def goodput(presets: Mapping[str, str], level: str) -> str:
    """Goodput of each arm, over first come, first served, and ours over the peers."""
    found = {preset: result("cores/simulation")[preset]["goodput_rps"] for preset in presets}
    arms = found[next(iter(presets))]
    rows = [
        [
            _title(arm),
            *(
                f"{of[arm][level]:.2f} ({of[arm][level] / of[_FIRST][level]:.1f}×)"  # noqa: RUF001
                for of in found.values()
            ),
        ]
        for arm in arms
    ]
    rows += [
        [
            f"{ARMS[_OURS].title} over {ARMS[peer].title}",
            *(f"{of[_OURS][level] / of[peer][level]:.2f}×" for of in found.values()),  # noqa: RUF001
        ]
        for peer in _PEERS
    ]
    return markdown([f"{_LEVELS[level]}, requests/s (× FCFS)", *presets.values()], rows)  # noqa: RUF001


def by_kind(presets: Mapping[str, str], kinds: Sequence[str]) -> str:
    """What each kind has in time where 90 % of all are, at each arm's own goodput."""
    found = result("cores/simulation")
    rows = []
    for arm in found[next(iter(presets))]["goodput_rps"]:
        row = [_title(arm)]
        for preset in presets:
            here = found[preset]
            rate_rps = here["goodput_rps"][arm]["0.90"]
            point = _at(here["points"][arm], rate_rps)
            shares = " / ".join(f"{100 * point['by_kind'][kind]:.0f}" for kind in kinds)
            row.append(f"{shares} % at {rate_rps:.2f}")
        rows.append(row)
    return markdown([" / ".join(kinds) + " in time", *presets.values()], rows)


def stopped() -> str:
    """How long running passes go on after an order to stop."""
    found = {preset: result("cores/simulation")[preset]["blocking_ms"] for preset in MIXES}
    arms = list(found[next(iter(MIXES))])
    rows = [
        [_title(arm), *(f"{of[arm]['mean']:.1f} / {of[arm]['p99']:.0f}" for of in found.values())]
        for arm in arms
    ]
    ratios = [of["sedf-resume-layer"]["mean"] / of["sedf-resume"]["mean"] for of in found.values()]
    rows.append(["layers over operators, mean", *(f"{ratio:.1f}×" for ratio in ratios)])  # noqa: RUF001
    return markdown(["stopped, mean / p99 ms", *MIXES.values()], rows)


def tradeoff() -> str:
    """How soon one long prefill stands still, and what that costs, by where it can be stopped."""
    rows = [
        [row["label"], f"{row['mean_ms']:.1f}", f"{row['p99_ms']:.1f}", f"{row['cost_percent']:.1f} %"]
        for row in result("cores/simulation")["tradeoff"]
    ]
    return markdown(["stops at", "mean, ms", "p99, ms", "the prefill takes longer by"], rows)


def aborting() -> str:
    """What the blog's arm has of urgent prompts and of all in time, and how often it stops one."""
    rows = []
    for arm, points in result("cores/simulation")[_BLOG]["points"].items():
        row = [_title(arm).replace("Blog: ", "")]
        for rate_rps in _BLOG_RATES:
            at = _at(points, rate_rps)
            in_time = f"{100 * at['by_kind'][_URGENT]:.0f} % ({100 * at['attainment']:.0f} %)"
            row.append(f"{in_time}, {at['preemptions']:.2f}")
        rows.append(row)
    first, *others = (f"{rate_rps:g}" for rate_rps in _BLOG_RATES)
    return markdown(["urgent in time (all), stops per request", f"{first} requests/s", *others], rows)


def tiers() -> str:
    """What each tier has in time, by rate and arm."""
    here = result("cores/simulation")[_TIERS]
    points, goodputs = here["points"], here["goodput_rps"]
    common = set.intersection(*({point["rate_rps"] for point in of_arm} for of_arm in points.values()))
    rates = sorted(common)[:_SHOWN_RATES]
    rows = [
        [
            _title(arm),
            *(
                " / ".join(f"{100 * _at(of_arm, rate)['by_tier'][tier]:.1f}" for tier in _NAMED_TIERS)
                for rate in rates
            ),
            f"{goodputs[arm]['0.90']:.2f}/s",
        ]
        for arm, of_arm in points.items()
    ]
    columns = [" / ".join(_NAMED_TIERS) + " in time", *(f"{rate:.2f}/s" for rate in rates), "90 % of all"]
    return markdown(columns, rows)


def _at(points: Sequence[Mapping[str, Any]], rate_rps: float) -> Mapping[str, Any]:
    (point,) = [each for each in points if each["rate_rps"] == rate_rps]
    return point


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "simulation-90": lambda: goodput(MIXES, "0.90"),
    "simulation-99": lambda: goodput(MIXES, "0.99"),
    "simulation-traces-90": lambda: goodput(_TRACES, "0.90"),
    "simulation-traces-99": lambda: goodput(_TRACES, "0.99"),
    "simulation-kinds": lambda: by_kind(MIXES, ("text", "image", "search", "file")),
    "simulation-kinds-traces": lambda: by_kind(_TRACES, ("text", "search", "file")),
    "simulation-stops": stopped,
    "simulation-tradeoff": tradeoff,
    "simulation-aborting": aborting,
    "simulation-tiers": tiers,
}
