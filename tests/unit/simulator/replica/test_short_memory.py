"""A replica whose KV memory is short: long prompts are not computed again and again."""

from dataclasses import replace

from simulator.arms.arms import ARMS
from simulator.study.presets import PRESETS
from simulator.study.run import run
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, STANDARD

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
