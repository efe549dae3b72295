"""A small simulated fleet, streams for it, and what must hold of any when it is at rest."""

import math
from dataclasses import replace

import pytest

from simulator.arms.arms import ARMS
from simulator.cost.accelerators import A100, decode_model
from simulator.cost.operators import LLAMA_3_8B, LLAMA_3_8B_A100
from simulator.cost.passes import CostModel
from simulator.fleet.setup import FleetSetup
from simulator.replica.hardware import Hardware
from simulator.workload.arrivals import Kind, Mix
from slo.outcomes import Outcome
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

HARDWARE = Hardware(CostModel(LLAMA_3_8B, LLAMA_3_8B_A100))
MIX = Mix(
    {
        "chat": Kind(0.7, 640, 0.4, PREMIUM, output_tokens=60),
        "search": Kind(0.2, 5000, 4.0, STANDARD, output_tokens=60),
        "batch": Kind(0.1, 3000, None, BACKGROUND, output_tokens=60),
    }
)
CAPACITY_RPS = 6.5
"""About what one replica can prefill."""
DECODE = decode_model(LLAMA_3_8B, A100, 1)
NOBODY_IS_SHED = DEFAULT_TIERS.revised(
    {tier: replace(policy, sheddable=False) for tier, policy in DEFAULT_TIERS.clients.items()}
)


def fleet(arm="slackserve", replicas=2, **changes):
    return FleetSetup(ARMS[arm], HARDWARE, replicas, **{"decode_replicas": 2, "decode": DECODE, **changes})


def stream(load, count=250, seed=3):
    return MIX.stream(load * CAPACITY_RPS, count, seed)


def ends(result):
    return [(p.outcome, p.job.first_token_s, p.tpot_s, p.prefill_replica) for p in result.passages]


def check_at_rest(result, prefill=None):
    """Every request has ended once, and nothing is held any more, by any of the prefill replicas named."""
    for passage in result.passages:
        assert passage.outcome in {Outcome.FINISHED, Outcome.SHED, Outcome.REJECTED}
        assert (passage.job.first_token_s < math.inf) == (passage.outcome is Outcome.FINISHED)
        assert bool(passage.job.refused) == (passage.outcome is not Outcome.FINISHED)
    for replica in result.prefill if prefill is None else prefill:
        if hasattr(replica, "engine"):
            assert replica.engine.kv_usage == pytest.approx(0.0)
            assert not replica.engine.requests
            assert not replica.ledger.accepted
    assert all(replica.kv_usage == 0.0 for replica in result.decode)
    assert sum(replica.tokens for replica in result.decode) == sum(
        p.arrival.output_tokens - 1 for p in result.passages if p.outcome is Outcome.FINISHED
    )
