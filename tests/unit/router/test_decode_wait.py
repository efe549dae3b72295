"""What a decode replica without memory means for a request's first token, and for its end."""

from dataclasses import replace

import pytest

from router.admission import Gate
from router.core import RouterCore
from router.fleet.decode_replica import DecodeView
from router.fleet.view import RouterLimits
from router.messages import Answered, JobEnded, Placed, PlacementRequested
from router.placement.least_harm import LeastHarm
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates, TenantLimit
from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding
from slo.errors import RejectionReason
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.replacement import FailureCause, ReplacementRequested
from slo.reports import DecodeReported, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import PREMIUM, STANDARD, TierPolicy, TierSet

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0, handoff_s=0.1)
POLICIES = {
    PREMIUM: TierPolicy(None, None, sheddable=False, weight=4.0),
    STANDARD: TierPolicy(3.0, None, sheddable=True, weight=2.0),
}
WAIT_S = 4.0


def router(gate=None):
    """One idle prefill replica, and one for decode whose memory is held for so long."""
    core = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=100.0, stretch=1.0), gate=gate)
    core.prefill_reported(PrefillReported(ReplicaId("prefill"), LINE, (), None, 0.0), 0.0)
    load = DecodeLoad(10_000, 0, 0, 0.1, {JobId("there"): Holding(9000, round(10 * WAIT_S), 1)})
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.9, 1, kv_tokens=10_000, load=load), 0.0)
    return core


def asked(tier=PREMIUM, tokens=1000, ttft_s=None, e2e_s=None, **about):
    objective = Objective(tier, ttft_s, None, e2e_s=e2e_s)
    return PlacementRequested(JobId("job"), objective, False, tokens, 0, output_tokens=100, **about)


def answered(tokens):
    return JobEnded(JobId("other"), answered=Answered(STANDARD, "anonymous", tokens))


@pytest.mark.parametrize(
    ("lengths", "most", "left"), [((), 2000, 100), ((1950,), 20_000, 50), ((500, 2100), 20_000, 200)]
)
def test_memory_is_kept_for_what_a_stream_that_goes_on_after_a_loss_has_not_answered_yet(lengths, most, left):
    core = router()
    load = DecodeLoad(30_000, 0, 0, 0.1, answers={STANDARD: 1900})
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0, kv_tokens=30_000, load=load), 0.0)
    for length in lengths:
        core.job_ended(answered(length), 0.0)
    goes_on = asked(STANDARD, 100, answered_tokens=1900, is_admitted=True, however_late=True)
    assert isinstance(core.place(replace(goes_on, output_tokens=most), 0.0), Placed)
    (holding,) = core.view.decode[ReplicaId("decode")].sent.on_way
    assert (holding.tokens, holding.remaining) == (2000, left)


@pytest.mark.parametrize("cause", [FailureCause.REPLICA_DIED, FailureCause.LEFT])
@pytest.mark.parametrize("has_stream", [False, True])
def test_as_much_memory_is_kept_for_one_whose_prefill_is_placed_again(cause, has_stream):
    core, decode = router(), ReplicaId("decode")
    streams = {JobId("job"): Holding(1000, 8, 0)} if has_stream else {}
    load = DecodeLoad(30_000, 0, 0, 0.1, streams, answers={PREMIUM: 500})
    core.view.decode_reported(DecodeReported(decode, 0.0, 0, kv_tokens=30_000, load=load), 0.0)
    if not has_stream:
        assert isinstance(core.place(replace(asked(), output_tokens=8), 0.0), Placed)
    lost = ReplacementRequested(JobId("job"), PREMIUM, None, False, 1004, decode, (), cause)
    assert isinstance(core.place(PlacementRequested.again(lost), 1.0), Placed)
    ticket = core.view.decode[decode].sent.tickets[JobId("job")]
    assert (ticket.holding.tokens, ticket.holding.remaining, ticket.holding.waits) == (1004, 8, True)
    assert ticket.holding.remaining == 8, "not as long as its tier's answers are in the mean"


