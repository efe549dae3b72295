"""The tables of virtual time, and of the decisions alone: goodput, placement, long contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, Final

from benchmarks.doc_tables.presets import MIXES, MODELS
from benchmarks.report import markdown, result
from simulator.arms.arms import ARMS
from simulator.arms.by_class import BY_CLASS

_STOPS_AT: Final = {"replayed": "eager", "compiled": "compiled"}
_OURS: Final = "slackserve"
_TARGETS: Final = "targets"
_WITH_ADMISSION: Final = ("slackserve-admission", "sedf-resume", "slackserve")
_TITLES: Final = {name: arm.title for name, arm in [*ARMS.items(), *BY_CLASS.items()]}


def held_out(file: str, level: str, ours: str = _OURS, only: Sequence[str] = ()) -> str:
    """Goodput of all and of the worst class by arm and model, and ours over each with its interval."""
    rows = result(file)["rows"]
    cells = {(row["arm"], row["model"], row["figure"]): row for row in rows}
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if not only or arm in only]
    figures = [f"all {level}", f"worst class {level}"]
    columns = [
        f"{MODELS[model]}, {figure.removesuffix(level).strip()}" for model in models for figure in figures
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


def held_out_served() -> str:
    """What is offered at the goodput of all requests at 90 %, and what becomes of those that are late."""
    cells = {(row["arm"], row["model"]): row for row in result("cores/held_out_served")["rows"]}
    table = []
    for arm in dict.fromkeys(arm for arm, _ in cells):
        row = [f"**{_TITLES[arm]}**" if arm == _OURS else _TITLES[arm]]
        for model in MODELS:
            cell = cells[arm, model]
            never, tokens = cell["never served of the late"], cell["tokens never served"]
            row.append(f"{cell['load']:.2f}, {never:.0%}, {tokens:.0%}")
        table.append(row)
    return markdown(["Load, late ones never served, tokens never served", *MODELS.values()], table)


_AXES: Final = {
    "scale": "objectives times {:g}",
    "sigma": "predictions off, sigma {:g}",
    "bias": "predictions times {:g}",
    "charged_s": "each boundary takes {:g} µs",
    "launch_s": "an eager pass takes {:g} ms or more",
    "hidden": "passes without preemption composed ahead",
}


def along_axes(axes: Mapping[str, Sequence[str]], *, few: bool = False) -> str:
    """The worst class's goodput by place on the axes of each result, and ours over each peer.

    With `few` streams what each of them has stands in place of an interval.
    """
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
        row = [MODELS[model], f"{level:.0%}", _AXES[axis].format(round(shown, 6))]
        for arm in arms:
            cell = cells[*place, arm]
            if few and arm != _TARGETS:
                row.append(_goodput_by_stream(cell, cells[*place, _TARGETS]))
            else:
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


def patience() -> str:
    """Goodput by how much of its objective a stop may wait for, and over that of stops at once."""
    rows = result("cores/patience")["rows"]
    figures = [*dict.fromkeys(row["figure"] for row in rows)]
    cells = {(row["place"], row["patience"], row["figure"]): row for row in rows}
    table = []
    for place, part in dict.fromkeys((row["place"], row["patience"]) for row in rows):
        of_place = [cells[place, part, figure] for figure in figures]
        over = ["" if part == 0 else f" ({row['over none']:.2f})" for row in of_place]
        shown = [f"{row['goodput_rps']:.2f}{ratio}" for row, ratio in zip(of_place, over, strict=True)]
        table.append([place, f"{part:g}", *shown])
    return markdown(["predictions, passes", "`patience`", *figures], table)


def tight() -> str:
    """Why the peer is ahead on the blog's mix: what is in time, by weight, and not answered at all."""
    rows = result("cores/tight")["rows"]
    rates = [*dict.fromkeys(row["rate_rps"] for row in rows)]
    cells = {(row["arm"], row["rate_rps"]): row for row in rows}
    shown = ("urgent", "all", "value", "unanswered")
    table = [
        [arm, *(" / ".join(f"{100 * cells[arm, rate][share]:.1f}" for share in shown) for rate in rates)]
        for arm in dict.fromkeys(row["arm"] for row in rows)
    ]
    return markdown(
        ["urgent / all / by weight in time, not answered, %", *(f"{rate:g}/s" for rate in rates)], table
    )


def _goodput(row: Mapping[str, Any], *, is_ours: bool) -> str:
    """Goodput, and ours over it; bounds of both where a stream's is below what was tried."""
    at_most, at_least = ("≤ ", "≥ ") if row.get("below") else ("", "")
    over = "" if is_ours else f" ({at_least}{_interval(row)})"
    return f"{at_most}{row['goodput_rps']:.2f}{over}"


