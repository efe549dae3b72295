"""What a request is promised, and when its first token is predicted."""

from dataclasses import replace

import pytest
from small_router import core, placed_again, report, request, runs

from router.messages import Answered, JobEnded, Placed, PlacementReason, PlacementRequested
from slo.errors import Rejected, RejectionReason
from slo.objectives import Objective
from slo.predict.path_time import FORGET_AFTER_S
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD


def test_what_decode_computes_itself_says_nothing_of_the_way():
    router = core(prefill=1)
    for number in range(8):
        at_s = 10.0 * number
        router.prefill_reported(report("prefill-0"), at_s)
        router.place(request(number, 1000), at_s)
        router.not_for_prefill(JobId(f"job-{number}"))
        router.job_ended(JobEnded(JobId(f"job-{number}"), 9.0), at_s + 9)
    router.prefill_reported(report("prefill-0"), 90.0)
    placed = router.place(request(8, 1000, explicit=True), 90.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(1.1)


def test_an_idle_fleet_is_predicted_exactly():
    placed = core().place(request(1, 1000), 0.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(1.0 + 0.1)
    assert placed.slack_s == pytest.approx(2.0 - 1.1)
    assert placed.handoff_s == 0.1
    assert placed.reason is PlacementReason.NOBODY_LATE


def test_the_way_is_learned_from_requests_that_found_an_idle_replica():
    router = core(prefill=1)
    for number in range(8):
        at_s = 10.0 * number
        router.prefill_reported(report("prefill-0"), at_s)
        placed = router.place(request(number, 1000), at_s)
        queued = router.place(request(f"{number}-queued", 1000, tier=PREMIUM), at_s)
        assert queued.predicted_ttft_s > 1.5
        router.job_ended(JobEnded(JobId(f"job-{number}-queued"), 9.0), at_s + 1)
        router.job_ended(JobEnded(JobId(f"job-{number}"), 1.0 + 0.03), at_s + 1)
    assert router.place(request(8, 1000), 90.0).predicted_ttft_s == pytest.approx(1.03)
    assert placed.handoff_s == 0.1, "what prefill leaves for the way back is as reported"


def text(number, size_bytes=4000, **rest):
    return replace(request(number, None, **rest), prompt_bytes=size_bytes)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "cut before it was counted"])
def test_texts_of_one_tenant_that_are_longer_than_they_seem_change_nothing_for_others(is_told):
    """A text of 4,000 bytes seems to have 1,000 tokens, and has 4,000."""
    router = core(prefill=1)
    for number in range(20):
        at_s, asked = 10.0 * number, text(number, tenant=f"odd-{number}")
        placed = router.place(asked, at_s)
        assert placed.tokens == 1000
        learned = ((asked.tenant, asked.prompt_bytes, 4000),) if is_told else ()
        router.prefill_reported(report("prefill-0", runs(number, 4000), learned=learned), at_s + 0.05)
        router.prefill_reported(report("prefill-0", ended=(asked.job_id,)), at_s + 4.05)
        router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 4.05)
        router.job_ended(JobEnded(asked.job_id, 4.05), at_s + 4.1)
    urgent = request("urgent", 100, ttft_s=0.3, explicit=True)
    placed = router.place(urgent, 200.0)
    assert isinstance(placed, Placed)
    assert placed.predicted_ttft_s == pytest.approx(0.1 + (0.05 if is_told else 0.1))


def test_prompts_of_which_less_was_cached_than_expected_change_nothing_for_others():
    router = core(prefill=1)
    prefix = {"prefix_hashes": tuple(range(30)), "hash_block": 128}
    router.place(request("first", 4000, **prefix), 0.0)
    ended = {"hits": ((JobId("job-first"), 0),), "ended": (JobId("job-first"),)}
    router.prefill_reported(report("prefill-0", **ended), 4.0)
    for number in range(8):
        at_s, job = 10.0 + 10.0 * number, JobId(f"job-{number}")
        placed = router.place(request(number, 4000, **prefix), at_s)
        assert placed.cached_tokens == 3840
        hits = ((job, 0),)
        router.prefill_reported(report("prefill-0", runs(number, 4000), running=job, hits=hits), at_s + 0.05)
        router.prefill_reported(report("prefill-0", ended=(job,)), at_s + 4.05)
        router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 4.05)
        router.job_ended(JobEnded(job, 4.05), at_s + 4.1)
    assert router.place(request("last", 100), 100.0).predicted_ttft_s == pytest.approx(0.1 + 0.05)