def test_it_waits_for_a_first_token_that_decode_samples():
    placed = router().place(asked(decode_samples_first=True), 0.0)
    assert placed.decode_wait_s == pytest.approx(WAIT_S - 1.0), "the prefill takes a second of it"
    assert placed.predicted_ttft_s == pytest.approx(WAIT_S + 0.1)


def test_a_first_token_that_prefill_samples_does_not_wait_for_it():
    placed = router().place(asked(), 0.0)
    assert (placed.decode_wait_s, placed.predicted_ttft_s) == (0.0, pytest.approx(1.1))


def test_a_prefill_that_takes_longer_waits_for_nothing():
    placed = router().place(asked(tokens=5000, decode_samples_first=True), 0.0)
    assert (placed.decode_wait_s, placed.predicted_ttft_s) == (0.0, pytest.approx(5.1))


def test_one_whose_first_token_would_come_too_late_is_refused_before_its_prefill():
    core = router()
    late = core.place(asked(STANDARD, ttft_s=3.0, decode_samples_first=True), 0.0)
    assert late.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert late.retry_after_s == pytest.approx(1.1)
    assert isinstance(core.place(asked(STANDARD, ttft_s=3.0), 0.0), Placed)


def test_an_answer_that_is_due_at_its_end_has_less_time_for_its_first_token():
    without = router()
    without.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.1, 1, kv_tokens=10_000), 0.0)
    free, waits = [core.place(asked(e2e_s=30.0), 0.0).ttft_budget_s for core in (without, router())]
    assert free - waits == pytest.approx(WAIT_S - 1.0)


def test_the_answers_to_all_prompts_take_memory():
    core = router()
    load = DecodeLoad(10_000, 0, 0, 0.1, {JobId("there"): Holding(7000, 2000, 1)}, answers={PREMIUM: 100})
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.7, 1, kv_tokens=10_000, load=load), 0.0)
    one = replace(asked(decode_samples_first=True), output_tokens=1600)
    assert core.place(one, 0.0).decode_wait_s == 0
    core.job_ended(JobEnded(JobId("job")), 0.0)
    assert core.place(replace(one, prompts=8, answers_per_prompt=2), 0.0).decode_wait_s > 0


def test_both_kinds_of_first_tokens_have_ways_of_their_own():
    core = router()
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.1, 1, kv_tokens=10_000), 0.0)
    for _ in range(10):
        for samples, ttft_s in ((False, 1.1), (True, 1.5)):
            core.place(asked(decode_samples_first=samples), 0.0)
            core.job_ended(JobEnded(JobId("job"), ttft_s), 0.0)
    for samples, ttft_s in ((False, 1.1), (True, 1.5)):
        placed = core.place(asked(decode_samples_first=samples), 0.0)
        assert placed.predicted_ttft_s == pytest.approx(ttft_s)
        core.job_ended(JobEnded(JobId("job")), 0.0)


@pytest.fixture
def waits_asked(monkeypatch):
    """How often the wait for memory was worked out."""
    asked, wait_s = [], DecodeView.wait_s
    monkeypatch.setattr(DecodeView, "wait_s", lambda *args: asked.append(1) or wait_s(*args))
    return asked


def test_the_wait_is_not_worked_out_for_what_the_limits_refuse(waits_asked):
    tiers = TierSet({STANDARD: POLICIES[STANDARD]}, STANDARD)
    admission = AdmissionController(tiers, AdmissionRules(), TenantGates(), lambda: 1.0)
    core = router(Gate(admission))
    limit = TenantLimit(requests_per_s=0.001, burst_requests=1)
    assert isinstance(core.place(replace(asked(STANDARD), limit=limit), 0.0), Placed)
    assert len(waits_asked) == 1
    for number in range(5):
        again = replace(asked(STANDARD), job_id=JobId(f"again-{number}"), limit=limit)
        assert core.place(again, 0.0).reason is RejectionReason.REQUEST_RATE
    assert len(waits_asked) == 1


def test_the_wait_is_not_worked_out_where_nothing_depends_on_it(waits_asked):
    core = router()
    assert isinstance(core.place(asked(), 0.0), Placed)
    assert not waits_asked
