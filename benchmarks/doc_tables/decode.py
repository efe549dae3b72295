"""The tables of the decode tier, measured and in virtual time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.report import markdown, result

_PACED: Final = {"no rule": "`pressure.enabled`, objectives not told", "the rule": "`pressure.enabled`"}
_PROMISED: Final = ("premium", "standard")
_TIERS: Final = (*_PROMISED, "background")


def decode_pace(file: str) -> str:
    """Streams with and without TPOT objectives, by arm."""
    found = result(f"engines/{file}")
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
                f"{_longest_wait_s(of_rounds):.1f} s",
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
    found = result(file)
    rows = []
    for row in found["means"]:
        if row["pool"] != pool:
            continue
        of_rounds = [one for one in found["rounds"] if (one["arm"], one["pool"]) == (row["arm"], pool)]
        rows.append(
            [
                _pressed(row["arm"]),
                _met(row),
                _preempted(row),
                f"{row['again']:.1%}",
                f"{1e3 * row['gap p99 s']:.0f} ms, {_longest_wait_s(of_rounds):.1f} s",
                f"{row['background end p50 s']:.1f} s",
                f"{row['tokens/s']:,.0f}",
            ]
        )
    return markdown(columns, rows)


def _longest_wait_s(rounds: Sequence[Mapping[str, Any]]) -> float:
    """For a token, of all streams of all rounds."""
    return max(one["gap max s"] for one in rounds)


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


def paced() -> str:
    """Streams with and without TPOT objectives in virtual time, by rate and arm."""
    rows = [
        [
            f"{row['rate']:g}",
            _PACED.get(row["arm"], row["arm"]),
            *(f"{row[f'{tier} met']:.1%}" for tier in _PROMISED),
            f"{row['background end p50 s']:.0f} s",
            f"{row['gap max s']:.1f} s",
            f"{row['tokens/s']:,.0f}",
        ]
        for row in result("cores/paced")["a100"]
    ]
    met = [f"{tier.title()} met" for tier in _PROMISED]
    columns = ["Requests/s", "", *met, "Background ends, p50", "Longest wait for a token", "Tokens/s"]
    return markdown(columns, rows)


def paced_beside() -> str:
    """The measured arms, and the same simulated with the step times of each round."""
    keys = {f"{tier} met": f"{tier.title()} met" for tier in _PROMISED} | {"tokens/s": "Tokens/s"}
    rows = [
        [
            _PACED.get(row["arm"], row["arm"]),
            *(
                f"{row[one]:,.0f}" if key == "tokens/s" else f"{row[one]:.0%}"
                for key in keys
                for one in (key, f"{key}, simulated")
            ),
        ]
        for row in result("cores/paced")["beside"]
    ]
    columns = [column for name in keys.values() for column in (f"{name}, measured", "simulated")]
    return markdown(["", *columns], rows)


def paced_drifting() -> str:
    """The arms on a machine that is quicker for some seconds and slower for others."""
    found = result("cores/paced")["drifting"]
    arms = dict.fromkeys(row["arm"] for row in found)
    cases: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        case = f"{row['rate']:g}", f"{row['slower'] - 1:.0%}", f"{row['drift']:g}"
        cases.setdefault(case, []).append(f"{row['premium met']:.0%}, {row['standard met']:.0%}")
    columns = ["Requests/s", "Steps take longer by", "Drift", *(_PACED.get(arm, arm) for arm in arms)]
    return markdown(columns, [[*case, *cells] for case, cells in cases.items()])


def kept_memory(file: str) -> str:
    """What comes of ways to keep memory, by engine."""
    rows = [
        [
            row["engine"],
            row["way"],
            f"{row['premium met']:.1%}, {row['standard met']:.1%}",
            _share(row["background preempted"]),
            f"{row['again']:.1%}",
            "" if row["background end p50 s"] is None else f"{row['background end p50 s']:.1f} s",
            f"{row['tokens/s']:,.0f}",
            f"{row['met/s']:.2f}",
        ]
        for row in result(file)["rows"]
    ]
    columns = ["Engine", "Memory", "Premium, standard met", "Background preempted", "Computed again"]
    return markdown([*columns, "Background ends, p50", "Tokens/s", "Met per second"], rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


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


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "decode-migration": decode_migration,
    "decode-pace": lambda: decode_pace("decode_pace"),
    "decode-pace-heavy": lambda: decode_pace("decode_pace_heavy"),
    "decode-pressure": lambda: decode_pressure("engines/decode_pressure", 0.5),
    "decode-pressure-minute": lambda: decode_pressure("engines/decode_pressure_minute", 0.5),
    "decode-pressure-minute-xeon": lambda: decode_pressure("engines/decode_pressure_minute_xeon", 0.5),
    "decode-pressure-minute-epyc": lambda: decode_pressure("engines/decode_pressure_minute_epyc", 0.5),
    "kept-memory": lambda: kept_memory("cores/kept_memory"),
    "decode-reserve": lambda: kept_memory("cores/decode_reserve"),
    "paced": paced,
    "paced-beside": paced_beside,
    "paced-drifting": paced_drifting,
    "pool-pressure": lambda: pool_pressure(0.5),
    "pool-pressure-measured": pool_pressure_measured,
}
