"""Steps that are late and suspended leave room for the suspension of those that are not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.engine.stepping.lost_steps import LOST_PART, SuspensionRoom, in_excess
from prefill_node.engine.stepping.step_choice import Suspended
from prefill_node.engine.stepping.suspension import SuspendedStep
from slo.queue.prefill import Prefill
from slo.request import JobId

NOW_S = 100.0
ROOM = SuspensionRoom(steps=8, kept_bytes=1000)


def suspended(number, due_s, done=0.5, kept_bytes=10, tokens=100, **about):
    step = SuspendedStep(number, {f"of-{number}": tokens}, 0.0, 5, done, kept_bytes, 0.0, "", 0.0)
    return Suspended(step, Prefill(JobId(f"step:{number}"), 1.0, due_s, 1.0, 0.0), 1, **about)


def started_over(*stopped, room=ROOM):
    return [step.step_id for step in in_excess(stopped, NOW_S, room)]


@pytest.mark.parametrize(
    "stopped",
    [
        [],
        [suspended(number, 50.0) for number in range(4)],
        [suspended(number, 50.0, kept_bytes=250) for number in range(2)],
        [suspended(number, math.inf, kept_bytes=900) for number in range(8)],
        [suspended(number, NOW_S + 1.0, kept_bytes=900) for number in range(8)],
        [suspended(number, 50.0, kept_bytes=900, overdue=True) for number in range(8)],
    ],
    ids=["none", "few steps", "few bytes", "no deadlines", "still on time", "about to go first"],
)
def test_within_their_part_they_stay(stopped):
    assert started_over(*stopped) == []


def test_the_least_advanced_start_over_until_few_enough_steps_are_left():
    stopped = [
        suspended(number, 50.0, done=done) for number, done in enumerate((0.9, 0.1, 0.5, 0.4, 0.8, 0.2))
    ]
    assert started_over(*stopped) == [1, 5]


def test_the_bytes_of_their_checkpoints_count_too():
    stopped = [suspended(1, 50.0, kept_bytes=300), suspended(2, 50.0, 0.6, kept_bytes=400)]
    assert started_over(*stopped) == [1]


@given(
    st.lists(st.tuples(st.floats(0, 200), st.floats(0, 1), st.integers(0, 400), st.booleans()), max_size=16),
    st.builds(SuspensionRoom, st.integers(0, 12), st.integers(0, 2000)),
)
def test_what_is_late_leaves_room_and_what_is_not_is_never_touched(drawn, room):
    stopped = [
        suspended(number, due_s, done, kept_bytes, overdue=overdue)
        for number, (due_s, done, kept_bytes, overdue) in enumerate(drawn)
    ]
    excess = set(started_over(*stopped, room=room))
    late = [item for item in stopped if item.prefill.deadline_s < NOW_S + 1.0 and not item.overdue]
    assert excess <= {item.step.step_id for item in late}
    left = [item.step for item in late if item.step.step_id not in excess]
    assert len(left) <= LOST_PART * room.steps
    assert sum(step.checkpoint_bytes for step in left) <= LOST_PART * room.kept_bytes
