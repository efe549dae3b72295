"""The tables of preemption: votes, stops, what both cost, and its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, Final, TypeAlias

from benchmarks.report import markdown, result


def votes(file: str) -> str:
    """What a vote takes, by transport and ranks."""
    found = result(file)
    alone = f"{found['lone_boundary_us']:.2f} µs (mean)"
    rows = [
        [row["transport"], str(row["ranks"]), *(_took(row["us"][point]) for point in ("p50", "p99"))]
        for row in found["rows"]
    ]
    none = ["none: what one rank does at a boundary", "1", alone, ""]
    return markdown(["Transport", "Ranks", "p50", "p99"], [none, *rows])


_SHOWN_IN_MS: Final = 100.0


def _took(us: float) -> str:
    return f"{us:.1f} µs" if us < _SHOWN_IN_MS else f"{us / 1e3:.2f} ms"


def stop_latency() -> str:
    """How soon a pass stands still, and what has to be computed again, by where it can stop."""
    rows = [
        [
            f"`{row['granularity']}`",
            *(f"{row['order_to_stop_ms'][point]:.1f} ms" for point in ("p50", "p90", "p100")),
            *(f"{row[share]:.1%}" if row[share] else "0" for share in ("wasted", "max_wasted")),
            f"{row['checkpoint_bytes_per_token'] / 1024:.1f} KiB",
        ]
        for row in result("engines/stop_latency")["rows"]
    ]
    columns = ["Order to stop, p50", "p90", "longest", "Again, mean", "most", "Largest checkpoint, per token"]
    return markdown(["`granularity`", *columns], rows)


_Case: TypeAlias = tuple[int, float]
"""How many arrive at once, and the load."""


def _by_case(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[str, ...], dict[_Case, Any]]:
    """Rows by the values of these keys, and by their arrivals."""
    found: dict[tuple[str, ...], dict[_Case, Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["burst"], row["load"]] = row
    return found


def _arrivals(cases: Iterable[_Case]) -> list[str]:
    return [f"{'one by one' if burst == 1 else f'bursts of {burst}'}, load {load:g}" for burst, load in cases]


def rules() -> str:
    """Share in time, by weight, with each order, mode and policy."""
    found = _by_case(result("cores/preemption_rules")["rules"], "order", "mode", "policy")
    cases = list(next(iter(found.values())))
    rows = [
        [
            f"`{order}`",
            f"`{mode}`" if policy == "-" else f"`{mode}`, `{policy}`",
            *(f"{by[case]['weighted']:.1f}" for case in cases),
        ]
        for (order, mode, policy), by in found.items()
    ]
    return markdown(["Order", "Mode, policy", *_arrivals(cases)], rows)


_STOPS_AT: Final[_Case] = (1, 0.9)
"""The arrivals by which stops are told."""


def margins_and_limits() -> str:
    """Share in time, by weight, of the default with other margins and limits, and how often it stops."""
    found = _by_case(result("cores/preemption_rules")["variations"], "rules")
    cases = list(next(iter(found.values())))
    rows = [
        [name, *(f"{by[case]['weighted']:.1f}" for case in cases), f"{by[_STOPS_AT]['stops']:.2f}"]
        for (name,), by in found.items()
    ]
    return markdown(["", *_arrivals(cases), f"stops a request, {_arrivals([_STOPS_AT])[0]}"], rows)


def through_the_server() -> str:
    """Medians of the times to the first token with preemption and without, and of what a stop takes."""
    modes = result("engines/preemption")["modes"]
    resume = modes["resume"]

    def ttft(of: str) -> list[str]:
        return [f"{median(modes[mode]['ttft'][of]['ms']):,.0f} ms" for mode in ("resume", "off")]

    def took(of: str) -> str:
        return f"{median(resume[of]):.0f} ms ({max(resume[of]):.0f} ms)"

    rows = [
        ["TTFT, urgent, alone", *ttft("urgent_alone")],
        ["TTFT, urgent, during the long one", *ttft("urgent")],
        ["TTFT, long, alone", *ttft("long_alone")],
        ["TTFT, long, with the urgent one", *ttft("long")],
        ["order to stop, median (largest)", took("order_to_stop_ms"), ""],
        ["stop to the urgent request's first operator", took("stop_to_urgent_ms"), ""],
        ["resume to its first operator", took("resume_overhead_ms"), ""],
    ]
    return markdown(["", "With preemption", "Without"], rows)


def idle_overhead(file: str) -> str:
    """What boundaries cost that nothing stops at."""
    rows = [
        [
            f"{row['ranks']}",
            f"{row['tokens']:,} tokens",
            f"{row['pairs']}",
            f"{row['without_ms']:,.0f} ms",
            f"{row['overhead']:+.2%} ({row['interval'][0]:+.2%} to {row['interval'][1]:+.2%})",
        ]
        for row in result(file)["rows"]
    ]
    return markdown(["Ranks", "Prompt", "Pairs", "Without", "Overhead"], rows)


def compiled_passes() -> str:
    """First tokens, stops and starts with eager and with compiled passes, medians with quartiles."""
    found = result("engines/compiled")
    eager, compiled = (found["passes"][kind] for kind in ("eager", "compiled"))
    rows = []
    for name, times in eager["ttft_ms"].items():
        others = compiled["ttft_ms"][name]
        change = f"{others['p50'] / times['p50'] - 1:+.1%}"
        rows.append([name, *[_middle(cell) for cell in (times, others)], change])
    stops = [each["order_to_stop_ms"] for each in (eager, compiled)]
    rows.append(
        ["order to stop", *[f"{median(each):.1f} ms (largest {max(each):.0f})" for each in stops], ""]
    )
    ready = {
        kind: ", ".join(f"{second:.0f}" for second in seconds) for kind, seconds in found["ready_s"].items()
    }
    afresh = f"{ready['compiled']}; {ready['compiled_afresh']} with nothing stored"
    rows.append(["ready after, seconds", ready["eager"], afresh, ""])
    return markdown(["", "Eager", "Compiled", "Difference"], rows)


def _middle(cell: Mapping[str, float]) -> str:
    return f"{cell['p50']:,.0f} ms ({cell['p25']:,.0f} to {cell['p75']:,.0f})"


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "votes": lambda: votes("engines/vote"),
    "votes-four-cores": lambda: votes("engines/vote_four_cores"),
    "stop-latency": stop_latency,
    "preemption-rules": rules,
    "preemption-limits": margins_and_limits,
    "preemption-server": through_the_server,
    "idle-overhead": lambda: idle_overhead("engines/idle_overhead"),
    "idle-overhead-compiled": lambda: idle_overhead("engines/idle_overhead_compiled"),
    "compiled-passes": compiled_passes,
}
