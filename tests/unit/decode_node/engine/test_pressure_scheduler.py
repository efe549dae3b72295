"""The scheduler of decode under pressure, on vLLM's real scheduler and blocks, without a model."""

import math
import random
import time
from types import SimpleNamespace

import msgspec
import pytest
from decode_steps import Stepped
from real_schedulers import BLOCK, build
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import RequestStatus

from decode_node.engine.pressure_scheduler import PressureScheduler
from decode_node.engine.setup import DecodeSetup
from decode_node.requests.leaving import LEFT, MAY_LEAVE_XARG
from decode_node.scheduler import CarryingScheduler
from kv_transfer.connector import NixlConnector
from kv_transfer.swap.book import SwapBook
from slo.decode.predicted_peak import Pool
from slo.decode.restore import STARVES_AFTER_S
from slo.decode.step_time import StepShape
from slo.decode.victims import IMMUNE_AFTER, VictimReason
from slo.request import FIRST_DUE_XARG, JOB_XARG
from telemetry.pressure import PRESSURE_KEY, PressureFigures

pytestmark = pytest.mark.slow

LOW, MIDDLE, TOP = "background", "standard", "premium"


@pytest.fixture
def stepped(tiny_model):
    def make(blocks, scheduler=PressureScheduler, **options):
        return Stepped(build(scheduler, tiny_model, blocks, **options))

    return make


def reasons(engine):
    return [reason for _, reason, _ in engine.scheduler._report.figures.preempted]


def knows_steps(engine, fixed_s=0.0, stream_s=0.0, prompt_s=0.0):
    """The engine has learned that its steps take this, and learns nothing more."""
    times = engine.scheduler._times
    times.fixed_s, times.stream_s, times._prompt_s, times._steps = fixed_s, stream_s, prompt_s, 100
    times.observe = lambda shape, seconds: None


def expects(engine, tokens, tiers=(LOW, MIDDLE, TOP)):
    """Answers so far were of this length."""
    for tier in tiers:
        for _ in range(40):
            engine.scheduler._lengths.ended(tier, "", tokens)
    engine.scheduler._lengths.factor = 1.0


def full_of_the_lowest(stepped):
    """An engine whose memory streams of the lowest tier hold, of whom none has lost any."""
    engine = stepped(60)
    expects(engine, 1)
    for number in range(4):
        engine.add(f"low{number}", 120, 200, tier=LOW)
    while engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 1:
        engine.step()
    assert not engine.preempted
    expects(engine, 200)
    return engine


def test_with_ample_memory_the_steps_are_those_of_vllm(stepped):
    engines = [stepped(2000), stepped(2000, CarryingScheduler)]
    rng = random.Random(1)
    plan = [
        (f"r{i}", rng.randrange(5, 300), rng.randrange(1, 80), rng.choice([LOW, MIDDLE, TOP]))
        for i in range(40)
    ]
    for at in range(200):
        for engine in engines:
            if at % 3 == 0 and at // 3 < len(plan):
                name, prompt, tokens, tier = plan[at // 3]
                engine.add(name, prompt, tokens, tier=tier)
            engine.step()
    ours, vllms = [[output.num_scheduled_tokens for output in engine.outputs] for engine in engines]
    assert ours == vllms
    assert [list(one) for one in ours] == [list(one) for one in vllms], "in the same order"
    for engine in engines:
        engine.finish()
        assert not engine.preempted


def test_who_runs_out_of_memory_takes_it_from_the_lower_tier(stepped):
    engine = stepped(24)
    expects(engine, 1)  # the prediction is far too low, so that all are admitted
    engine.add("top", 100, 200, tier=TOP)
    engine.add("low", 100, 120, tier=LOW)
    engine.add("mid", 100, 120, tier=MIDDLE)
    engine.finish()
    assert engine.preempted
    assert "top" not in engine.preempted
    assert engine.preempted[0] == "low"
    assert VictimReason.VLLM.value not in reasons(engine)


def test_vllm_would_have_taken_it_from_whoever_came_last(stepped):
    engine = stepped(24, CarryingScheduler)
    for name, tier in (("low", LOW), ("mid", MIDDLE), ("top", TOP)):
        engine.add(name, 100, 120, tier=tier)
    engine.finish()
    assert engine.preempted[0] == "top"


@pytest.mark.parametrize(
    ("logprobs", "steps", "by"),
    [(1, 2, "recompute"), (None, 2, "swap"), (1, 12, "swap")],
    ids=["in the midst of its prompt", "that asks for none", "behind its prompt"],
)
def test_log_probabilities_of_half_a_prompt_do_not_survive_in_host_memory(stepped, logprobs, steps, by):
    engine = stepped(60)
    knows_steps(engine, fixed_s=0.001, prompt_s=0.001)
    swaps = engine.scheduler._relief._swaps = SwapBook(100, BLOCK)
    swaps.block_s = 1e-6
    engine.add("other", 16, 50)
    request = engine.add("low", 400, 50, tier=LOW)
    request.sampling_params.prompt_logprobs = logprobs
    for _ in range(steps):
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, time.monotonic())
    assert engine.scheduler._report.figures.preempted == [(LOW, "vllm", by)]
    assert bool(swaps.tokens_of("low")) is (by == "swap")


