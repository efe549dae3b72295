"""The tables of the documentation that are made from results, and where they stand.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. It is made anew by

    python -m benchmarks.doc_tables

and a test fails when one differs from its result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.comparison.table import KINDS, LONGEST, spread
from benchmarks.gpu.tables import TABLES as GPU_TABLES
from benchmarks.report import markdown, result
from simulator.arms.arms import ARMS
from simulator.arms.by_class import BY_CLASS

_ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
_PLACE: Final = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
_MODELS: Final = {"8b": "Llama-3-8B", "14b": "Qwen2.5-14B", "70b": "Llama-3-70B, TP 4"}
_STOPS_AT: Final = {"replayed": "eager", "compiled": "compiled"}
_OURS: Final = "slackserve"
_TARGETS: Final = "targets"
_PACED: Final = {"no rule": "`pressure.enabled`, objectives not told", "the rule": "`pressure.enabled`"}
_PROMISED: Final = ("premium", "standard")
_TIERS: Final = (*_PROMISED, "background")
_VALIDATED: Final = {"slackserve": "SlackServe", "slackserve-off": "without preemption"}
_TITLES: Final = {name: arm.title for name, arm in [*ARMS.items(), *BY_CLASS.items()]}


def held_out(file: str, level: str, ours: str = _OURS) -> str:
    """Goodput of all and of the worst class by arm and model, and ours over each with its interval."""
    rows = result(file)["rows"]
    cells = {(row["arm"], row["model"], row["figure"]): row for row in rows}
    models = [model for model in _MODELS if any(row["model"] == model for row in rows)]
    arms = [*dict.fromkeys(row["arm"] for row in rows)]
    figures = [f"all {level}", f"worst class {level}"]
    columns = [
        f"{_MODELS[model]}, {figure.removesuffix(level).strip()}" for model in models for figure in figures
    ]
    table = []
    for arm in arms:
        title = _TITLES[arm]
        row = [f"**{title}**" if arm == ours else title]
        for model in models:
            for figure in figures:
                cell = cells[arm, model, figure]
                row.append(_goodput(cell, is_ours=arm == ours))
        table.append(row)
    return markdown([f"{level} in time, requests/s", *columns], table)


_AXES: Final = {
    "scale": "objectives times {:g}",
    "sigma": "predictions off, sigma {:g}",
    "bias": "predictions times {:g}",
    "charged_s": "each boundary takes {:g} µs",
    "launch_s": "an eager pass takes {:g} ms or more",
    "hidden": "passes without preemption composed ahead",
}


def along_axes(axes: Mapping[str, Sequence[str]]) -> str:
    """The worst class's goodput by place on the axes of each result, and ours over each peer."""
    rows = [
        row for file, some in axes.items() for row in result(f"cores/{file}")["rows"] if row["axis"] in some
    ]
    arms = [*dict.fromkeys(row["arm"] for row in rows)]
    places = dict.fromkeys((row["model"], row["level"], row["axis"], row["value"]) for row in rows)
    cells = {(row["model"], row["level"], row["axis"], row["value"], row["arm"]): row for row in rows}
    table = []
    for place in places:
        model, level, axis, value = place
        shown = value * {"charged_s": 1e6, "launch_s": 1e3}.get(axis, 1)
        row = [_MODELS[model], f"{level:.0%}", _AXES[axis].format(round(shown, 6))]
        for arm in arms:
            cell = cells[*place, arm]
            row.append(_goodput(cell, is_ours=arm == _TARGETS))
        table.append(row)
    return markdown(["", "in time", "", *[_TITLES[arm] for arm in arms]], table)


def without_parts(file: str) -> str:
    """The worst class's goodput without one part each, and with all over it."""
    table = []
    for row in result(file)["rows"]:
        if row["axis"] == "without":
            name, _, chunk = row["arm"].partition(" ")
            title = _TITLES[name] + (f", of {chunk} tokens" if chunk else "")
            over = "" if name == _TARGETS else _interval(row)
            table.append([title, f"{row['goodput_rps']:.2f}", over])
    return markdown(["", "requests/s", "all of it over this"], table)


