"""Each policy can be configured and is explained; what slack-aware placement gains over simple ones."""

import re
from pathlib import Path
from typing import get_args

import pytest
from simulated_fleet import NOBODY_IS_SHED, fleet, stream

from router.core import RouterCore
from router.messages import PlacementRequested
from router.placement.policies import RoundRobin
from router.placement.registry import POLICIES, PlacementName
from simulator.fleet.fleet import simulate
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS, PREMIUM

LINE = PrefillPredictor(per_token_s=0.0002, fixed_s=0.01)


def served(placement, seed):
    """Two replicas that serve by slack and cannot preempt, at four fifths of what they can do."""
    setup = fleet("sedf", 2, placement=placement, tiers=NOBODY_IS_SHED)
    return simulate(setup, stream(1.6, 600, seed))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slack_aware_placement_beats_round_robin_and_token_counts(seed):
    ours = served("least_harm", seed)
    turns = served("round_robin", seed)
    tokens = served("least_outstanding_tokens", seed)
    assert ours.attainment > turns.attainment + 0.05
    assert ours.by_tier[PREMIUM] > turns.by_tier[PREMIUM] + 0.05
    assert ours.attainment >= tokens.attainment


def test_every_policy_that_can_be_configured_is_made_and_explained():
    page = (Path(__file__).parents[4] / "docs" / "routing.md").read_text()
    explained = page.split("\n## Policies\n")[1].split("\n### ")[0]
    assert set(get_args(PlacementName)) == set(POLICIES)
    assert set(re.findall(r"^\| `(\w+)` \|", explained, re.MULTILINE)) == set(POLICIES)


def test_round_robin_takes_turns():
    core = RouterCore(DEFAULT_TIERS, RoundRobin())
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    names = [ReplicaId(f"prefill-{n}") for n in range(3)]
    for name in names:
        core.prefill_reported(PrefillReported(name, LINE, (), None, 0.0), 0.0)
    objective = Objective(PREMIUM, 0.3, None)
    placed = [
        core.place(PlacementRequested(JobId(f"{n}"), objective, False, 10, 0), 0.01 * n) for n in range(6)
    ]
    assert [one.prefill_replica for one in placed] == names + names
    assert all(one.slack_s >= 0 for one in placed)
