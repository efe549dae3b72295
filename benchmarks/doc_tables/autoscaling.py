"""The tables of who sizes a tier best in virtual time: ours, Ray Serve's policy, a fixed fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.cores.sizing import RAY_DEFAULT, TARGET
from benchmarks.report import markdown, result

_SIZERS: Final = {"ours": "ours", "ray": "Ray's defaults", "ray_tuned": "Ray's, tuned", "fixed": "fixed"}


def sizers(file: str, *, below_target: bool = False, left_out: str | None = None) -> str:
    """What became of the sizers of a tier on one stream; `left_out` is the name of a column of that.

    With `below_target` also of Ray's settings that miss the target where no other of its settings has both
    more in time and more of it per replica hour.
    """
    rows = []
    for load, arms in result(f"cores/{file}")["loads"].items():
        tuned = arms["ray_tuned"]
        is_default = tuple(tuned["setting"]) == RAY_DEFAULT
        shown = [("ours", arms["ours"])]
        shown.append(
            ("Ray's defaults, which are the tuned ones" if is_default else "Ray's defaults", arms["ray"])
        )
        if not is_default:
            shown.append((f"Ray's, tuned: {_setting(tuned)}", tuned))
        if below_target:
            shown += [(f"Ray's, {_setting(each)}", each) for each in _best_below(arms["all_ray"], tuned)]
        shown.append((f"{arms['fixed']['replicas']} replicas, fixed", arms["fixed"]))
        rows += [
            [
                load,
                arm,
                f"{found['attainment']:.1%}",
                *([] if left_out is None else [f"{found['left_out']:.1%}"]),
                f"{found['replica_hours']:.2f}",
                f"{found['per_replica_hour']:,.0f}",
                f"{found['max_replicas']}",
                f"{found['turns']}",
            ]
            for arm, found in shown
        ]
    columns = [
        "Load",
        "Arm",
        "In time",
        *([] if left_out is None else [left_out]),
        "Replica hours",
        "In time per replica hour",
        "Most replicas",
        "Turns",
    ]
    return markdown(columns, rows)


def _setting(of: Mapping[str, Any]) -> str:
    requests, up_s, down_s = of["setting"]
    return f"{requests:g} request{'' if requests == 1 else 's'} per replica, {up_s:g} and {down_s:g} s"


def _best_below(found: Sequence[Mapping[str, Any]], tuned: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Below the target, neither default nor tuned, and beside which no other has more of both."""
    return [
        each
        for each in found
        if each["attainment"] < TARGET
        and tuple(each["setting"]) not in {RAY_DEFAULT, tuple(tuned["setting"])}
        and not any(
            other["attainment"] > each["attainment"] and other["per_replica_hour"] > each["per_replica_hour"]
            for other in found
        )
    ]


def settled_sizes(file: str, planned: str) -> str:
    """Our sizes under constant loads, and how many replicas would do."""
    rows = [
        [
            f"{row['load']:g}",
            f"{row['low']}" if row["low"] == row["high"] else f"{row['low']} to {row['high']}",
            "none" if row["planned"] is None else f"{row['planned']}",
            f"{row['attainment']:.1%}",
        ]
        for row in result(f"cores/{file}")["constant"]
    ]
    return markdown(["Constant load", "Replicas of ours", planned, "In time with ours"], rows)


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


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "autoscaling": lambda: sizers("autoscaling", left_out="Refused"),
    "autoscaling-constant": lambda: settled_sizes("autoscaling", "Fewest with 95% in time"),
    "decode-autoscaling": lambda: sizers("decode_autoscaling", below_target=True),
    "decode-autoscaling-constant": lambda: settled_sizes("decode_autoscaling", "Capacity plan"),
    "autoscaling-streams": lambda: sizers_on_streams("autoscaling"),
    "decode-autoscaling-streams": lambda: sizers_on_streams("decode_autoscaling"),
}
