"""What one process writes on the board and another reads there."""

import itertools
import multiprocessing
import os
import sys
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefill_node.board import layout
from prefill_node.board.board import Board
from prefill_node.board.messages import Queued, SchedulerView, StepView, StopOrder, SuspendedView
from slo.queue.class_targets import ClassCounts, TargetState
from slo.queue.prefill import Prefill
from slo.queue.shares import FairnessState
from slo.request import JobId
from slo.tiers import PREMIUM

spawning = multiprocessing.get_context("spawn")


def order(step_id, beneficiary="urgent"):
    return StopOrder(step_id=step_id, beneficiary=beneficiary, reason="test", ordered_s=1.5)


def prefill(name):
    return Prefill(JobId(name), 4.0, 7.5, 0.125, 1.5, 1, 0.5, tier=PREMIUM)


def view(step_id=1, jobs=("a", "b"), waiting=(), suspended=()):
    members = tuple(map(prefill, jobs))
    step = StepView(step_id=step_id, members=members, tokens=100, pairs=5e3, from_boundary=0, started_s=2.5)
    queue = tuple(Queued(prefill(name), 10, 50.0, 3, 1, f"engine-{name}") for name in waiting)
    fairness = FairnessState({PREMIUM: 0.25}, {PREMIUM: 8.5})
    targets = TargetState({PREMIUM: 0.01}, {PREMIUM: ClassCounts(4.0, 0.5, 3.0, 1.0)})
    return SchedulerView(step, queue, tuple(suspended), ("done",), fairness, targets)


def suspended_step(*jobs):
    members = tuple(map(prefill, jobs))
    return SuspendedView(members, 50, 0.25, 1000, 3.5, "urgent", 6.5, 20)


def spoil(path, at, word):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(word.to_bytes(8, sys.byteorder))


# Orders and progress


def test_at_first_nothing_is_ordered_published_or_reached(other):
    assert (other.is_target(0), other.stop_order(), other.view()) == (True, None, None)
    assert other.progress(2) == (0, 0)
    assert other.began(2, 1) is None
    assert other.take_events() == []


def test_an_order_names_its_step(board, other):
    board.order_stop(order(7, "job-7"))
    assert other.stop_order() == order(7, "job-7")
    assert [other.is_target(step_id) for step_id in (6, 7, 8)] == [False, True, False]


@pytest.mark.parametrize("step_id", [0, -1, 1 << 40])
def test_an_order_for_no_step_is_refused(step_id, board):
    with pytest.raises(ValueError, match="step id"):
        board.order_stop(order(step_id))


def test_an_order_that_does_not_fit_changes_nothing(board, other):
    board.order_stop(order(7))
    with pytest.raises(ValueError, match="exceeds 4096 bytes"):
        board.order_stop(order(8, "x" * 5000))
    assert (other.is_target(7), other.stop_order()) == (True, order(7))


def test_each_rank_has_its_own_progress(board, other):
    for rank in range(3):
        board.reach(rank, (1 << 40) - 1 - rank, (1 << 16) - 1 - rank)
    assert [other.progress(rank) for rank in range(3)] == [
        ((1 << 40) - 1 - rank, (1 << 16) - 1 - rank) for rank in range(3)
    ]


def test_a_step_began_when_its_first_boundary_was_reached(board, other):
    before_s = time.monotonic()
    board.reach(1, 5, 0)
    after_s = time.monotonic()
    board.reach(1, 5, 1)
    assert before_s <= other.began(1, 5) <= after_s
    assert (other.began(1, 4), other.began(0, 5)) == (None, None)
    board.reach(1, 6, 0)
    assert [other.boundaries_reached(rank) for rank in range(3)] == [0, 3, 0]
    assert other.began(1, 5) is None
    assert other.began(1, 6) >= after_s


def test_votes_that_a_rank_gives_up_are_counted(board, other):
    board.vote_timed_out(2)
    board.reach(2, 1, 0)
    assert [other.vote_timeouts(rank) for rank in range(3)] == [0, 0, 1]


# The scheduler's view


def test_a_view_arrives_whole_and_is_decoded_once(board, other):
    published = view(3, waiting=("c", "d"), suspended=(suspended_step("s"),))
    assert board.publish(published)
    assert other.view() == published
    assert other.view() is other.view()
    idle = SchedulerView()
    board.publish(idle)
    assert other.view() == idle


def test_of_a_queue_that_is_too_long_the_first_are_told(board, other):
    names = [f"job-{n}" for n in range(20_000)]
    full = view(3, waiting=names, suspended=(suspended_step("s"),))
    full = msgspec.structs.replace(full, passed=dict.fromkeys(names[:1000], 2.5))
    assert not board.publish(full)
    assert other.view() == msgspec.structs.replace(full, queue=full.queue[:512])


def test_a_step_does_not_stop_when_not_all_are_told_that_it_is_not_to_be_stopped_for(board, other):
    names = [f"job-{n}" for n in range(20_000)]
    full = msgspec.structs.replace(view(3, waiting=names), passed=dict.fromkeys(names, 2.5))
    assert not board.publish(full)
    assert not other.view().step.stoppable
    assert other.view().queue == full.queue[:512]
    assert other.view().passed == dict.fromkeys(names[:512], 2.5)


def test_a_step_that_stops_for_newcomers_alone_does_not_stop_when_not_all_that_wait_are_told(board, other):
    """The governor would take the rest of the queue for them."""
    waiting = [f"job-{n}" for n in range(20_000)]
    full = msgspec.structs.replace(view(3, waiting=waiting), none_can_start=True)
    assert not board.publish(full)
    assert not other.view().step.stoppable
    assert other.view().queue == full.queue[:512]


