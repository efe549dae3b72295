"""One prefill replica in virtual time, run in each way that is compared."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.config.preemption import PreemptionConfig
from prefill_node.engine.queue import QueueView
from prefill_node.replica.governing.governor import Governor
from simulator.arms.arms import ARMS
from simulator.cost.operators import LLAMA_3_8B, LLAMA_3_8B_A100
from simulator.cost.passes import CostModel
from simulator.findings import State
from simulator.replica.hardware import Hardware
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.study.presets import PRESETS
from simulator.study.run import run
from simulator.workload.arrivals import Arrival
from slo.queue.batching import STEP_TOKENS
from slo.queue.order import Aim
from slo.tiers import DEFAULT_TIERS, PREMIUM, STANDARD

HARDWARE = Hardware(CostModel(LLAMA_3_8B, LLAMA_3_8B_A100))
LONG_TOKENS = STEP_TOKENS  # one step
LONG_S = HARDWARE.cost.prefill_s(LONG_TOKENS)
SOON_S = 0.2
URGENT_S = HARDWARE.cost.prefill_s(200)
EVERY_ARM = sorted(ARMS)
MIX = PRESETS["flowprefill-8b"].workload


def arrival(number, at_s, tokens, ttft_s, tier=STANDARD, blocks=()):
    return Arrival(number, at_s, "kind", tokens, 1, ttft_s, tier, blocks)


OVERTAKING = [arrival(0, 0.0, LONG_TOKENS, 30.0), arrival(1, SOON_S, 200, 0.25, PREMIUM)]


def served(arm, arrivals=OVERTAKING, setting=None, **about):
    return run(ARMS[arm], HARDWARE, arrivals, setting or ARMS[arm].settings[0], **about)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_where_a_peer_runs_whole_prompts_it_is_compared_in_chunks_too_and_with_what_suspends(preset):
    in_chunks = {"fcfs": "fcfs-chunked", "sedf": "sedf-chunked", "tier-order": "tier-chunked"}
    assert {in_chunks[arm] for arm in preset.arms if arm in in_chunks} <= set(preset.arms)
    assert {"sedf-chunked", "sedf-resume"} <= set(preset.arms)


@pytest.mark.parametrize("arm", ["fcfs", "tier-order", "sedf"])
def test_whole_prompts_take_from_the_cache_what_it_holds_when_they_start(arm):
    """The last does not fit beside the one before it, and waits: by then what they share is there."""
    shared = (0, 1, 2)
    stream = [arrival(0, 0.0, 4000, 60.0)]
    stream += [arrival(number, 0.01 * number, 1900, 60.0, blocks=shared) for number in (1, 2)]
    replica = served(arm, stream, {"join_tokens": 2048.0}).replica
    passes_s = [HARDWARE.cost.prefill_s(4000), HARDWARE.cost.prefill_s(1900)]
    assert replica.busy_s == pytest.approx(sum(passes_s) + HARDWARE.cost.prefill_s(1900 - 1536, 1536))


@pytest.mark.parametrize("arm", EVERY_ARM)
def test_everything_is_served_once_and_in_the_same_way_again(arm):
    stream = MIX.stream(6.0, 150, 3)
    first, again = served(arm, stream), served(arm, stream)
    assert [job.first_token_s for job in first.jobs] == [job.first_token_s for job in again.jobs]
    for job in first.jobs:
        alone_s = HARDWARE.cost.prefill_s(job.num_tokens) - HARDWARE.cost.step_s
        assert job.first_token_s == math.inf or job.ttft_s >= 0.9 * alone_s
        assert job.first_token_s < math.inf or job.deadline_s <= first.ended_s, "given up before it was late"


@pytest.mark.parametrize("arm", EVERY_ARM)
def test_alone_each_request_takes_its_own_time_in_every_arm(arm):
    lone = [arrival(n, 10.0 * n, tokens, 9.0) for n, tokens in enumerate((64, 500, 2000))]
    for setting in ARMS[arm].settings[-1:]:
        for job in served(arm, lone, setting).jobs:
            expected_s = HARDWARE.cost.prefill_s(job.num_tokens)
            assert job.ttft_s == pytest.approx(expected_s)
            assert job.preemptions == 0


@pytest.mark.parametrize("arm", ["fcfs", "sedf", "slackserve-off", "abort-conservative", "tier-order"])
def test_without_preemption_an_urgent_request_waits_for_the_whole_pass(arm):
    long, urgent = served(arm).jobs
    assert urgent.ttft_s == pytest.approx(LONG_S - SOON_S + URGENT_S)
    assert not urgent.is_on_time
    assert long.preemptions == 0


def test_in_chunks_it_waits_for_a_chunk():
    for arm, meets in (("fcfs-chunked", False), ("sedf-chunked", True)):
        assert served(arm, setting={"chunk_tokens": 1024.0}).jobs[1].is_on_time is meets


@pytest.mark.parametrize("arm", ["sedf-resume", "slackserve"])
def test_suspended_it_goes_on_where_it_stopped(arm):
    result = served(arm)
    long, urgent = result.jobs
    (blocking_s,) = result.replica.blocking_s
    assert urgent.is_on_time
    assert (long.preemptions, urgent.preemptions) == (1, 0)
    half_layer_s = LONG_S / HARDWARE.cost.shape.layers * (0.8 if arm == "slackserve" else 0.0)
    assert 0.0 <= long.wasted_s <= half_layer_s, "a server does at most the half layer again"
    passes_s = 2 * HARDWARE.cost.step_s + long.wasted_s
    assert long.ttft_s == pytest.approx(LONG_S + URGENT_S + passes_s, abs=2 * HARDWARE.cost.step_s)
    assert blocking_s < 0.1


def test_a_server_does_the_half_layer_again_in_which_it_stopped():
    long, urgent = OVERTAKING
    wasted_s = {
        served("slackserve", [long, replace(urgent, at_s=0.3 + 0.002 * number)]).jobs[0].wasted_s
        for number in range(20)
    }
    assert min(wasted_s) == 0.0 < max(wasted_s), "where it stops on the half layer nothing is lost"


@pytest.mark.parametrize("arm", ["sedf-recompute", "abort-all-lifted"])
def test_aborted_it_starts_over(arm):
    long, urgent = served(arm).jobs
    assert urgent.is_on_time
    assert long.preemptions == 1
    assert long.wasted_s == pytest.approx(SOON_S, rel=0.1)
    assert long.ttft_s == pytest.approx(LONG_S + SOON_S + URGENT_S, rel=0.05)


def test_finer_boundaries_stop_sooner():
    long, urgent = OVERTAKING
    moments = [[long, replace(urgent, at_s=0.3 + 0.01 * n)] for n in range(20)]
    fine, coarse = (
        sum(served(arm, both).replica.blocking_s[0] for both in moments)
        for arm in ("sedf-resume", "sedf-recompute")
    )
    assert fine < 0.5 * coarse


def test_the_replica_runs_the_code_that_serves():
    replica = ARMS["slackserve"].build(EventLoop(), HARDWARE, {}, lambda _: None)
    assert isinstance(replica.governor, Governor)
    assert isinstance(replica.engine._queues, QueueView)
    configured = PreemptionConfig()
    assert replica.governor.rules == configured.rules("cuda")
    assert replica.governor.queue_order is configured.order
    assert replica.governor.profile.ahead_s == configured.launch_ahead_ms / 1000
    assert replica.governor.profile.within_s == configured.stop_within_s("cuda")
    assert replica.engine._stepper.rules.join_tokens == configured.join_tokens
    assert (replica.engine._stepper.rules.targets is None) == (configured.aim is Aim.REQUESTS)


@pytest.mark.parametrize(("on_host", "accelerator"), [(False, "cuda"), (True, "cpu")])
def test_chunks_are_cut_as_the_servers_cut_them_there(on_host, accelerator):
    hardware = replace(HARDWARE, on_host=on_host)
    replica = ARMS["slackserve"].build(EventLoop(), hardware, {}, lambda _: None)
    assert replica.governor.profile.within_s == PreemptionConfig().stop_within_s(accelerator)
    assert replica.engine._stepper.rules.stop == replica.governor.profile.bound is not None


@pytest.mark.parametrize(("on_host", "accelerator"), [(False, "cuda"), (True, "cpu")])
def test_stops_are_put_off_as_the_servers_put_them_off_there(on_host, accelerator):
    replica = ARMS["slackserve"].build(EventLoop(), replace(HARDWARE, on_host=on_host), {}, lambda _: None)
    assert replica.governor.rules == PreemptionConfig().rules(accelerator)


def test_peers_have_no_bound_on_a_cpu_either():
    replica = ARMS["sedf-resume"].build(EventLoop(), replace(HARDWARE, on_host=True), {}, lambda _: None)
    assert replica.engine._stepper.rules.stop is None


@pytest.mark.parametrize("arm", ["sedf-resume-layer", "sedf-resume", "slackserve", "slackserve-chunked"])
def test_predictions_have_the_charge_of_each_boundary_that_a_pass_has(arm):
    charged = replace(HARDWARE, cost=replace(HARDWARE.cost, check_s=2e-5, _by_tokens={}))
    setting = {"join_tokens": 2048, "chunk_tokens": 8192}
    free, dear = (
        ARMS[arm].build(EventLoop(), hardware, setting, lambda _: None).engine
        for hardware in (HARDWARE, charged)
    )
    told_s = dear._stepper.rules.predictor.fixed_s - free._stepper.rules.predictor.fixed_s
    assert told_s == pytest.approx(2e-5 * dear._cost.times([(512, 0)]).boundaries, rel=0.05)


def test_a_prefix_that_is_known_is_not_computed_again():
    blocks = tuple(range(8))
    twice = [arrival(0, 0.0, 4200, 9.0, blocks=blocks), arrival(1, 5.0, 4200, 9.0, blocks=blocks)]
    for arm in ("fcfs", "slackserve"):
        first, second = served(arm, twice).jobs
        assert second.ttft_s < 0.2 * first.ttft_s


def test_what_does_not_fit_into_kv_memory_waits():
    small = replace(HARDWARE, kv_tokens=5000)
    both = [arrival(0, 0.0, 4000, 9.0), arrival(1, 0.0, 4000, 9.0)]
    first, second = run(ARMS["slackserve"], small, both, {}).jobs
    assert second.ttft_s == pytest.approx(2 * first.ttft_s, rel=0.01)


def test_who_lost_its_memory_waits_as_one_that_was_stopped():
    replica = ARMS["slackserve"].build(EventLoop(), HARDWARE, {}, lambda _: None)
    engine, job = replica.engine, Job(arrival(0, 0.0, 4000, 9.0), 1.0, 9.0)
    engine.add(job, job.arrival_time)
    engine.issue(0.0)
    engine.stop(0.1, 3, "", keep=True)
    engine._start_over([job.request_id], 0.2)
    (queued,) = engine._queues.queued()
    assert queued.prefill.preemptions == 1


def test_histories_are_without_gaps():
    for job in served("slackserve", MIX.stream(7.0, 200, 1), traced=True).jobs:
        times = [at_s for _, at_s in job.history]
        assert times == sorted(times)
        assert (job.history[0][0], times[0]) == (State.WAITING, pytest.approx(job.arrival.at_s))


def test_it_ends_as_soon_as_too_many_are_late():
    stream = MIX.stream(30.0, 2000, 1)
    whole, cut = served("fcfs", stream), served("fcfs", stream, max_misses=20)
    assert cut.ended_s < 0.5 * whole.ended_s
    assert sum(not job.is_on_time for job in whole.jobs) > 20


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3), st.integers(1, 9000), st.floats(0.05, 5), st.sampled_from(DEFAULT_TIERS.names)
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(["slackserve", "sedf-resume", "sedf-recompute"]),
)
def test_at_rest_nothing_is_held(requests, arm):
    arrivals = [
        arrival(number, at_s, tokens, ttft_s, tier)
        for number, (at_s, tokens, ttft_s, tier) in enumerate(sorted(requests, key=lambda item: item[0]))
    ]
    last = arrival(len(arrivals), 1e5, 10, 1e5)
    result = served(arm, [*arrivals, last])
    engine = result.replica.engine
    assert all(job.first_token_s < math.inf for job in result.jobs)
    assert (engine.running, engine.waiting, engine.requests) == ([], [], {})
    assert engine._suspensions.steps == []
    assert engine.kv_usage == 0.0
    assert not result.replica.ledger.accepted


def test_under_its_own_conditions_the_abort_variant_gains_nothing():
    """No arrival is seen during a pass, so there is nobody to abort it for."""
    stream = PRESETS["blog-70b"].workload.stream(2.0, 300, 1)
    hardware = PRESETS["blog-70b"].hardware
    control, conservative, aggressive = (
        [job.first_token_s for job in run(ARMS[f"abort-{name}"], hardware, stream, {}).jobs]
        for name in ("control", "conservative", "aggressive")
    )
    assert conservative == aggressive == control
    seeing = [job.first_token_s for job in run(ARMS["abort-sees-arrivals"], hardware, stream, {}).jobs]
    assert seeing != control