def _goodput_by_stream(row: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Goodput, and ours over it on each stream."""
    ratios = [mine / its for mine, its in zip(ours["streams"], row["streams"], strict=True)]
    return f"{row['goodput_rps']:.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"


def _interval(row: Mapping[str, Any]) -> str:
    return f"{row['ours over it']:.2f}, {row['low']:.2f} to {row['high']:.2f}"


_MOST_LOAD: Final = 1.2


def routing(workload: str, answers: str) -> str:
    """In time by placement policy and load, and the load up to which 90 % are."""
    found = result("cores/routing")["workloads"][workload][answers]
    loads = [point["load"] for point in found[0]["points"] if point["load"] <= _MOST_LOAD]
    rows = []
    for row in found:
        if not row["goodput_load"]:  # at no load so many in time, or at all that were tried
            goodput = ["", ""]
        else:
            ratio, low, high = row["ratio"]
            over = "1" if row["policy"] == "round_robin" else f"{ratio:.2f} ({low:.2f} to {high:.2f})"
            goodput = [f"{row['goodput_load']:.2f}", over]
        name = row["policy"] if " " in row["policy"] else f"`{row['policy']}`"
        rows.append(
            [name, *(f"{100 * each['attainment']:.1f}" for each in row["points"][: len(loads)]), *goodput]
        )
    return markdown(["Policy", *(f"{load:g}" for load in loads), "Goodput", "over round robin"], rows)


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


def router_decision() -> str:
    """CPU time of one placement by the default policy."""
    rows = [
        [
            f"{row['replicas']:,}",
            str(row["outstanding"]),
            {"mixed": "", "overloaded": "more than can be on time"}[row["load"]],
            *(f"{row['cpu_us'][point] / 1e3:.2f} ms" for point in ("p50", "p99", "p100")),
        ]
        for row in result("cores/router_decision")["rows"]
        if row["policy"] == "least_harm"
    ]
    return markdown(["Replicas", "Prefills outstanding on each", "", "p50", "p99", "longest of 1,000"], rows)


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


def overload() -> str:
    """Who is in time at what load, by tier and arm, and how many are refused."""
    rows, before = [], None
    for row in result("cores/overload")["rows"]:
        title, load = _TITLES[row["arm"]], f"{row['load']:.2g}"
        tiers = [f"{row['in time'][tier]:.1f} %" for tier in ("premium", "standard", "background", "all")]
        refused = f"{row['refused']:.1f} %" if row["refused"] else ""
        ours = row["arm"] in {_OURS, "slackserve-admission"}
        name = f"**{title}**" if ours else title
        rows.append([load if load != before else "", name, *tiers, f"{row['tokens_per_s']:,.0f}", refused])
        before = load
    columns = ["load", "", "premium", "standard", "background", "all", "tokens/s", "refused"]
    return markdown(columns, rows)


_OPTIMA: Final = MIXES | {"flowprefill-8b_azure_llm_2023_conv": f"Azure 2023, {MODELS['8b']}"}


def offline_optimum() -> str:
    """What anybody could have had on time with all arrivals known, and what two arms reach of it."""
    table = []
    for level in (0.9, 0.99):
        for name, title in _OPTIMA.items():
            rows = [row for row in result(f"cores/offline_optimum/{name}")["rows"] if row["level"] == level]
            cells = [f"{mean(row['optimum_rps'] for row in rows):.2f}"]
            for arm in rows[0]["arms_rps"]:
                parts = [row["arms_rps"][arm] / row["optimum_rps"] for row in rows]
                reached = mean(row["arms_rps"][arm] for row in rows)
                cells.append(f"{reached:.2f} ({min(parts):.0%} to {max(parts):.0%})")
            table.append([f"{level:.0%}", title, *cells])
    arms = [_TITLES[arm] for arm in rows[0]["arms_rps"]]
    return markdown(["In time", "", "Optimum, requests/s", *arms], table)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "offline-optimum": offline_optimum,
    "patience": patience,
    "tight": tight,
    "held-out-90": lambda: held_out("cores/held_out", "90%"),
    "held-out-99": lambda: held_out("cores/held_out", "99%"),
    "held-out-served": held_out_served,
    "held-out-admission-90": lambda: held_out("cores/held_out_admission", "90%", only=_WITH_ADMISSION),
    "held-out-admission-99": lambda: held_out("cores/held_out_admission", "99%", only=_WITH_ADMISSION),
    "held-out-targets-90": lambda: held_out("cores/held_out_targets", "90%", _TARGETS),
    "held-out-targets-99": lambda: held_out("cores/held_out_targets", "99%", _TARGETS),
    "held-out-axes": lambda: along_axes(
        {
            "held_out_charges": ("scale", "charged_s", "bias", "hidden"),
            "held_out_launch": ("launch_s",),
        }
    ),
    "held-out-sigma": lambda: along_axes({"held_out_sigma": ("sigma",)}, few=True),
    "held-out-parts": lambda: without_parts("cores/held_out_axes"),
    "long-context": long_context,
    "migration": migration,
    "overload": overload,
    "router-decision": router_decision,
    "routing-mix": lambda: routing("mix", "nobody refused"),
    "routing-mix-refusals": lambda: routing("mix", "refusals"),
    "routing-trace": lambda: routing("trace", "nobody refused"),
    "routing-trace-refusals": lambda: routing("trace", "refusals"),
}