def test_five_hundred_that_wait_fit_and_are_handed_over_in_a_few_milliseconds(board, other):
    names = [f"chatcmpl-{n:032x}" for n in range(500)]
    took_s = []
    for step_id in range(1, 20):
        full = view(step_id, waiting=names, suspended=[suspended_step(*names[:4]) for _ in range(32)])
        full = msgspec.structs.replace(full, passed=dict.fromkeys(names, 2.5))
        started_s = time.perf_counter()
        assert board.publish(full)
        assert len(other.view().queue) == len(names)
        took_s.append(time.perf_counter() - started_s)
    print(f"500 waiting: {min(took_s) * 1e3:.2f} ms to publish and read")  # noqa: T201 - shown with pytest -s
    assert min(took_s) < 0.01


def test_a_view_with_too_many_suspended_goes_without_a_queue_and_its_step_cannot_be_stopped(board, other):
    names = [f"job-{n}" for n in range(1700)]
    full = view(3, waiting=names, suspended=(suspended_step(*names), suspended_step(*names)))
    assert not board.publish(full)
    step = msgspec.structs.replace(full.step, stoppable=False)
    assert other.view() == SchedulerView(step, (), full.suspended)


def test_a_view_that_is_too_large_throughout_goes_without_names(board, other):
    full = view(3, jobs=tuple(f"job-{n}" for n in range(50_000)))
    assert not board.publish(full)
    step = msgspec.structs.replace(full.step, stoppable=False, members=())
    assert other.view() == SchedulerView(step)


def consistent(step_id):
    """A view whose every part follows from its step id, of varying size."""
    names = tuple(f"{step_id}-{n}" for n in range(step_id * 37 % 400))
    return view(step_id, jobs=names, waiting=names)


def publish_for_ever(path):
    board = Board.attach(path)
    last = board.view()
    for step_id in itertools.count(1 if last is None else last.step.step_id + 1):
        board.publish(consistent(step_id))


def test_a_reader_beside_a_writer_that_is_killed_again_and_again_sees_whole_views_only(board):
    seen = []
    for _ in range(3):
        writer = spawning.Process(target=publish_for_ever, args=(board.path,), daemon=True)
        writer.start()
        until_s = time.monotonic() + 30.0
        fresh = len(seen)
        while len(seen) < fresh + 100:
            assert time.monotonic() < until_s, "the writer does not write"
            found = board.view()
            if found is None or (seen and seen[-1] == found.step.step_id):
                os.sched_yield()
                continue
            assert found == consistent(found.step.step_id)
            seen.append(found.step.step_id)
        writer.kill()
        writer.join()
        with Board.attach(board.path) as late:
            left = late.view()
            assert left == consistent(left.step.step_id)
    assert seen == sorted(seen)


def test_a_view_that_is_not_wholly_there_counts_as_not_published(board, other):
    first = view(1)
    board.publish(first)
    assert other.view() == first
    board.publish(view(2))
    spoil(board.path, layout.VIEW_SLOTS_AT + 8, 0)  # the second value stands in the first slot
    assert other.view() == first
    with Board.attach(board.path) as late:
        assert late.view() is None
    board.publish(view(3))
    assert other.view() == view(3)


# Events


def test_events_arrive_once_and_in_order(board, other):
    assert board.append_events([b"one", b"", b"three" * 100]) == 0
    assert other.take_events() == [b"one", b"", b"three" * 100]
    assert other.take_events() == []


def test_what_finds_no_room_is_dropped_and_counted(board, other):
    kept = [b"x" * 1000] * 260
    assert board.append_events(kept) == 0
    assert board.append_events([b"y" * 1000, b"y" * 1000, b"y"]) == 2 + 1
    assert other.take_events() == kept
    assert other.dropped_events == 3
    assert board.append_events([b"there is room again"]) == 0
    assert other.take_events() == [b"there is room again"]
    assert board.append_events([b"z" * layout.EVENTS_BYTES]) == 1
    assert other.dropped_events == 4


records = st.builds(lambda size, fill: bytes([fill]) * size, st.integers(0, 100_000), st.integers(0, 255))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), st.lists(records, max_size=4)), max_size=25))
def test_events_are_a_queue_however_they_lie_in_the_ring(board, other, actions):
    other.take_events()
    waiting, dropped_before = [], other.dropped_events
    dropped = 0
    for batch in actions:
        if batch is None:
            assert other.take_events() == waiting
            waiting = []
        else:
            lost = board.append_events(batch)
            waiting += batch[: len(batch) - lost]
            dropped += lost
    assert other.take_events() == waiting
    assert other.dropped_events - dropped_before == dropped


def test_an_event_that_is_not_wholly_there_is_read_later(board, other):
    board.append_events([b"first", b"second"])
    second_at = layout.EVENTS_AT + 8 + 8
    seal = board.words[second_at // 8]
    board.words[second_at // 8] = 0
    assert other.take_events() == [b"first"]
    board.words[second_at // 8] = seal
    assert other.take_events() == [b"second"]


def append_for_ever(path):
    board = Board.attach(path)
    number = 0
    while True:
        batch = [f"{number + n} ".encode() * ((number + n) % 50 + 1) for n in range(3)]
        number += 3 - board.append_events(batch)


def test_a_reader_beside_a_writer_misses_nothing_and_repeats_nothing(board):
    writer = spawning.Process(target=append_for_ever, args=(board.path,), daemon=True)
    writer.start()
    until_s = time.monotonic() + 30.0
    taken = 0
    while taken < 20_000:  # the ring turns several times
        assert time.monotonic() < until_s, "the writer does not write"
        for record in board.take_events():
            assert record == f"{taken} ".encode() * (taken % 50 + 1)
            taken += 1
    writer.kill()
    writer.join()