def test_a_prefill_that_came_so_late_that_another_went_first_says_nothing_of_the_way():
    """The check of a grammar lies before it, which takes seconds where the grammar is new."""
    router = core(prefill=1)
    for number in range(8):
        at_s, late = 20.0 * number, f"late-{number}"
        router.place(request(late, 100), at_s)
        router.prefill_reported(report("prefill-0"), at_s + 6.0)
        router.place(request(number, 100), at_s + 6.0)
        router.prefill_reported(report("prefill-0", ended=(JobId(f"job-{number}"),)), at_s + 6.1)
        router.job_ended(JobEnded(JobId(f"job-{number}"), 0.13), at_s + 6.2)
        router.prefill_reported(report("prefill-0", runs(late, 100)), at_s + 8.0)
        router.prefill_reported(report("prefill-0", ended=(JobId(f"job-{late}"),)), at_s + 8.1)
        router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 8.1)
        router.job_ended(JobEnded(JobId(f"job-{late}"), 8.1), at_s + 8.2)
    assert router.place(request("last", 100), 160.0).predicted_ttft_s == pytest.approx(0.1 + 0.03)


@pytest.mark.parametrize("is_new", [True, False])
def test_what_the_check_of_a_new_grammar_takes_changes_nothing_for_others(is_new):
    router, rest = core(prefill=1), {"decode_samples_first": True}
    for number in range(8):
        at_s, job = 10.0 * number, JobId(f"job-{number}")
        router.place(request(number, 100, **rest), at_s)
        if is_new:
            router.held_up(job)
        router.prefill_reported(report("prefill-0"), at_s + 0.5)
        router.prefill_reported(report("prefill-0", runs(number, 100), running=job), at_s + 2.0)
        router.prefill_reported(report("prefill-0", ended=(job,)), at_s + 2.1)
        router.job_ended(JobEnded(job, 2.13), at_s + 2.2)
        router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 2.2)
    placed = router.place(request("last", 100, **rest), 80.0)
    assert placed.predicted_ttft_s == pytest.approx(0.1 + (0.1 if is_new else 2.03))


def batch_prompt(router, number, at_s, *, way_s=0.03, urgent=True):
    """One prompt of 8 s that found the replica idle; `urgent` stopped it for 2.4 s in all."""
    name, later = f"batch-{number}", f"urgent-{number}"
    assert isinstance(router.place(request(name, 8000, tier=BACKGROUND), at_s), Placed)
    running = {"running": JobId(f"job-{name}"), "preemptible_in_s": 0.02}
    router.prefill_reported(report("prefill-0", runs(name, 8000, BACKGROUND), **running), at_s + 0.1)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 0.1)
    if urgent:
        assert isinstance(router.place(request(later, 50, ttft_s=0.5, explicit=True), at_s + 1), Placed)
        both = runs(name, 7000, BACKGROUND), runs(later, 50, STANDARD)
        router.prefill_reported(report("prefill-0", *both, **running), at_s + 1.1)
        ended = {**running, "ended": (JobId(f"job-{later}"),)}
        router.prefill_reported(report("prefill-0", runs(name, 6000, BACKGROUND), **ended), at_s + 3.6)
        router.job_ended(JobEnded(JobId(f"job-{later}"), 0.09), at_s + 3.7)
    router.prefill_reported(report("prefill-0", ended=(JobId(f"job-{name}"),)), at_s + 10.4)
    router.job_ended(JobEnded(JobId(f"job-{name}"), 8.0 + way_s + 2.4 * urgent), at_s + 10.5)


def test_a_prefill_that_was_stopped_for_another_says_nothing_of_the_way():
    router = core(prefill=1)
    for number in range(20):
        batch_prompt(router, number, 20.0 * number)
    assert router.place(request(0, 50), 400.0).predicted_ttft_s == pytest.approx(0.05 + 0.1)