def _goodput(row: Mapping[str, Any], *, is_ours: bool) -> str:
    """Goodput, and ours over it; bounds of both where a stream's is below what was tried."""
    at_most, at_least = ("≤ ", "≥ ") if row.get("below") else ("", "")
    over = "" if is_ours else f" ({at_least}{_interval(row)})"
    return f"{at_most}{row['goodput_rps']:.2f}{over}"


def _interval(row: Mapping[str, Any]) -> str:
    return f"{row['ours over it']:.2f}, {row['low']:.2f} to {row['high']:.2f}"


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


def serving_path() -> str:
    """What the path adds to the first token, before and now."""
    found = result("engines/serving_path")
    before, now = (found[arm]["by_prompt_tokens"] for arm in ("before", "after"))
    rows = [
        [
            f"{int(tokens):,}",
            *(
                f"{before[tokens]['added_ms'][point]:.1f} → {now[tokens]['added_ms'][point]:.1f}"
                for point in ("p50", "p90", "p99")
            ),
        ]
        for tokens in now
    ]
    return markdown(["Prompt tokens", "p50, ms", "p90", "p99"], rows)


def serving_path_stages() -> str:
    """Medians of each stage of the path by concurrency, before and now."""
    found = result("engines/serving_path")
    before, now = (found[arm]["stages_ms_by_concurrency"] for arm in ("before", "after"))
    rows = [
        [stage, *(f"{before[many][stage]['p50']:.1f} → {now[many][stage]['p50']:.1f}" for many in now)]
        for stage in now["1"]
    ]
    return markdown(["Stage", *now], rows)


def decode_pace() -> str:
    """Streams with and without TPOT objectives, by arm."""
    found = result("engines/decode_pace")
    rows = []
    for row in found["means"]:
        of_rounds = [one for one in found["rounds"] if one["arm"] == row["arm"]]
        shares = [f"{tier} {what}" for what in ("in pace", "met") for tier in _PROMISED]
        rows.append(
            [
                _PACED.get(row["arm"], row["arm"]),
                *(
                    f"{row[one]:.0%} ({', '.join(f'{each[one]:.0%}' for each in of_rounds)})"
                    for one in shares
                ),
                f"{row['background end p50 s']:.1f} s",
                f"{row['gap max s']:.1f} s",
                f"{row['tokens/s']:,.0f}",
            ]
        )
    columns = [f"{tier.title()} {what}" for what in ("in pace", "met") for tier in _PROMISED]
    columns.append("Background ends, p50")
    return markdown(["", *columns, "Longest wait for a token", "Tokens/s"], rows)


def decode_pressure(file: str, pool: float) -> str:
    """Ways to bear it on an engine whose memory is a part of what bursts fill."""
    columns = [
        "",
        "Premium, standard met",
        "Preempted: premium, standard, background",
        "Computed again",
        "p99, longest wait for a token",
        "Background ends, p50",
        "Tokens/s",
    ]
    rows = [
        [
            _pressed(row["arm"]),
            _met(row),
            _preempted(row),
            f"{row['again']:.1%}",
            f"{1e3 * row['gap p99 s']:.0f} ms, {row['gap max s']:.1f} s",
            f"{row['background end p50 s']:.1f} s",
            f"{row['tokens/s']:,.0f}",
        ]
        for row in result(file)["means"]
        if row["pool"] == pool
    ]
    return markdown(columns, rows)


