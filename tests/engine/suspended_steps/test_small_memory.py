"""Whose memory an urgent request takes, and who waits for memory."""

import math

from engines import random_prompt
from suspending import LONG, MIDDLE, SHORT, alone, assert_same_output, chunks_of, suspend

from prefill_node.board.events import Dropped, Started
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.queue.chunks import StopBound
from slo.request import PREDICTOR_XARG


def test_an_urgent_request_takes_the_memory_of_a_suspended_one(small):
    expected = alone(small, long=LONG, urgent=LONG[::-1])
    suspend(small, "long", LONG, 2, beneficiary="urgent")
    small.add("urgent", LONG[::-1], deadline_s=10)
    assert small.step() == ["urgent"]
    assert small.rpc("checkpoints_held") == [0]
    small.finish()
    assert_same_output(small, expected)
    said = [each for each in small.notices() if isinstance(each, Started | Dropped)]
    assert [
        (each.jobs, each.reason) if isinstance(each, Dropped) else (each.job, each.is_first) for each in said
    ] == [("long", True), (("long",), "memory"), ("urgent", True), ("long", False)]


def test_a_prompt_between_two_chunks_that_loses_its_memory_is_reported(small):
    """What it had computed is done again."""
    urgent = random_prompt(900, seed=4)
    expected = alone(small, long=LONG, urgent=urgent)
    small.prefill("before", LONG[:200])
    small.add("long", LONG, deadline_s=600, stop_bound=chunks_of(512))
    assert small.step() == []
    slow = PrefillPredictor(0.1, 0.0)  # 90 s for the urgent one, which has no 19 s for the end of the other
    arguments = {PREDICTOR_XARG: slow.encode()}
    unbound = StopBound(math.inf, ())
    small.add("urgent", urgent, deadline_s=95, weight=2.0, stop_bound=unbound, extra_args=arguments)
    assert small.step() == ["urgent"]
    small.finish()
    assert_same_output(small, expected)
    said = [each for each in small.notices() if isinstance(each, Started | Dropped)]
    assert [type(each) for each in said] == [Started, Started, Dropped, Started, Started]
    _, started, dropped, *_ = said
    assert (started.job, started.cached_tokens) == ("long", 128)
    assert (dropped.jobs, dropped.reason, dropped.done) == (("long",), "memory", 1.0)
    assert (dropped.tokens, dropped.pairs) == (512, attention_pairs(512, 128))


def test_a_request_with_time_to_spare_waits_for_the_memory_of_a_prompt_between_two_chunks(small):
    small.add("long", LONG, deadline_s=60, stop_bound=chunks_of(512))
    assert small.step() == []
    patient = random_prompt(900, seed=4)
    small.add("patient", patient, deadline_s=10, weight=2.0, stop_bound=StopBound(math.inf, ()))
    assert small.step() == ["long"]
    assert small.step() == ["patient"]
    assert not any(isinstance(notice, Dropped) for notice in small.notices())


def test_a_prompt_that_loses_its_memory_within_a_later_chunk_has_lost_the_earlier_ones_too(small):
    urgent = random_prompt(900, seed=4)
    small.notices()
    small.add("long", LONG, deadline_s=60, stop_bound=chunks_of(512))
    assert small.step() == []
    small.stop_at(2)
    small.order_stop("urgent")
    assert small.step() == []
    small.add("urgent", urgent, deadline_s=10, weight=2.0, stop_bound=StopBound(math.inf, ()))
    assert small.step() == ["urgent"]
    small.finish()
    (dropped,) = [notice for notice in small.notices() if isinstance(notice, Dropped)]
    assert (dropped.jobs, dropped.reason) == (("long",), "memory")
    assert 0 < dropped.done < 1
    assert (dropped.tokens, dropped.pairs) == (188, attention_pairs(188, 512))
    assert (dropped.earlier_tokens, dropped.earlier_pairs) == (512, attention_pairs(512, 0))


def test_a_less_valuable_request_waits_for_the_memory_of_a_suspended_one(small):
    suspend(small, "long", LONG, 2, beneficiary="cheap", weight=4.0)
    small.add("cheap", LONG[::-1], deadline_s=10, weight=1.0)
    assert small.step() == ["long"]
    assert small.step() == ["cheap"]


def test_a_request_with_time_to_spare_waits_for_the_memory_of_a_suspended_one(small):
    suspend(small, "long", LONG, 2)
    small.add("patient", LONG[::-1], deadline_s=60)
    assert small.step() == ["long"]
    assert small.step() == ["patient"]


def test_a_request_takes_no_memory_for_the_prefix_that_a_suspended_one_holds(small):
    """Both have seven blocks, the same four first: three more are enough."""
    prefix, tail = LONG[:512], random_prompt(300, seed=8)
    small.prefill("before", prefix + SHORT)
    suspend(small, "long", prefix + tail, 2, beneficiary="urgent")
    small.add("urgent", prefix + tail[::-1], deadline_s=10)
    assert small.step() == ["urgent"]
    assert small.step() == ["long"]
    assert [small.cached_tokens[name] for name in ("long", "urgent")] == [512, 512]
    assert not any(isinstance(notice, Dropped) for notice in small.notices())


def test_the_least_valuable_checkpoint_goes_first(small):
    suspend(small, "dear", SHORT, 2, beneficiary="urgent", weight=3.0)
    suspend(small, "cheap", MIDDLE, 2, beneficiary="urgent", weight=1.0, deadline_s=60)
    small.add("urgent", random_prompt(900, seed=4), deadline_s=10, weight=4.0)
    assert small.step() == ["urgent"]
    dropped = [notice.jobs for notice in small.notices() if isinstance(notice, Dropped)]
    assert dropped == [("cheap",)]