def test_the_way_is_learned_from_long_prefills_that_nobody_held_up():
    router = core(prefill=1)
    for number in range(20):
        batch_prompt(router, number, 20.0 * number, urgent=number % 4 > 0)
    assert router.place(request(0, 50), 400.0).predicted_ttft_s == pytest.approx(0.05 + 0.03)


def test_a_prefill_that_is_placed_again_says_nothing_of_the_way():
    router = core(prefill=6)
    for number in range(5):
        router.place(request(number, 1000), 0.0)
    for number in range(5):
        lost = ReplicaId(f"prefill-{number}")
        assert isinstance(router.place(placed_again(number, 1000, lost), 6.0), Placed)
        router.job_ended(JobEnded(JobId(f"job-{number}"), 8.0), 8.0)
    router.prefill_reported(report("prefill-5"), 9.0)
    assert router.place(request(9, 1000), 9.0).predicted_ttft_s == pytest.approx(1.1)


def test_a_prefill_that_another_overtook_before_a_report_named_either_says_nothing_of_the_way():
    router = core(prefill=1)
    for number in range(8):
        at_s, first, second = 20.0 * number, f"first-{number}", f"second-{number}"
        router.place(request(first, 1000, tier=BACKGROUND), at_s)
        router.place(request(second, 1000, tier=PREMIUM), at_s + 0.1)
        in_one_report = (JobId(f"job-{second}"), JobId(f"job-{first}"))
        router.prefill_reported(report("prefill-0", ended=in_one_report), at_s + 2.2)
        router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), at_s + 2.2)
        router.job_ended(JobEnded(JobId(f"job-{first}"), 2.1), at_s + 2.3)
        router.job_ended(JobEnded(JobId(f"job-{second}"), 1.0), at_s + 2.3)
    assert router.place(request(9, 1000), 160.0).predicted_ttft_s == pytest.approx(1.0 + 0.1)


@pytest.mark.parametrize("decode_samples_first", [False, True])
def test_a_slow_way_of_long_ago_has_nobody_refused(decode_samples_first):
    router, rest = core(prefill=1), {"decode_samples_first": decode_samples_first}
    for number in range(8):
        router.place(request(number, 100, **rest), 10.0 * number)
        router.prefill_reported(report("prefill-0", ended=(JobId(f"job-{number}"),)), 10.0 * number + 1)
        router.job_ended(JobEnded(JobId(f"job-{number}"), 9.0), 10.0 * number + 9)
    assert router.place(request(8, 100, **rest), 80.0).predicted_ttft_s == pytest.approx(9.0)
    router.job_ended(JobEnded(JobId("job-8")), 81.0)
    later_s = 70.0 + FORGET_AFTER_S + 1.0
    router.prefill_reported(report("prefill-0"), later_s)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), later_s)
    placed = [router.place(request(9 + n, 100, explicit=True, **rest), later_s) for n in range(2)]
    assert [type(one) for one in placed] == [Placed] * 2
    assert placed[0].predicted_ttft_s == pytest.approx(0.1 + 0.1)


def ends_in(e2e_s, number=1, *, output_tokens=1000, **objective):
    asked = replace(Objective(STANDARD, None, None, e2e_s=e2e_s), **objective)
    return PlacementRequested(JobId(f"e2e-{number}"), asked, False, 1000, 0, output_tokens=output_tokens)


def test_the_first_token_is_due_as_early_as_the_rest_of_the_answer_takes():
    router = core()
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 1, tpot_s=0.01), 0.0)
    guessed = router.place(ends_in(10.0), 0.0)
    assert guessed.ttft_budget_s < 10.0 - 255 * 0.01, "a stream beside another is slower"
    for number in range(20):
        router.job_ended(JobEnded(JobId(f"{number}"), answered=Answered(STANDARD, "anonymous", 601)), 0.0)
    learned = router.place(ends_in(10.0, 2), 0.0)
    assert learned.ttft_budget_s < 10.0 - 600 * 0.01
    assert learned.promised_ttft_s is None, "what is judged is the end"
    short = router.place(ends_in(10.0, 3, output_tokens=11), 0.0)
    assert short.ttft_budget_s == pytest.approx(10.0 - 10 * router.view.decode["decode-0"].pace.tpot_s(4))
    both = router.place(ends_in(10.0, 4, ttft_s=2.5, output_tokens=11), 0.0)
    assert (both.ttft_budget_s, both.promised_ttft_s) == (2.5, 2.5)