def test_only_a_reset_that_takes_place_forgets_host_memory_and_nothing_is_moved_there_for_one(stepped):
    engine = stepped(60)
    knows_steps(engine, fixed_s=0.001, prompt_s=0.001)
    scheduler = engine.scheduler
    swaps = scheduler._swaps = scheduler._relief._swaps = SwapBook(100, BLOCK)
    swaps.block_s = 1e-6
    engine.add("stays", 400, 50, tier=LOW)
    request = engine.add("gone", 100, 50, tier=LOW)
    for _ in range(12):
        engine.step()
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    swaps.step()
    kept = swaps.tokens_of("gone")
    assert kept >= 100
    assert not scheduler.reset_prefix_cache(), "a stream runs"
    assert swaps.tokens_of("gone") == kept
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not swaps.tokens_of("gone")
    assert scheduler._report.figures.preempted == [(LOW, "vllm", "swap"), (LOW, "vllm", "recompute")]
    assert swaps.step() is None
    engine.finish()


def test_a_stream_that_has_just_started_is_spared(stepped):
    engine = stepped(30)
    expects(engine, 1)
    for name in ("one", "two", "three"):
        engine.add(name, 120, 200)
    for _ in range(60):
        engine.step()
    engine.add("fresh", 16, 200)
    while not engine.preempted:
        engine.step()
        assert engine.scheduler.requests["fresh"].num_output_tokens < 40
    if engine.scheduler.requests["fresh"].num_output_tokens < 20:
        assert engine.preempted[0] != "fresh"
    engine.finish()


def test_only_blocks_that_a_victim_alone_holds_count(stepped):
    """Two share a long prefix: taking one of them would free next to nothing."""
    engine = stepped(40)
    engine.scheduler._lengths.factor = 0.0  # so that all are admitted, and share
    shared = list(range(50_000, 50_000 + 20 * BLOCK))
    engine.add("first", 0, 150, tokens=[*shared, 1])
    for _ in range(8):
        engine.step()
    engine.add("second", 0, 150, tokens=[*shared, 2])
    engine.add("own", 8 * BLOCK, 150)
    while not engine.preempted:
        engine.step()
    assert engine.preempted[0] == "own"
    engine.finish()


