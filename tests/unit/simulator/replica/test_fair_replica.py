"""A replica whose time is wanted by those who can be on time: the others get their share all the same."""

from dataclasses import replace
from functools import cache

from simulator.arms.arm import Arm
from simulator.arms.arms import ARMS, OURS, Scheduling
from simulator.cost.passes import Granularity
from simulator.study.presets import PRESETS
from simulator.study.run import run
from simulator.workload.arrivals import Kind, Mix
from slo.preemption.types import LAUNCH_AHEAD_S
from slo.queue.fairness import STARVATION_TIMEOUT_S
from slo.queue.order import DEFAULT_ORDER
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

HARDWARE = PRESETS["flowprefill-8b"].hardware
LOADS = {PREMIUM: 0.4, STANDARD: 1.0, BACKGROUND: 0.1}
TOKENS = {PREMIUM: 4000, STANDARD: 9000, BACKGROUND: 9000}
TTFT_S = {PREMIUM: 2.0, STANDARD: 8.0, BACKGROUND: None}
SECONDS = 260.0
UNFAIR = Arm(
    "unfair",
    "Without fairness",
    Scheduling(OURS, DEFAULT_ORDER, Granularity.SUBLAYER, 1, foresees=True).build,
)


ARM_NAMED = {arm.name: arm for arm in (ARMS["slackserve"], UNFAIR)}


@cache
def served(name):
    """The requests by tier; each tier has its load, in prompts of one length."""
    work_s = {tier: HARDWARE.cost.prefill_s(tokens) for tier, tokens in TOKENS.items()}
    rates = {tier: load / work_s[tier] for tier, load in LOADS.items()}
    kinds = {
        tier: Kind(rates[tier], TOKENS[tier], TTFT_S[tier], tier, sigma=0.01, range_tokens=(16, 32_000))
        for tier in LOADS
    }
    rate_rps = sum(rates.values())
    jobs = run(ARM_NAMED[name], HARDWARE, Mix(kinds).stream(rate_rps, int(rate_rps * SECONDS), 1)).jobs
    return {tier: [job for job in jobs if job.arrival.tier == tier] for tier in LOADS}


def early(jobs):
    """Those that arrived early enough to have waited for long before the end of the stream."""
    return [job for job in jobs if job.arrival.at_s < SECONDS - 4 * STARVATION_TIMEOUT_S]


def on_time(jobs):
    return sum(job.is_on_time for job in jobs) / len(jobs)


def test_background_starts_in_bounded_time():
    """Its load is below its share, so that nothing piles up: each waits for its own two patiences at most."""
    work_s = HARDWARE.cost.prefill_s(TOKENS[BACKGROUND])
    between_s = work_s / DEFAULT_TIERS[BACKGROUND].share
    waits = [job.ttft_s for job in early(served("slackserve")[BACKGROUND])]
    assert len(waits) > 10
    assert max(waits) < 2 * STARVATION_TIMEOUT_S + 3 * between_s


def test_without_fairness_it_would_not():
    waits = [job.ttft_s for job in early(served("unfair")[BACKGROUND])]
    assert max(waits) > 4 * STARVATION_TIMEOUT_S


def test_premium_pays_next_to_nothing_as_long_as_it_leaves_any_time():
    fair, unfair = served("slackserve")[PREMIUM], served("unfair")[PREMIUM]
    assert on_time(fair) >= on_time(unfair) - 0.02


def test_standard_pays_no_more_than_the_share():
    fair, unfair = served("slackserve")[STANDARD], served("unfair")[STANDARD]
    paid = (on_time(unfair) - on_time(fair)) * LOADS[STANDARD]
    assert paid < DEFAULT_TIERS[BACKGROUND].share + 0.05


@cache
def urgent_on_time(name):
    """Urgent requests on time in an overload without end, where most that is stopped is given up."""
    preset = PRESETS["blog-70b"]
    hardware = preset.hardware
    jobs = run(OVERLOADED[name], hardware, preset.workload.stream(6.0, 1200, 1)).jobs
    return on_time([job for job in jobs if job.arrival.kind == "urgent"])


def ours(**limits):
    rules = replace(OURS, limits=replace(OURS.limits, **limits))
    scheduling = Scheduling(
        rules,
        DEFAULT_ORDER,
        Granularity.REPLAYED,
        LAUNCH_AHEAD_S,
        step_tokens=8192,
        foresees=True,
        is_fair=True,
    )
    return Arm("limited", "With these limits", scheduling.build)


OVERLOADED = {
    "four places": ours(max_suspended_steps=4),
    "no limits": ours(max_suspended_steps=1 << 30, max_suspended_bytes=1 << 60),
}


def test_what_is_suspended_and_late_does_not_end_preemption():
    assert urgent_on_time("no limits") > 0.5
    assert urgent_on_time("four places") > urgent_on_time("no limits") - 0.06
