"""What `slackserve simulate --config` says of a fleet."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from deployments.simulate import SimulateError
from deployments.simulate.capacity_plan import make_plan

LOSS = {"replicas": 100, "at_s": 1, "for_s": 60}


def told(tmp_path, json_file=None, report=None, **values):
    chat = {"share": 1, "mean_tokens": 600, "ttft_ms": 500, "tier": "premium"}
    fleet = {"rate_rps": 2, "requests": 60, "workload": {"kinds": {"chat": chat | values.pop("chat", {})}}}
    (tmp_path / "fleet.yaml").write_text(json.dumps(fleet | values))
    printed = io.StringIO()
    make_plan(tmp_path / "fleet.yaml", Console(file=printed, width=500), json_file, report)
    return printed.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, "1 prefill and 1 decode replicas. Prefill work alone would fill"),
        (
            {"chat": {"ttft_ms": 1}},
            "No number of prefill replicas keeps these objectives: some requests cannot be met alone.",
        ),
        (
            {"outage": LOSS},
            "No number of prefill replicas keeps these objectives with this outage: plan without it to see",
        ),
        (
            {"outage": LOSS | {"replicas": 1}, "tiers": {"premium": {"tpot_ms": 1}}},
            "No number of decode replicas keeps these objectives: some requests cannot be met alone.",
        ),
    ],
    ids=["some", "none", "none with the outage", "no decode"],
)
def test_the_last_line_says_how_many_or_why_none(tmp_path, values, wanted):
    assert told(tmp_path, **values).startswith(wanted)


def test_a_full_disk_is_one_message(tmp_path):
    with pytest.raises(SimulateError, match=r"^--json: /dev/full cannot be written: No space left"):
        told(tmp_path, Path("/dev/full"))
    (tmp_path / "capacity.png").symlink_to("/dev/full")
    with pytest.raises(SimulateError, match=f"^--report: {tmp_path} cannot be written: No space left"):
        told(tmp_path, None, tmp_path)