def test_an_answer_is_not_refused_for_good_as_its_decode_replica_was_slow_for_a_while():
    router = core()
    for number in range(40):
        told = DecodeReported(ReplicaId("decode-0"), 0.1, 4, tpot_s=1.0)
        router.view.decode_reported(told, number / 2)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 20.0)
    asked = replace(ends_in(10.0, ttft_s=2.0), explicit_deadline=True)
    assert isinstance(router.place(asked, 21.0), Rejected)
    assert isinstance(router.place(asked, 51.0), Placed), "it has decoded nothing for half a minute"


def test_the_answers_to_several_prompts_end_together():
    router = core()
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 1, tpot_s=0.03), 0.0)
    placed = router.place(replace(ends_in(2.0, output_tokens=128), prompts=8, answers_per_prompt=2), 0.0)
    assert placed.ttft_budget_s == pytest.approx(2.0 - 7 * router.view.decode["decode-0"].pace.tpot_s(2))
    assert placed.ttft_budget_s > 1.6


def test_an_answer_that_must_end_soon_is_decoded_where_it_can():
    router = core(decode=2)
    for replica, tpot_s in (("decode-0", 0.05), ("decode-1", 0.01)):
        router.view.decode_reported(DecodeReported(ReplicaId(replica), 0.0, 1, tpot_s=tpot_s), 0.0)
    assert router.place(ends_in(100.0, 1), 0.0).decode_replica == "decode-0"
    for number in range(2, 4):
        assert router.place(ends_in(10.0, number), 0.0).decode_replica == "decode-1"


def test_the_end_of_an_answer_that_is_due_too_soon_is_no_reason_to_give_up_its_first_token():
    router = core()
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 1, tpot_s=0.1), 0.0)
    placed = router.place(ends_in(20.0), 0.0)
    assert placed.ttft_budget_s == pytest.approx(2.0), "a tenth of it"
    assert isinstance(placed, Placed)


def test_a_tiers_own_objective_does_not_forbid_long_prompts():
    router = core(prefill=1)
    assert isinstance(router.place(request(1, 20_000), 0.0), Placed), "late, but nobody asked for 2 s"
    assert isinstance(router.place(request(2, 20_000, explicit=True), 0.0), Rejected)
    behind = router.place(request(3, 19_000), 0.0)
    assert isinstance(behind, Rejected), "but it does not queue behind twice its own time"


def test_a_clients_own_end_to_end_objective_forbids_a_prompt_that_takes_longer():
    router = core(prefill=1)
    named = {"ttft_s": 2.0, "output_tokens": 8}
    assert isinstance(router.place(replace(ends_in(5.0, 1, **named), prompt_tokens=8000), 0.0), Placed)
    router.job_ended(JobEnded(JobId("e2e-1")), 0.0)
    own = replace(ends_in(5.0, 2, **named), explicit_e2e_s=5.0)
    refused = router.place(replace(own, prompt_tokens=8000), 0.0)
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectionReason.DEADLINE_INFEASIBLE
    assert own.objective.budget_header(refused.ttft_budget_s) == "x-slo-e2e-ms", "not the tier's own 2 s"
    assert (refused.ttft_budget_s, refused.predicted_ttft_s) == (5.0, pytest.approx(8.1))
    assert isinstance(router.place(replace(own, prompt_tokens=4000), 0.0), Placed), "late only for its tier"


def test_a_budget_partly_spent_counts_from_arrival():
    placed = core().place(request(1, 1000, elapsed_s=0.3), 10.0)
    assert placed.predicted_ttft_s == pytest.approx(0.3 + 1.0 + 0.1)


def test_a_scaled_objective_resolves_to_the_idle_prefill_time():
    router = core()
    objective = Objective(STANDARD, None, None, ttft_scale=1.3)
    placed = router.place(PlacementRequested(JobId("a"), objective, False, 1000, 0), 0.0)
    assert placed.ttft_budget_s == pytest.approx(1.3)