def share_a_prefix(engine, blocks, tops):
    """Streams of the top tier whose prompts begin alike; one of the lowest is beside them."""
    shared = list(range(50_000, 50_000 + blocks * BLOCK))
    for number in range(tops):
        engine.add(f"top{number}", 0, 100, tier=TOP, tokens=[*shared, number])
        for _ in range(blocks * BLOCK // 64 + 2):
            engine.step()
    engine.add("low", 16, 100, tier=LOW)
    engine.step()
    assert len(engine.scheduler.running) == tops + 1
    return shared


def test_a_prefix_that_the_top_tier_shares_counts_once_beside_a_stream_of_a_lower_tier(stepped):
    engine = stepped(100)
    expects(engine, 50)
    shared = share_a_prefix(engine, 40, tops=3)
    engine.add("next", 0, 50, tier=TOP, tokens=[*shared, 99])
    assert "next" in engine.step().num_scheduled_tokens
    engine.finish()


def test_a_newcomer_needs_no_memory_for_a_prefix_that_others_hold(stepped):
    engine = stepped(100)
    expects(engine, 50)
    shared = share_a_prefix(engine, 60, tops=2)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < 60
    engine.add("next", 0, 50, tier=TOP, tokens=[*shared, 99])
    assert "next" in engine.step().num_scheduled_tokens
    engine.finish()


def test_what_is_kept_for_the_top_tier_is_what_it_does_not_hold_shared_blocks_counted_once(stepped):
    engine = stepped(1000)
    expects(engine, 50)
    share_a_prefix(engine, 30, tops=4)
    scheduler, now_s = engine.scheduler, time.monotonic()
    held = scheduler._view.distinct_blocks(scheduler.running[:4])
    assert held < 50, "of 128 that they hold one by one"
    kept = scheduler._admission.reserved_tokens(scheduler.running, now_s)
    assert kept == pytest.approx((0.05 * 1000 - held) * BLOCK)
    engine.finish()


def test_the_third_time_another_one_goes(stepped):
    engine = stepped(20)
    expects(engine, 1)
    for name in ("a", "b", "c", "d"):
        engine.add(name, 60, 160)
    engine.finish()
    counted = {name: engine.preempted.count(name) for name in engine.preempted}
    immune = [reason for reason in reasons(engine) if reason == VictimReason.IMMUNE.value]
    assert sum(counted.values()) > 2
    assert max(counted.values()) <= 2 + len(immune)


def test_a_sequence_is_computed_again_in_chunks_that_the_tightest_pace_bears(stepped):
    engine = stepped(34, chunk=256)
    knows_steps(engine, prompt_s=0.001)
    expects(engine, 1)
    engine.add("top", 64, 220, tier=TOP, tpot_s=0.064)
    for name in ("x", "y"):
        engine.add(name, 160, 160, tier=LOW)
    while not engine.preempted:
        engine.step()
    seen = len(engine.outputs)
    engine.finish()
    restoring = set(engine.preempted)
    for output in engine.outputs[seen:]:
        if "top" in output.num_scheduled_tokens:
            chunks = [output.num_scheduled_tokens.get(name, 0) for name in restoring]
            assert sum(n for n in chunks if n > 1) <= 32, "half of 64 ms, at 1 ms a token"
    assert engine.scheduler._report.figures.recomputed_tokens > 0
    assert len(engine.scheduler._report.figures.restored) == len(engine.preempted)


def test_only_who_has_a_token_in_the_step_bounds_what_is_computed_again_beside_it(stepped):
    engine = stepped(500, chunk=256)
    knows_steps(engine, prompt_s=0.001)
    pace = engine.scheduler._pace
    engine.add("free", 16, 100, tier=LOW)
    for _ in range(2):
        engine.step()
    engine.add("waits", 16, 100, tier=LOW, tpot_s=0.02)
    assert pace.chunk_tokens() == 256
    engine.scheduler.finish_requests("waits", RequestStatus.FINISHED_ABORTED)
    engine.add("computes", 1500, 100, tier=LOW, tpot_s=0.02)
    engine.step()
    assert pace.chunk_tokens() == 256, "its own prompt is computed"
    engine.add("decodes", 16, 100, tier=LOW, tpot_s=0.064)
    for _ in range(2):
        engine.step()
    assert pace.chunk_tokens() == 32
    engine.finish()


def test_a_victim_waits_until_there_is_room_for_it_to_end(stepped):
    engine = stepped(30)
    expects(engine, 100)
    for name in ("a", "b", "c"):
        engine.add(name, 140, 100)
    engine.finish()
    assert len(engine.preempted) <= 1, "of three that cannot all end at once one waits, or goes once"


def test_a_newcomer_waits_for_the_predicted_peak_and_the_top_tier_does_not_wait_for_the_reserve(stepped):
    engine = stepped(100)
    expects(engine, 400)
    engine.add("a", 400, 400)
    engine.step()
    engine.add("b", 400, 400)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a"]
    engine.add("small", 16, 10)
    engine.step()
    assert "small" not in [request.request_id for request in engine.scheduler.running], "b is before it"
    engine.add("top", 200, 100, tier=TOP)
    engine.step()
    assert "top" in [request.request_id for request in engine.scheduler.running]
    engine.finish()
    assert engine.finished.index("a") < engine.finished.index("b")


def test_while_all_places_are_taken_nobody_is_looked_at(stepped, monkeypatch):
    engine = stepped(5000, max_num_seqs=4)
    for number in range(100):
        engine.add(str(number), 16, 50)
    engine.step()
    assert len(engine.scheduler.running) == 4
    looks = []
    monkeypatch.setattr(Pool, "fit", lambda *_: looks.append(1))
    engine.step()
    assert looks == []
    monkeypatch.undo()
    engine.finish()


def test_places_are_kept_for_the_top_tier_once_it_has_come(stepped, monkeypatch):
    engine = stepped(5000, max_num_seqs=20)
    for number in range(30):
        engine.add(f"early{number}", 16, 8, tier=LOW)
    engine.step()
    assert len(engine.scheduler.running) == 20, "nothing is kept for a tier that nobody has asked for"
    engine.add("first", 16, 5, tier=TOP)
    for number in range(40):
        engine.add(f"low{number}", 16, 60, tier=LOW)
    for _ in range(30):
        engine.step()
    assert "first" in engine.finished
    assert len(engine.scheduler.running) == 19
    looks = []
    monkeypatch.setattr(Pool, "fit", lambda *_: looks.append(1))
    engine.step()
    assert looks == [], "nobody that waits may have the place"
    monkeypatch.undo()
    engine.add("top", 16, 10, tier=TOP)
    assert "top" in engine.step().num_scheduled_tokens
    engine.finish()


@pytest.mark.parametrize("places", [4, 20])
def test_a_place_that_becomes_free_goes_to_the_highest_tier_whoever_waits_for_longer(stepped, places):
    engine = stepped(5000, max_num_seqs=places)
    for number in range(places):
        engine.add(f"early{number}", 16, 60 if number else 5, tier=LOW)
    engine.step()
    for number in range(6):
        engine.add(f"low{number}", 16, 60, tier=LOW)
    engine.add("mid", 16, 60, tier=MIDDLE)
    while "early0" not in engine.finished:
        engine.step()
    engine.step()
    started = [request.request_id for request in engine.scheduler.running]
    assert "mid" in started
    assert len(started) == places
    engine.finish()


def test_one_of_the_top_tier_takes_the_last_place_where_none_is_kept_any_more(stepped):
    engine = stepped(5000, max_num_seqs=20)
    for name in ("top0", "top1"):
        engine.add(name, 16, 60, tier=TOP)
    for number in range(18):
        engine.add(f"early{number}", 16, 60 if number else 5, tier=LOW)
    engine.step()
    assert len(engine.scheduler.running) == 20
    engine.add("low", 16, 60, tier=LOW)
    engine.add("top2", 16, 60, tier=TOP)
    while "early0" not in engine.finished:
        engine.step()
    engine.step()
    started = [request.request_id for request in engine.scheduler.running]
    assert "top2" in started
    assert "low" not in started
    engine.finish()


def test_streams_whose_kv_is_on_its_way_take_no_place_that_is_kept(stepped):
    engine = stepped(5000, max_num_seqs=20)
    engine.add("first", 16, 5, tier=TOP)
    engine.step()
    scheduler = engine.scheduler
    for number in range(18):
        request = engine.add(f"pulled{number}", 20, 60, tier=LOW)
        scheduler.kv_cache_manager.allocate_slots(request, 20, delay_cache_blocks=True)
        scheduler.waiting.remove_request(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        scheduler.skipped_waiting.add_request(request)
    for number in range(4):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    engine.step()
    assert len(scheduler.running) == 2, "one has the place that is left beside those"
    for number in range(18):
        scheduler.finished_recving_kv_req_ids.add(f"pulled{number}")
        scheduler.finish_requests(f"pulled{number}", RequestStatus.FINISHED_ABORTED)
    engine.finish()


def test_one_held_to_a_grammar_waits_for_memory_like_any_other(stepped):
    engine = stepped(100)
    expects(engine, 400)
    engine.add("a", 400, 400)
    engine.step()
    request = engine.add("b", 400, 400)
    engine.scheduler.waiting.remove_request(request)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=object())
    engine.scheduler.skipped_waiting.add_request(request)
    assert "b" not in engine.step().num_scheduled_tokens
    request.structured_output_request = None
    engine.finish()


def test_prompts_that_are_computed_under_pressure_leave_something_for_the_streams(stepped):
    engine = stepped(2000)
    for number in range(10):
        engine.add(f"low{number}", 16, 200, tier=LOW)
    engine.step()
    for name in ("top1", "top2"):
        engine.add(name, 600, 5, tier=TOP)
    engine.step()
    engine.scheduler.running.sort(key=lambda request: not request.request_id.startswith("top"))
    engine.scheduler._book.restoring.add("low0")
    assert sum(name.startswith("low") for name in engine.step().num_scheduled_tokens) == 10
    engine.finish()


def test_the_top_tier_starts_within_what_is_kept_for_it_whoever_holds_that(stepped):
    engine = full_of_the_lowest(stepped)
    engine.add("large", 40 * BLOCK, 5, tier=TOP)
    engine.add("small", 3 * BLOCK - 1, 5, tier=MIDDLE)
    engine.step()
    assert not engine.preempted, "neither is within what is kept"
    engine.scheduler.finish_requests("large", RequestStatus.FINISHED_ABORTED)
    engine.add("top", 3 * BLOCK - 1, 5, tier=TOP)
    output = engine.step()
    assert "top" in output.num_scheduled_tokens
    assert "small" in output.num_scheduled_tokens, "what is free now is not kept from it"
    assert [name[:3] for name in engine.preempted] == ["low"]
    engine.finish()


def test_what_lower_tiers_need_next_keeps_no_newcomer_waiting_while_one_of_them_waits_for_its_memory(stepped):
    engine = full_of_the_lowest(stepped)
    while not engine.preempted:
        engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    kept = engine.scheduler._admission.reserve(time.monotonic()) * 60
    blocks = free - math.ceil(kept)
    assert blocks > 0, "all that is free but what is kept for the top tier"
    assert engine.scheduler._book.parked
    engine.add("middle", blocks * BLOCK - 1, 1, tier=MIDDLE)
    assert "middle" in engine.step().num_scheduled_tokens
    engine.finish()


def test_the_top_tier_starts_within_what_is_kept_for_it_beside_one_stream_that_holds_nearly_all(stepped):
    engine = stepped(60)
    expects(engine, 1)
    engine.add("low", 800, 150, tier=LOW)
    while engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > 1:
        engine.step()
    engine.add("top", 3 * BLOCK - 1, 5, tier=TOP)
    assert "top" in engine.step().num_scheduled_tokens
    assert engine.preempted == ["low"]
    engine.finish()


def test_one_below_that_lost_its_memory_twice_keeps_nobody_from_what_is_kept_for_the_top_tier(stepped):
    engine = full_of_the_lowest(stepped)
    engine.add("twice", 40 * BLOCK, 5, tier=MIDDLE)
    account = engine.scheduler._book.accounts["twice"]
    account.preemptions_before, account.parked_s = IMMUNE_AFTER, time.monotonic()
    engine.add("top", 3 * BLOCK - 1, 5, tier=TOP)
    engine.add("next", 2 * BLOCK - 1, 5, tier=MIDDLE)
    output = engine.step()
    assert "top" in output.num_scheduled_tokens
    assert "twice" not in output.num_scheduled_tokens
    assert "next" not in output.num_scheduled_tokens, "it would pass the one that waits"
    engine.finish()


def test_one_below_the_top_tier_that_needs_nearly_all_memory_starts_under_a_trickle_of_the_top_tier(stepped):
    engine = stepped(100)
    expects(engine, 30)
    engine.add("top0", 16, 30, tier=TOP)
    engine.step()
    engine.add("big", 1450, 10, tier=MIDDLE)
    engine.add("small", 16, 10, tier=MIDDLE)
    engine.scheduler._book.accounts["big"].arrived_s -= 60
    for number in range(1, 15):
        for _ in range(20):
            engine.step()
        engine.add(f"top{number}", 16, 30, tier=TOP)
        assert f"top{number}" in engine.step().num_scheduled_tokens, "it is within what is kept for it"
        assert f"top{number - 1}" not in engine.finished
    assert engine.finished[:1] == ["top0"]
    assert "big" in engine.finished
    assert "small" in engine.finished
    assert not [name for name in engine.preempted if name.startswith("top")]
    engine.finish()


def test_whose_memory_was_taken_comes_back_before_newcomers_of_its_tier(stepped):
    engine = stepped(24)
    expects(engine, 1)
    for name in ("a", "b", "c"):
        engine.add(name, 100, 100)
    while not engine.preempted:
        engine.step()
    victim = engine.preempted[0]
    engine.add("new", 100, 10)
    started = []
    while len(started) < 2:
        output = engine.step()
        for name in (victim, "new"):
            if name in output.num_scheduled_tokens and name not in started:
                started.append(name)
    assert started[0] == victim
    engine.finish()


def test_of_those_whose_memory_was_taken_the_one_that_is_least_ahead_now_comes_first(stepped):
    engine = stepped(500)
    for name in ("long_ago", "just_now"):
        engine.add(name, 16, 100, tpot_s=1.0)
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    for name, due_s, parked_s in (("long_ago", 950.0, 900.0), ("just_now", 1010.0, 999.0)):
        request, account = scheduler.requests[name], scheduler._book.accounts[name]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        account.first_s, account.first_tokens = due_s, request.num_output_tokens
        account.parked_s = parked_s
    found = scheduler._admission.admitted(scheduler.waiting, 64, 1000.0)
    assert [request.request_id for request in found] == ["long_ago"], "the other one's turn comes after it"
    engine.finish()


def test_streams_without_an_objective_are_left_out_for_one_that_is_late(stepped):
    engine = stepped(500)
    knows_steps(engine, fixed_s=0.001, stream_s=0.01)
    engine.add("urgent", 20, 60, tier=TOP, tpot_s=0.05)
    for number in range(8):
        engine.add(f"free{number}", 20, 60, tier=LOW)
    engine.step()
    account = engine.scheduler._book.accounts["urgent"]
    assert account.tpot_s == 0.05
    for _ in range(20):
        account.first_s = -1e9  # it is late, whatever the clock says
        engine.step()
    ran = [len(output.num_scheduled_tokens) for output in engine.outputs[2:]]
    assert min(ran) <= 4, "four streams take 41 ms"
    assert all("urgent" in output.num_scheduled_tokens for output in engine.outputs)
    for number in range(8):
        gaps, gap = [], 0
        for output in engine.outputs:
            gap = 0 if f"free{number}" in output.num_scheduled_tokens else gap + 1
            gaps.append(gap)
        assert max(gaps) <= 4 + 8, "nobody is left out for long"
    assert engine.scheduler._report.figures.skipped > 0
    account.first_s = 1e9
    engine.finish()


def bear_with_an_urgent_one(engine):
    """How many of the lowest tier start at once beside a stream whose objective steps of 45 ms keep."""
    knows_steps(engine, fixed_s=0.001, stream_s=0.01)
    engine.add("urgent", 20, 60, tier=TOP, tpot_s=0.05)
    engine.step()


def test_newcomers_that_wait_together_start_as_far_as_the_others_bear_them(stepped):
    engine = stepped(2000)
    bear_with_an_urgent_one(engine)
    for number in range(40):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    for _ in range(3):
        engine.step()
    started = [request.request_id for request in engine.scheduler.running]
    assert started == ["urgent", *[f"low{number}" for number in range(17)]], "34 ms with a fifth of each"
    for number in range(17, 40):
        engine.scheduler._book.accounts[f"low{number}"].arrived_s -= STARVES_AFTER_S + 1
    engine.step()
    assert len(engine.scheduler.running) == 41, "nobody waits for the pace for longer"
    engine.finish()


def test_a_newcomer_that_would_lose_its_own_objective_does_not_wait_for_the_pace_of_others(stepped):
    engine = stepped(2000)
    bear_with_an_urgent_one(engine)
    for number in range(20):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    accounts, running = scheduler._book.accounts, [*scheduler.running]
    waits, now_s = engine.add("waits", 20, 60, **{FIRST_DUE_XARG: 1000.0}), 999.0

    def admits(now_s, to_come=0):
        return scheduler._pace.admits(waits, running, now_s - 1, now_s, to_come)

    assert not admits(990.0), "time enough"
    assert admits(999.3), "each step takes a fifth of a second"
    assert not admits(1000.1), "too late already"
    account = accounts["waits"]
    account.tpot_s, account.first_s = 0.5, now_s - 5
    assert not admits(now_s, to_come=100), "it gains a third of a second with each token"
    assert admits(now_s, to_come=17)
    assert not admits(now_s, to_come=10), "too late already"
    account.tpot_s = None
    assert not admits(now_s, to_come=17)
    engine.finish()


def test_newcomers_whose_kv_is_on_its_way_count_among_those_who_bear_the_next(stepped):
    engine = stepped(2000)
    bear_with_an_urgent_one(engine)
    scheduler = engine.scheduler
    for number in range(10):
        request = engine.add(f"pulled{number}", 20, 60, tier=LOW)
        scheduler.kv_cache_manager.allocate_slots(request, 20, delay_cache_blocks=True)
        scheduler.waiting.remove_request(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        scheduler.skipped_waiting.add_request(request)
    for number in range(40):
        engine.add(f"low{number}", 20, 60, tier=LOW)
    engine.step()
    assert len(scheduler.running) == 1 + 7
    for number in range(10):
        scheduler.finished_recving_kv_req_ids.add(f"pulled{number}")
        scheduler.finish_requests(f"pulled{number}", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert len(scheduler.running) == 1 + 17
    engine.finish()


def test_nobody_is_left_out_while_the_objective_is_kept(stepped):
    engine = stepped(500)
    knows_steps(engine, fixed_s=0.001, stream_s=0.001)
    engine.add("urgent", 20, 60, tier=TOP, tpot_s=0.05)
    for number in range(8):
        engine.add(f"free{number}", 20, 60, tier=LOW)
    engine.finish()
    assert engine.scheduler._report.figures.skipped == 0


@pytest.mark.parametrize("tier", [LOW, TOP])
def test_one_that_waits_for_its_turn_leaves_what_it_does_not_need_to_those_behind_it(stepped, tier):
    engine = stepped(200, chunk=32)  # so that what is computed again takes several steps
    expects(engine, 20)
    for name, prompt in (("first", 160), ("second", 176), ("pulls", 192)):
        engine.add(name, prompt, 60, tier=tier)
    for _ in range(8):
        engine.step()
    scheduler, now_s = engine.scheduler, time.monotonic()
    for name in ("first", "second", "pulls"):
        request = scheduler.requests[name]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s)
    accounts = scheduler._book.accounts
    accounts["pulls"].pulls = True
    scheduler.kv_cache_manager.reset_prefix_cache()
    output = engine.step()
    assert "first" in output.num_scheduled_tokens
    engine.add("newcomer", 16, 20, tier=tier)
    started = {*output.num_scheduled_tokens}
    for _ in range(4):  # a step computes 32 tokens of all of them together
        started |= {*engine.step().num_scheduled_tokens}
    assert {"pulls", "newcomer"} <= started
    assert "first" in scheduler._book.restoring
    assert "second" in scheduler._book.parked, "one at a time"
    engine.finish()


def test_nobody_takes_the_memory_of_one_that_waits_for_its_turn(stepped):
    engine = stepped(60)
    expects(engine, 10)
    for name, prompt in (("first", 320), ("second", 336)):
        engine.add(name, prompt, 20, tier=LOW)
    for _ in range(8):
        engine.step()
    scheduler, now_s = engine.scheduler, time.monotonic()
    for name in ("first", "second"):
        request = scheduler.requests[name]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s)
    scheduler.kv_cache_manager.reset_prefix_cache()
    assert "first" in engine.step().num_scheduled_tokens
    engine.add("large", 320, 10, tier=LOW)
    engine.step()
    assert "large" not in [request.request_id for request in scheduler.running]
    engine.finish()
    assert engine.finished.index("second") < engine.finished.index("large")


def test_aborted_while_its_memory_is_taken(stepped):
    engine = stepped(24)
    expects(engine, 1)
    for name in ("a", "b", "c"):
        engine.add(name, 100, 100)
    while not engine.preempted:
        engine.step()
    name = engine.preempted[0]
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    engine.finish()
    assert name not in engine.finished
    for left in (
        engine.scheduler._book.accounts,
        engine.scheduler._book.parked,
        engine.scheduler._book.restoring,
    ):
        assert not left


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_all_end_once_with_all_their_tokens(stepped, seed):
    rng = random.Random(seed)
    engine = stepped(rng.choice([40, 60, 90]), max_num_seqs=rng.choice([4, 64]))
    knows_steps(engine, fixed_s=rng.choice([0.001, 0.02]), stream_s=rng.choice([1e-4, 0.005]), prompt_s=1e-4)
    for number in range(60):
        tpot_s = rng.choice([None, 0.01, 0.05])
        engine.add(
            f"r{number}",
            rng.randrange(1, 300),
            rng.randrange(1, 250),
            tier=rng.choice([LOW, MIDDLE, TOP]),
            tpot_s=tpot_s,
            tenant=rng.choice(["", "a"]),
        )
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.finish()
    assert len(engine.finished) == 60
    scheduler = engine.scheduler
    assert not scheduler._book.accounts
    assert not scheduler._book.parked
    assert not scheduler._book.restoring
    assert not scheduler._book.paced
    assert not scheduler._book.untimed
    assert not scheduler._relief._chosen
    figures = scheduler._report.figures
    assert len(figures.preempted) == len(engine.preempted)
    assert len(figures.restored) <= len(figures.preempted)


def test_own_tiers_are_ranked_as_they_are_configured(stepped):
    setup = DecodeSetup({"gold": 5.0, "tin": 1.0})
    engine = stepped(24, additional=setup.encode())
    expects(engine, 1, ("gold", "tin"))
    engine.add("gold", 100, 200, tier="gold")
    engine.add("tin", 100, 150, tier="tin")
    engine.add("also", 100, 150, tier="gold")
    engine.finish()
    assert engine.preempted
    assert engine.preempted[0] == "tin"


def test_of_one_tier_alone_nothing_is_kept_and_nothing_is_said_to_be(stepped):
    engine = stepped(24, additional=DecodeSetup({"only": 1.0}).encode())
    engine.add("one", 100, 20, tier="only")
    engine.step()
    assert engine.scheduler._admission.reserve(time.monotonic()) == 0.0
    engine.finish()


def test_lengths_are_learned_from_answers_that_end_by_themselves(stepped):
    engine = stepped(200)
    for number in range(30):
        engine.add(f"r{number}", 10, 12, tenant="t")
    engine.add("aborted", 10, 500, tenant="t")
    for _ in range(5):
        engine.step()
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.finish()
    engine.scheduler._lengths.factor = 1.0
    assert engine.scheduler._lengths.remaining(MIDDLE, "t", 0, 10**6) == 12


@pytest.mark.parametrize(("stop", "learned"), [(["."], 7), ([], 256)])
def test_lengths_are_learned_from_answers_that_end_with_a_stop_string(stepped, stop, learned):
    engine = stepped(500)
    for number in range(30):
        engine.add(f"r{number}", 10, 500, tenant="t").sampling_params.stop = stop
    engine.add("unborn", 10, 500, tenant="t").sampling_params.stop = stop
    engine.scheduler.finish_requests("unborn", RequestStatus.FINISHED_ABORTED)
    for _ in range(7):
        engine.step()
    for number in range(30):  # as the client's process ends one in whose text it has found the string
        engine.scheduler.finish_requests(f"r{number}", RequestStatus.FINISHED_ABORTED)
    engine.scheduler._lengths.factor = 1.0
    assert engine.scheduler._lengths.remaining(MIDDLE, "t", 0, 10**6) == learned


def test_lengths_are_learned_from_answers_that_end_because_they_repeat_themselves(stepped, monkeypatch):
    repeats = "vllm.v1.core.sched.utils.check_sequence_repetition"
    monkeypatch.setattr(repeats, lambda tokens, params: len(tokens) == params.min_count)
    engine = stepped(500)
    for number in range(30):
        request = engine.add(f"r{number}", 10, 500, tenant="t")
        request.sampling_params.repetition_detection = RepetitionDetectionParams(1, 1, 9)
    engine.finish()
    assert set(engine.why.values()) == {"repetition_detected"}
    engine.scheduler._lengths.factor = 1.0
    assert engine.scheduler._lengths.remaining(MIDDLE, "t", 0, 10**6) == 9


def test_steps_are_measured(stepped):
    engine = stepped(200)
    engine.add("a", 10, 60)
    engine.finish()
    assert engine.scheduler._times.is_known
    assert engine.scheduler._times.predict_s(StepShape(1, 30)) > 0


def told(engine):
    """What travels with the statistics of the next step; None for nothing."""
    engine.scheduler.connector = NixlConnector  # of which the statistics need the class alone
    try:
        stats = engine.scheduler.make_stats().kv_connector_stats
    finally:
        engine.scheduler.connector = None
    if stats is None:
        return None
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats))
    assert NixlConnector.build_kv_connector_stats(sent).is_empty()
    return msgspec.convert(sent[PRESSURE_KEY], PressureFigures)


