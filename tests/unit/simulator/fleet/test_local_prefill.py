"""Short prompts that decode computes itself, in a whole fleet in virtual time."""

import statistics
from dataclasses import replace

import pytest
from simulated_fleet import DECODE, HARDWARE, fleet

from router.fleet.view import RouterLimits
from simulator.fleet.fleet import simulate
from simulator.workload.arrivals import Arrival, Kind, Mix
from slo.outcomes import Outcome
from slo.predict.handoff import Link
from slo.tiers import PREMIUM, STANDARD

LINK = Link(1e9, 0.02)
MIX = Mix(
    {
        "short": Kind(0.8, 32, 4.0, PREMIUM, sigma=0.2, output_tokens=40),
        "long": Kind(0.2, 4000, 30.0, STANDARD, output_tokens=60),
    }
)


def served(arrivals, below, **changes):
    limits = RouterLimits(local_prefill=True, max_local_prefills=8, local_below_tokens=below)
    return simulate(fleet(limits=limits, link=LINK, handoff_s=0.02, **changes), arrivals)


def test_a_short_prompt_is_computed_in_a_step_of_decode():
    arrivals = [Arrival(0, 1.0, "one", 32, 5, None, STANDARD)]
    (passage,) = served(arrivals, 64).passages
    setup = fleet()
    way_s = setup.delays.wire_s + setup.delays.render_s
    compute_s = HARDWARE.cost.prefill_s(32) - DECODE.fixed_s - DECODE.weights_s
    assert passage.prefill_replica is None
    assert passage.job.ttft_s == pytest.approx(way_s + max(0.0, compute_s) + DECODE.step_s(1, 32))
    assert passage.outcome is Outcome.FINISHED


@pytest.mark.parametrize("rate_rps", [2.0, 12.0])
def test_prompts_that_decode_computes_come_sooner_and_nothing_is_left_of_them(rate_rps):
    """Streams differ by more than long prompts may lose: three are taken together."""
    streams = [[replace(each, ttft_s=None) for each in MIX.stream(rate_rps, 300, seed)] for seed in (3, 4, 5)]
    without, having = ([served(arrivals, below) for arrivals in streams] for below in (0, 64))
    for result in (*without, *having):
        assert result.outcomes == {Outcome.FINISHED: 300}
        assert all(replica.kv_usage == 0.0 for replica in result.decode)
    assert not any(passage.prefill_replica is None for result in without for passage in result.passages)
    for result in having:
        here = [passage.arrival.tokens for passage in result.passages if passage.prefill_replica is None]
        assert len(here) > 100
        assert max(here) <= 64

    def mean_s(results, kind):
        return statistics.mean(
            passage.job.ttft_s + (passage.tpot_s or 0.0) * (passage.arrival.output_tokens - 1)
            for result in results
            for passage in result.passages
            if passage.arrival.kind == kind
        )

    assert mean_s(having, "short") < mean_s(without, "short")
    assert mean_s(having, "long") < 1.02 * mean_s(without, "long")
