"""A replica whose KV memory is short: long prompts are not computed again and again."""

import math
from dataclasses import replace

import pytest

from simulator.arms.arms import ARMS
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.study.presets import PRESETS
from simulator.study.run import run
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

HARDWARE = replace(PRESETS["flowprefill-8b"].hardware, kv_tokens=144_000)
LONG, SHORTER, EVERY_S, SLACK_S = 128_000, 60_000, 40.0, 120.0


def test_a_long_prompt_is_not_thrown_away_for_those_that_have_time_to_spare():
    """Each of them finds the long one between two chunks, and not enough memory beside it."""
    alone_s = HARDWARE.cost.prefill_s(LONG)
    long = Arrival(0, 0.0, "long", LONG, 1, None, BACKGROUND)
    others = [
        Arrival(number, 30.0 + (number - 1) * EVERY_S, "shorter", SHORTER, 1, SLACK_S, STANDARD)
        for number in range(1, 11)
    ]
    first, *rest = run(ARMS["slackserve"], HARDWARE, [long, *others]).jobs
    assert first.ttft_s < 1.1 * alone_s
    assert all(job.is_on_time for job in rest)


def test_work_of_ended_chunks_that_is_lost_with_its_memory_is_wasted():
    """The long prompt has ended a chunk when it has to give its memory up, and does that again."""
    hardware = replace(HARDWARE, kv_tokens=20_000)
    long = Arrival(0, 0.0, "long", 18_000, 1, 30.0, STANDARD)
    urgent = Arrival(1, 0.9, "urgent", 9000, 1, 1.0, PREMIUM)
    served = run(ARMS["slackserve"], hardware, [long, urgent])
    alone = [run(ARMS["slackserve"], hardware, [each]) for each in (long, urgent)]
    useful_s = sum(one.replica.busy_s for one in alone)
    again_s = served.replica.busy_s - useful_s
    assert again_s > 0.3 * useful_s
    assert served.replica.busy_s - sum(job.wasted_s for job in served.jobs) == pytest.approx(
        useful_s, rel=0.02
    )


def served(asked, until_s, pulled_after_s=None, kv_tokens=40_000):
    """The jobs of these arrivals on a small memory; decode pulls each by its number, or at once."""
    loop, jobs = EventLoop(), []
    hardware = replace(HARDWARE, kv_tokens=kv_tokens)

    def prefilled(job):
        job.first_token_s = loop.now_s
        loop.call_at(loop.now_s + (pulled_after_s or {}).get(job.arrival.number, 0.01), replica.release, job)

    replica = ARMS["slackserve"].build(loop, hardware, {}, prefilled)
    for one in asked:
        due_s = math.inf if one.ttft_s is None else one.at_s + one.ttft_s
        jobs.append(Job(one, hardware.weights[one.tier], due_s))
        loop.call_at(one.at_s, replica.arrive, jobs[-1])
    loop.run(until_s)
    return jobs


def test_nobody_is_stopped_for_one_that_finds_no_memory():
    """Of two that are late each would be stopped for it, and the other take what that one holds."""
    first_s, large_s = (HARDWARE.cost.prefill_s(tokens) for tokens in (16_000, 33_000))
    asked = [
        Arrival(0, 0.0, "", 16_000, 1, None, STANDARD),
        Arrival(1, first_s + 0.01, "", 17_000, 1, 0.5, STANDARD),
        Arrival(2, first_s + 0.02, "", 17_000, 1, 0.5, STANDARD),
        Arrival(3, first_s + 0.03, "", 33_000, 1, large_s + 1.0, BACKGROUND),
        Arrival(4, 2.0, "", 300, 1, 0.4, PREMIUM),
    ]
    jobs = served(asked, 100.0, {0: 8.0})
    assert sum(job.preemptions for job in jobs) < 5
    assert jobs[-1].first_token_s < jobs[-1].deadline_s


def test_long_prompts_of_several_tiers_of_which_memory_holds_one_all_end():
    """Each tier leads in turn, and would take the memory of whoever was computed before, for ever."""
    tiers = STANDARD, BACKGROUND, PREMIUM
    asked = [Arrival(n, 0.1 * n, "", 30_000 + 17 * n, 1, None, tiers[n % 3]) for n in range(60)]
    alone_s = sum(HARDWARE.cost.prefill_s(each.tokens) for each in asked)
    assert all(job.prefilled_s < 2 * alone_s for job in served(asked, 3 * alone_s))


def test_a_step_is_stopped_for_one_whose_memory_decode_has_pulled_meanwhile():
    """When it was chosen, what the one before it had held was still to be pulled."""
    alone_s = HARDWARE.cost.prefill_s(24_000)
    asked = [
        Arrival(0, 0.0, "", 24_000, 1, None, BACKGROUND),
        Arrival(1, 1.4, "", 10_000, 1, 1.4, STANDARD),
        Arrival(2, 1.5, "", 24_000, 1, alone_s + 1.0, PREMIUM),
        Arrival(3, 1.6, "", 3_900, 1, 8.0, STANDARD),
    ]
    jobs = served(asked, 60.0, {1: 0.004}, kv_tokens=33_000)
    assert jobs[2].first_token_s < jobs[2].deadline_s


def test_a_step_that_others_wait_for_is_stopped_for_one_that_has_no_time_to():
    """Its memory is there as soon as decode has pulled what has just ended."""
    middle_s, urgent_s = (HARDWARE.cost.prefill_s(tokens) for tokens in (20_000, 21_000))
    asked = [
        Arrival(0, 0.0, "", 16_000, 1, None, BACKGROUND),
        Arrival(1, 0.3, "", 20_000, 1, middle_s + 0.1, STANDARD),
        Arrival(2, 0.3 + middle_s / 2, "", 21_000, 1, middle_s / 2 + urgent_s + 0.3, PREMIUM),
    ]
    jobs = served(asked, 60.0, {1: 0.004})
    assert jobs[2].first_token_s < jobs[2].deadline_s