def test_what_it_does_and_what_it_holds_is_told_once(stepped):
    engine = stepped(24)
    expects(engine, 1)
    for name in ("a", "b", "c"):
        engine.add(name, 100, 100, tier=LOW)
    while not engine.preempted:
        engine.step()
    figures = told(engine)
    assert figures.preempted == [(LOW, "cost", "recompute")] * len(engine.preempted)
    load = figures.load
    assert load.pool_tokens == 24 * BLOCK
    assert set(load.streams) == {"a", "b", "c"}, "also those that wait for memory"
    assert all(holding.tokens >= 100 for holding in load.streams.values())
    assert set(load.answers) == {LOW, MIDDLE, TOP}
    assert figures.peak > 0
    assert told(engine) is None, "events are told once, the rest every half second"
    engine.finish()
    figures = told(engine)
    assert len(figures.restored) == len(engine.preempted)
    assert figures.load.streams == {}, "an engine at rest holds nothing for anybody"


def leaves(engine, job):
    """A low stream that may leave, beside others that would wait for long if it was computed again here."""
    knows_steps(engine, fixed_s=0.001, prompt_s=0.001)
    expects(engine, 1)
    engine.add("low", 100, 300, tier=LOW, **{MAY_LEAVE_XARG: True, JOB_XARG: job})
    for number in range(3):
        engine.add(f"top{number}", 100, 250, tier=TOP)
    while "low" not in engine.finished:
        engine.step()