def _met(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{row[f'{tier} met']:.1%}" for tier in _PROMISED)


def _preempted(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{row[f'{tier} preempted']:.1%}" for tier in _TIERS)


def _pressed(arm: str) -> str:
    """A measured arm as the documentation calls it."""
    arm = re.sub(r"capped at (\d+)", r"at most \1 streams", arm)
    arm = arm.replace("priority", "priorities").replace("watermark 0.05", "`watermark` 0.05")
    arm = arm.replace("ours", "`pressure.enabled`").replace("stock", "vLLM")
    return "vLLM, ample memory" if arm == "ample memory" else arm


def pool_pressure(pool: float) -> str:
    """Servers' ways to bear it in virtual time."""
    columns = [
        "",
        "Premium, standard met",
        "TTFT p99: premium, standard, background",
        "Preempted: premium, standard, background",
        "Computed again",
        "p99 wait for a token",
        "Tokens/s",
        "Met per second",
    ]
    rows = [
        [
            row["way"],
            _met(row),
            ", ".join(f"{row[f'{tier} ttft p99 s']:.1f}" for tier in _TIERS) + " s",
            _preempted(row),
            f"{row['again']:.1%}",
            f"{1e3 * row['gap p99 s']:.0f} ms",
            f"{row['tokens/s']:,.0f}",
            f"{row['goodput']:.2f}",
        ]
        for row in result("cores/pool_pressure")["preset"]
        if row["pool"] == pool
    ]
    return markdown(columns, rows)


def pool_pressure_measured() -> str:
    """The same ways beside what an engine measured of them."""
    figures = {
        "Computed again": ("again", "again, simulated"),
        "Background preempted": ("background preempted", "background preempted, simulated"),
        "Premium met": ("premium met", "premium met, simulated"),
        "Standard met": ("standard met", "standard met, simulated"),
        "Tokens/s of ours": ("tokens/s, of ours", "tokens/s, simulated, of ours"),
    }
    columns = [cell for title in figures for cell in (f"{title}, measured", "simulated")]
    rows = [
        [f"{row['pool']:g}", _pressed(row["arm"])]
        + [f"{row[key]:.1%}" for keys in figures.values() for key in keys]
        for row in result("cores/pool_pressure")["measured"]["rows"]
    ]
    return markdown(["Memory", "", *columns], rows)


def decode_migration() -> str:
    """What moving streams gains when a decode replica's memory runs short."""
    rows = [
        [
            row["bursts"],
            {"router": "the router's"}.get(row["placement"], row["placement"]),
            row["moves"] or "no",
            ", ".join(f"{row[f'{tier} met']:.1%}" for tier in ("premium", "standard")),
            f"{row['background preempted']:.1%}",
            f"{row['again']:.1%}",
            f"{row['tokens/s']:,.0f}",
            f"{row['goodput']:.2f}",
            ", ".join(f"{gain:+.1%}" for gain in row["gain"]) if row["moves"] else "",
            f"{row['moved']:.2%}",
        ]
        for row in result("cores/decode_migration")["means"]
    ]
    columns = ["Bursts", "Placement", "Moved", "Premium, standard met", "Background preempted", "Again"]
    more = ["Tokens/s", "Met per second", "Change: least, mean, most", "Requests moved"]
    return markdown([*columns, *more], rows)


def migration() -> str:
    """What moving suspended prefills changes, by placement and load."""
    rows = result("cores/migration")["rows"]
    found = {(row["placement"], row["load"], row["moved"]): row for row in rows}
    table = []
    for (placement, load, moved), row in found.items():
        if moved != "none":
            continue
        cells = [f"{row['in_time']:.1%}, {row['worst_kind_in_time']:.1%}"]
        for way in dict.fromkeys(row["moved"] for row in rows):
            if way != "none":
                other = found[placement, load, way]
                gains = [100 * (other[what] - row[what]) for what in ("in_time", "worst_kind_in_time")]
                cells.append(", ".join(f"{gain:+.1f}" for gain in gains))
        moves = found[placement, load, "for nothing"]["moves_per_request"]
        table.append([placement.replace("_", " "), f"{load:g}", *cells, f"{moves:.2f}"])
    columns = [
        "In time: all, worst kind",
        "moved for nothing, points",
        "over 25 GB/s, points",
        "moves a request",
    ]
    return markdown(["Placement", "Load", *columns], table)


_SIZERS: Final = {"ours": "ours", "ray": "Ray's defaults", "ray_tuned": "Ray's, tuned", "fixed": "fixed"}


def sizers_on_streams(file: str) -> str:
    """What became of the sizers of a tier on further streams: least, mean and most."""
    rows = []
    for row in result(f"cores/{file}_streams")["rows"]:
        cells = [(row["attainment"], ".1%"), (row["replica_hours"], ".2f"), (row["per_replica_hour"], ",.0f")]
        if row["arm"] != "ours":
            cells.append((row["ours over it"], ".2f"))
        spans = [" / ".join(format(each, shown) for each in span) for span, shown in cells]
        rows.append([row["load"], _SIZERS[row["arm"]], *spans, *[""] * (4 - len(spans))])
    columns = ["Load", "Arm", "In time", "Replica hours", "In time per replica hour", "Ours over it"]
    return markdown(columns, rows)


def validation() -> str:
    """What a real server did and what the simulator foretells, by arm and load."""
    rows = []
    for row in result("engines/validation")["rows"]:
        real, ours, what = row["measured"], row["simulated"], row["of"]
        figures = real, ours, row["faster"]
        if what.startswith("in time"):
            cells = [*(f"{each:.1%}" for each in figures), f"{100 * (ours - real):+.1f} points"]
        elif what == "stops":
            cells = [*(f"{each:.0f}" for each in figures), f"{ours - real:+.0f}"]
        else:
            cells = [*(f"{each * 1e3:,.0f} ms" for each in figures), f"{ours / real - 1:+.1%}"]
        rows.append([_VALIDATED[row["arm"]], f"{row['load']:g}", what, *cells])
    columns = ["Measured", "Simulated", "The same, prefills 5 % shorter", "Simulated is off by"]
    return markdown(["Server", "Load", "", *columns], rows)


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


def hostile_clients() -> str:
    """What hostile clients did to the others."""
    found = result("engines/hostile_clients")
    fuzz = [row for name, row in found.items() if name.startswith("test_thousands_")]
    slow = found["test_a_crowd_of_slow_clients thirty seconds"]
    over = found["test_an_overload_is_refused_and_forgotten twenty minutes"]
    statuses = [(str(status), count) for row in fuzz for status, count in row["statuses"].items()]
    failed = sum(count for status, count in statuses if status.startswith("5"))
    gap, wait = (max(row[name][1] for row in fuzz) * 1e3 for name in ("longest_gaps_s", "longest_waits_s"))
    grown = max(row["memory_grown"] for row in fuzz) - 1
    quick = max(slow["p95_s"]["quick"], slow["p95_s"]["quick again"])
    oldest = max(slow["oldest_s"].values())
    p50_ms, _, p99_ms, longest_ms = (seconds * 1e3 for seconds in over["refused_s"])
    premium_s, slowest_s = over["premium_ttft_s"], over["slowest_ttft_s"]["standard"]
    usual, again = (median * 1e3 for median, _ in over["normal_ttft_s"])
    sent = sum(count for _, count in statuses)
    rows = [
        (
            f"{sent:,} requests that nobody would send, four at a time",
            f"{failed} answers of 500 and more",
            f"another's stream paused for {gap:.0f} ms at most, `/health` took {wait:.0f} ms at most",
            f"memory at rest grew by {grown:.1%}",
        ),
        (
            "1,000 slow uploads and 1,000 slow readers within 30 s",
            f"p95 of others' short answers {slow['p95_s']['slow'] * 1e3:.0f} ms",
            f"beside as many quick clients {quick * 1e3:.0f} ms",
            f"the oldest connection was closed after {oldest:.0f} s",
            f"{sum(slow['open'].values())} stayed open",
        ),
        (
            f"Ten times what it can do for twenty minutes, {over['requests']['overload']:,} requests",
            f"{over['requests']['refused']:,} refused",
            f"refusals took {p50_ms:.0f} ms (p50), {p99_ms:.0f} ms (p99) and {longest_ms:.0f} ms (longest)",
            f"premium that was admitted waited {premium_s[1]:.0f} s (p99) and {premium_s[2]:.0f} s (longest)",
            f"standard {slowest_s:.0f} s (longest)",
            f"first token at half load before and a minute after {usual:.0f} and {again:.0f} ms",
            f"memory grew by {over['memory_grown'] - 1:.1%}",
        ),
    ]
    return markdown(["Tried", "What was seen"], [[tried, "; ".join(seen)] for tried, *seen in rows])


def long_context() -> str:
    """How soon passes behind a long context stop, and what shorter chunks cost."""
    rows = [
        [
            f"{row['model']}, {row['accelerator'].upper()}, {_STOPS_AT[row['stops at']]}",
            row["chunks"] if row["chunks"].startswith("8") else f"{row['chunk']:,} tokens",
            f"{row['stop_ms']['p50']:.1f} / {row['stop_ms']['p99']:.1f}",
            f"{row['128k_cost']:.1f} %",
            f"{row['8k_cost']:.1f} %",
        ]
        for row in result("cores/long_context")["rows"]
    ]
    columns = ["Model, accelerator, passes", "Chunk", "Stop p50 / p99, ms", "128k longer by", "8k longer by"]
    return markdown(columns, rows)


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
    """Stock as shipped, the best with one pool, one with two, and ours, at each load."""
    found = result("comparison")
    rows = []
    for load in sorted({row["load"] for row in found["summary"]}):
        here = {row["arm"]: row for row in found["summary"] if row["load"] == load}
        tuned = [here[arm] for arm in ("stock-chunked", "stock-priority")]
        best = max(tuned, key=lambda row: row["urgent"]["attained"])["arm"]
        for arm in ("stock-shipped", best, "stock-pools", _OURS):
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
    "held-out-90": lambda: held_out("cores/held_out", "90%"),
    "held-out-99": lambda: held_out("cores/held_out", "99%"),
    "held-out-targets-90": lambda: held_out("cores/held_out_targets", "90%", _TARGETS),
    "held-out-targets-99": lambda: held_out("cores/held_out_targets", "99%", _TARGETS),
    "held-out-axes": lambda: along_axes(
        {"held_out_charges": ("scale", "charged_s", "launch_s", "bias", "hidden")}
    ),
    "held-out-sigma": lambda: along_axes({"held_out_sigma": ("sigma",)}),
    "held-out-parts": lambda: without_parts("cores/held_out_axes"),
    "comparison": comparison,
    "comparison-in-short": comparison_in_short,
    "comparison-paired": comparison_paired,
    "preemption-server": through_the_server,
    "idle-overhead": lambda: idle_overhead("engines/idle_overhead"),
    "idle-overhead-compiled": lambda: idle_overhead("engines/idle_overhead_compiled"),
    "compiled-passes": compiled_passes,
    "hostile-clients": hostile_clients,
    "long-context": long_context,
    "migration": migration,
    "decode-migration": decode_migration,
    "decode-pace": decode_pace,
    "decode-pressure": lambda: decode_pressure("engines/decode_pressure", 0.5),
    "decode-pressure-whole": lambda: decode_pressure("engines/decode_pressure_whole", 1.0),
    "pool-pressure": lambda: pool_pressure(0.5),
    "pool-pressure-measured": pool_pressure_measured,
    "validation": validation,
    "decode-autoscaling-streams": lambda: sizers_on_streams("decode_autoscaling"),
    "serving-path": serving_path,
    "serving-path-stages": serving_path_stages,
    **GPU_TABLES,
}


def remade(text: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        KeyError: for a table that is not among `TABLES`.
    """
    return _PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n{place[4]}", text)


def main() -> None:
    """Make the tables of all pages anew."""
    for page in PAGES:
        text = page.read_text()
        if (again := remade(text)) != text:
            page.write_text(again)
            print(page.name)


if __name__ == "__main__":
    main()
