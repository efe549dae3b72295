"""Ten minutes of three times what the fleet can do: premium is on time, nobody starves."""

import time
from collections import Counter
from dataclasses import replace
from statistics import median

import pytest

from router.admission import Gate
from simulator.arms.arms import ARMS
from simulator.fleet.fleet import simulate
from simulator.fleet.setup import FleetSetup
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import Kind, Mix
from slo.admission.rules import AdmissionRules
from slo.errors import RejectionReason
from slo.outcomes import Outcome
from slo.queue.fairness import STARVATION_TIMEOUT_S
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

HARDWARE = PRESETS["flowprefill-8b"].hardware
SECONDS = 600.0
OVERLOAD = 3.0
REPLICAS = 2
KINDS = {
    "premium": Kind(0.30, 3000, 2.0, PREMIUM, sigma=0.3, range_tokens=(500, 6000)),
    "standard": Kind(0.45, 8000, 10.0, STANDARD, sigma=0.4, range_tokens=(500, 20_000)),
    "background": Kind(0.25, 12_000, None, BACKGROUND, sigma=0.4, range_tokens=(500, 30_000)),
}
MAX_BACKLOG_S = 60.0


def work_s(arrivals):
    return sum(HARDWARE.cost.prefill_s(arrival.tokens) for arrival in arrivals)


@pytest.fixture(scope="module")
def overload():
    """The run, the wall time of each decision of the gate, and the stream."""
    probe = Mix(KINDS).stream(1.0, 2000, 1)
    rate_rps = OVERLOAD * REPLICAS * len(probe) / work_s(probe)
    arrivals = Mix(KINDS).stream(rate_rps, int(rate_rps * SECONDS), 1)
    setup = FleetSetup(
        ARMS["slackserve"],
        HARDWARE,
        REPLICAS,
        tiers=DEFAULT_TIERS.revised(
            {tier: replace(policy, ttft_s=None) for tier, policy in DEFAULT_TIERS.clients.items()}
        ),
        admission=AdmissionRules(max_backlog_s=MAX_BACKLOG_S),
        seed=1,
    )
    took_s = []
    refusal = Gate.refusal

    def timed(*arguments, **named):
        started_s = time.perf_counter()
        refused = refusal(*arguments, **named)
        took_s.append((time.perf_counter() - started_s, refused is not None))
        return refused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "refusal", timed)
        run = simulate(setup, arrivals)
    return run, took_s, arrivals


def by_tier(run, tier):
    return [passage for passage in run.passages if passage.arrival.tier == tier]


def test_it_is_an_overload_that_premium_alone_is_not(overload):
    _, _, arrivals = overload
    span_s = arrivals[-1].at_s * REPLICAS
    premium = [arrival for arrival in arrivals if arrival.tier == PREMIUM]
    assert work_s(arrivals) / span_s == pytest.approx(OVERLOAD, rel=0.1)
    assert 0.2 < work_s(premium) / span_s < 0.6


def test_premium_is_on_time(overload):
    run, _, _ = overload
    premium = by_tier(run, PREMIUM)
    assert all(passage.outcome is Outcome.FINISHED for passage in premium)
    assert sum(passage.job.is_on_time for passage in premium) / len(premium) >= 0.99


def test_standard_that_is_let_in_is_on_time(overload):
    run, _, _ = overload
    served = [p for p in by_tier(run, STANDARD) if p.outcome is Outcome.FINISHED]
    assert sum(p.job.is_on_time for p in served) / len(served) >= 0.95


def test_nobody_starves(overload):
    """Each tier is served in every minute; everybody who was let in is, background in bounded time."""
    run, _, arrivals = overload
    background = [p for p in by_tier(run, BACKGROUND) if p.outcome is Outcome.FINISHED]
    assert max(p.job.ttft_s for p in background) < 2 * STARVATION_TIMEOUT_S + MAX_BACKLOG_S
    for tier in (STANDARD, BACKGROUND):
        served = [p for p in by_tier(run, tier) if p.outcome is Outcome.FINISHED]
        minutes = Counter(int(p.job.first_token_s // 60) for p in served)
        assert all(minutes[minute] for minute in range(1, int(arrivals[-1].at_s // 60)))


def test_every_request_ends_once_and_every_refusal_has_its_reason(overload):
    run, _, _ = overload
    assert all(passage.outcome in {Outcome.FINISHED, Outcome.SHED} for passage in run.passages)
    reasons = {p.job.refused for p in run.passages if p.outcome is Outcome.SHED}
    assert reasons <= {reason.value for reason in RejectionReason}
    assert RejectionReason.OVER_SHARE.value in reasons


def test_the_replicas_are_kept_busy(overload):
    run, _, _ = overload
    assert run.prefill_utilisation > 0.9


def test_refusals_are_answered_in_no_time(overload):
    _, took_s, _ = overload
    refused = sorted(seconds for seconds, was_refused in took_s if was_refused)
    assert len(refused) > 500
    assert median(refused) < 0.001
    assert refused[int(0.99 * len(refused))] < 0.05