def test_one_that_leaves_ends_with_the_word_for_it_and_frees_its_memory(stepped):
    engine = stepped(50)
    leaves(engine, "job")
    assert engine.why["low"] == LEFT
    assert not engine.preempted
    assert engine.scheduler._report.figures.preempted == [(LOW, "cost", "reprefill")]
    assert "low" not in engine.scheduler.requests
    engine.check_blocks()
    engine.finish()


def test_one_that_comes_back_is_no_newcomer_and_has_been_through_it_before(stepped):
    engine = stepped(50)
    leaves(engine, "job")
    emitted = len(engine.tokens["low"])
    engine.add("new", 40, 5, tier=LOW)
    back = engine.add("back", 100 + emitted, 300 - emitted, tier=LOW, **{JOB_XARG: "job"})
    view, now_s = engine.scheduler._view, time.monotonic()
    assert view.preemptions(back) == 1
    assert back.num_preemptions == 0, "by which vLLM tells a request that its workers know"
    assert not view.parked(back, now_s).is_newcomer
    account = engine.scheduler._book.accounts["back"]
    assert account.first_s < account.parked_s, "its pace counts from its first token on"
    assert view.parked(back, now_s).preemptions == 1
    assert not engine.scheduler._leavers.away
    engine.finish()
    assert len(engine.tokens["back"]) == 300 - emitted
    assert LOW in [tier for tier, _ in engine.scheduler._report.figures.restored]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
