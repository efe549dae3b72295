"""A replica whose KV memory is short: long prompts are not computed again and again."""

from dataclasses import replace

import pytest

from simulator.arms.arms import ARMS
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
