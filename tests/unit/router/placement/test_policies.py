import random

import pytest
from fleet_in_virtual_time import Arrival, Replica, run

from router.core import RouterCore
from router.placement.policies import LeastOutstandingTokens, LeastSlackLoss, RoundRobin
from slo.predict.prefill_time import PrefillPredictor
from slo.request import ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD, TierPolicy

LINE = PrefillPredictor(per_token_s=0.0002, fixed_s=0.01)
POLICIES = {
    PREMIUM: TierPolicy(0.3, None, sheddable=False, weight=4.0),
    STANDARD: TierPolicy(2.0, None, sheddable=False, weight=2.0),
    BACKGROUND: TierPolicy(None, None, sheddable=True, weight=1.0),
}


def trace(seed: int, requests: int = 1500, rate: float = 5.0) -> list[Arrival]:
    """Poisson arrivals: 60 % short premium, 30 % middling standard, 10 % very long background."""
    rng = random.Random(seed)
    arrivals, now_s = [], 0.0
    for _ in range(requests):
        now_s += rng.expovariate(rate)
        tier = rng.choices([PREMIUM, STANDARD, BACKGROUND], [0.6, 0.3, 0.1])[0]
        low, high = {
            PREMIUM: (50, 500),
            STANDARD: (500, 4000),
            BACKGROUND: (3000, 8000),
        }[tier]
        arrivals.append(Arrival(now_s, rng.randint(low, high), tier, POLICIES[tier].ttft_s))
    return arrivals


def attainment(placement, seed):
    replicas = [Replica(ReplicaId(f"prefill-{n}"), LINE) for n in range(2)]
    return run(trace(seed), RouterCore(POLICIES, placement), replicas, POLICIES)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slack_aware_placement_beats_round_robin_and_token_counts(seed):
    ours = attainment(LeastSlackLoss(), seed)
    turns = attainment(RoundRobin(), seed)
    tokens = attainment(LeastOutstandingTokens(), seed)
    assert ours.attainment() > turns.attainment() + 0.05
    assert ours.attainment(PREMIUM) > turns.attainment(PREMIUM) + 0.05
    assert ours.attainment() >= tokens.attainment()


def test_round_robin_takes_turns():
    core = RouterCore(POLICIES, RoundRobin())
    replicas = [Replica(ReplicaId(f"prefill-{n}"), LINE) for n in range(3)]
    arrivals = [Arrival(100.0 * n, 10, PREMIUM, 0.3) for n in range(1, 7)]
    assert run(arrivals, core, replicas, POLICIES).attainment() == 1.0
