"""What a result of `comparison.run` was measured of, and what of today's run is not like it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.comparison.arms import TUNED, Chunking, ServerArm

_SETTINGS: Final = (
    "layers",
    "loads",
    "urgent_ms",
    "long_ms",
    "seconds",
    "pilot_seconds",
    "burst",
    "seed",
    "urgent_share",
    "urgent_tokens",
    "long_tokens",
    "output_tokens",
    "mean_prompt_tokens",
    "mean_output_tokens",
    "max_model_len",
)
_MACHINE: Final = ("cpu", "cores", "python", "versions")


def unlike(
    found: Mapping[str, Any], settings: Mapping[str, Any], about: Mapping[str, Any], arms: Sequence[ServerArm]
) -> list[str]:
    """What the result has that today's run does not: workload, machine, versions, settings of its arms.

    Args:
        found: The file of the result.
        settings: As `results` would write them today; what the result does not tell counts as unlike.
        about: Today's machine and versions.
        arms: As they would be started; of the settings of a start, one that is absent was empty.
    """
    here = json.loads(json.dumps({"settings": settings, "about": about}))
    there = {"settings": found["results"]["settings"], "about": found["about"]}
    differing = [
        f"{name} {there[part].get(name, 'unknown')} in the result, {here[part][name]} today"
        for part, names in (("settings", _SETTINGS), ("about", _MACHINE))
        for name in names
        if name not in there[part] or there[part][name] != here[part][name]
    ]
    for arm in arms:
        today = _told(json.loads(json.dumps(arm.settings())))
        differing += [
            f"{arm.name} in round {start['round']} {was}, {today} today"
            for start in measured_starts(found["results"], arm.name)
            if (was := _told(start["settings"])) != today
        ]
    return differing


def chunks_of_arms(results: Mapping[str, Any]) -> dict[str, str]:
    """Of each arm of `TUNED` that was measured or tuned, its chunks."""
    measured = {
        name: str(Chunking.of(starts[0]["settings"]))
        for name in TUNED
        if (starts := measured_starts(results, name))
    }
    return {**results["chosen"], **measured}


def measured_starts(results: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    """The starts of an arm whose runs are in the result: not those of the pilot, nor superseded ones."""
    rounds = {run["round"] for run in results["runs"] if run["arm"] == arm}
    return [start for start in results["starts"] if start["arm"] == arm and start["round"] in rounds]


def _told(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value not in (None, [])}