@pytest.mark.parametrize("pulls_now", [False, True], ids=["waits", "is pulling"])
def test_one_that_is_back_and_does_not_get_its_kv_is_remembered_however_that_ends(stepped, status, pulls_now):
    engine = stepped(60)
    leaves(engine, "job")
    emitted = len(engine.tokens["low"])
    scheduler = engine.scheduler
    back = engine.add("back", 100 + emitted, 300 - emitted, tier=LOW, **{JOB_XARG: "job"})
    scheduler._book.accounts["back"].pulls = True
    if pulls_now:  # its blocks are freed only once nothing is written to them any more
        scheduler.waiting.remove_request(back)
        back.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        scheduler.skipped_waiting.add_request(back)
    scheduler.finish_requests("back", status)
    assert scheduler._leavers.away["job"].preemptions == 1
    again = engine.add("again", 100 + emitted, 300 - emitted, tier=LOW, **{JOB_XARG: "job"})
    assert not scheduler._view.parked(again, time.monotonic()).is_newcomer
    if pulls_now:
        scheduler._free_blocks(back)
    assert not scheduler._leavers.away
    engine.finish()


def test_one_that_does_not_come_back_is_forgotten(stepped, monkeypatch):
    monkeypatch.setattr("decode_node.engine.leavers._AWAY_S", 0.0)
    engine = stepped(50)
    leaves(engine, "first")
    assert list(engine.scheduler._leavers.away) == ["first"]
    engine.finish()
    engine.finished.clear()
    engine.tokens.pop("low")
    leaves_again = {MAY_LEAVE_XARG: True, JOB_XARG: "second"}
    engine.add("low", 100, 300, tier=LOW, **leaves_again)
    for number in range(3, 6):
        engine.add(f"top{number}", 100, 250, tier=TOP)
    while "low" not in engine.finished:
        engine.step()
    assert list(engine.scheduler._leavers.away) == ["second"]


def test_whose_memory_is_taken_here_has_nothing_to_pull_any_more(stepped):
    engine = stepped(24)
    expects(engine, 1)
    for name in ("a", "b", "c"):
        engine.add(name, 100, 100)
        engine.scheduler._book.accounts[name].pulls = True  # as of every request that was prefilled elsewhere
    while not engine.preempted:
        engine.step()
    assert not engine.scheduler._book.accounts[engine.preempted[0]].pulls
    before = engine.scheduler._leavers.takes
    engine.finish()
    assert engine.scheduler._leavers.takes == pytest.approx(before, rel=0.1), "nobody has come back"
