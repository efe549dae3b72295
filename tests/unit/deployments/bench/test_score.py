"""What a run is worth."""

import pytest

from deployments.bench.answer import Answer, Ended, Fate, Offered
from deployments.bench.score import score
from simulator.workload.arrivals import Arrival
from slo.tiers import PREMIUM, STANDARD


def ended(ttft_s=0.5, due_s=1.0, *, fate=Fate.ANSWERED, reason="", kind="chat", tier=PREMIUM, late_s=0.0):
    arrival = Arrival(0, 0.0, kind, 100, 10, due_s, tier)
    return Ended(arrival, Answer(fate, 0.0, 1.0, reason, ttft_s, 0.01, 10), late_s)


@pytest.mark.parametrize(
    ("request_", "is_met"),
    [
        (ended(0.5, 1.0), True),
        (ended(1.0, 1.0), True),
        (ended(1.1, 1.0), False),
        (ended(99.0, None), True),
        (ended(None, None, fate=Fate.REFUSED), False),
        (ended(0.5, 1.0, fate=Fate.FAILED), False),
        (ended(0.5, None, fate=Fate.FAILED), False),
    ],
)
def test_what_meets_its_objective(request_, is_met):
    assert request_.is_met is is_met


def test_refused_and_failed_requests_are_missed_and_counted_by_reason():
    requests = [
        ended(),
        ended(None, fate=Fate.REFUSED, reason="429 deadline_infeasible"),
        ended(None, fate=Fate.REFUSED, reason="429 deadline_infeasible"),
        ended(0.5, fate=Fate.FAILED, reason="in the stream: engine_error"),
    ]
    overall = score(Offered(requests, wall_s=2.0)).overall
    assert overall.attainment == 0.25
    assert overall.goodput_rps == 0.5
    assert overall.refused == {"429 deadline_infeasible": 2}
    assert overall.failed == {"in the stream: engine_error": 1}
    assert (overall.prompt_tokens, overall.output_tokens) == (100, 10)  # of the one that was answered
    assert (overall.tokens_ps, overall.prompt_tokens_ps) == (55.0, 50.0)


def test_scores_by_tier_and_kind():
    requests = [
        ended(kind="chat", tier=PREMIUM),
        ended(9.0, kind="chat", tier=STANDARD),
        ended(kind="file", tier=STANDARD),
    ]
    result = score(Offered(requests, wall_s=1.0))
    assert {name: part.attainment for name, part in result.tiers.items()} == {"premium": 1.0, "standard": 0.5}
    assert {name: part.attainment for name, part in result.kinds.items()} == {"chat": 0.5, "file": 1.0}


def test_quantiles_are_of_those_that_got_a_token():
    requests = [ended(number / 1e3) for number in range(1, 101)] + [ended(None, fate=Fate.REFUSED)]
    overall = score(Offered(requests, wall_s=1.0)).overall
    assert overall.ttft_ms == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert score(Offered([ended(None, fate=Fate.REFUSED)], 1.0)).overall.ttft_ms == {}


@pytest.mark.parametrize(("late_s", "is_slow"), [(0.001, False), (0.5, True), (-0.1, False)])
def test_a_slow_client_is_told(late_s, is_slow):
    assert score(Offered([ended(late_s=late_s)] * 10, wall_s=1.0)).is_client_slow is is_slow
