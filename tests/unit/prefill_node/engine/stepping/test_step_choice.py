"""What runs next: the order, who is held back, who shares a step, and which late steps start over."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_choices import PLENTY, chosen, queued, rules, starts, suspended

from prefill_node.engine.stepping.step_choice import LATE_PART, Start, choose, in_excess
from prefill_node.engine.stepping.suspension import Suspended, SuspendedStep
from slo.predict.pass_shape import PassPart
from slo.preemption.types import Limits
from slo.queue.chunks import StopBound
from slo.queue.prefill import Prefill
from slo.request import JobId

# Order


@pytest.mark.parametrize(
    ("queue", "stopped", "expected"),
    [
        ((), (), None),
        ((queued("a"),), (), starts("a")),
        ((), (suspended(1),), 1),
        ((queued("late", deadline_s=9), queued("soon", deadline_s=5)), (), starts("soon")),
        ((queued("none"), queued("some", deadline_s=5)), (), starts("some")),
        ((queued("lost", 9000, deadline_s=5), queued("met", deadline_s=6)), (), starts("met")),
        ((queued("second", arrived_s=2), queued("first", arrived_s=1)), (), starts("first")),
        ((queued("a", deadline_s=5),), (suspended(1, deadline_s=9),), starts("a")),
        ((queued("a", deadline_s=9),), (suspended(1, deadline_s=5),), 1),
        ((), (suspended(1, deadline_s=9), suspended(2, deadline_s=5)), 2),
    ],
)
def test_the_most_urgent_that_can_be_met_goes_first(queue, stopped, expected):
    assert chosen(queue, stopped) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, 1),
        ({"blocked": True}, starts("a")),
        ({"blocked": True, "overdue": True}, 1),
        ({"blocked": True, "awaits_arrival": True, "overdue": True}, 1),
    ],
    ids=[
        "its beneficiary is served",
        "it waits for it",
        "it has waited for too long",
        "even for one to come",
    ],
)
def test_a_victim_waits_for_whom_it_made_way_for_but_not_for_ever(flags, expected):
    assert chosen([queued("a")], [suspended(1, deadline_s=5, **flags)]) == expected


# How much of it


def bounded(*tokens, join_tokens=2048, within_s=0.0257):
    """The choice among prompts of these lengths, when a step of more than 256 takes too long to stop."""
    bound = StopBound(within_s, (PassPart(0.1, 0.0),))
    waiting = [queued(f"{number}", each) for number, each in enumerate(tokens)]
    return choose(waiting, [], PLENTY, 0.0, replace(rules(join_tokens), stop=bound))


def test_a_step_takes_no_more_of_a_prompt_than_can_be_stopped_in_time():
    assert bounded(1000) == Start(("0",), most_tokens=256)


@pytest.mark.parametrize(("most", "together"), [(1, "a"), (2, "ab"), (3, "abc"), (math.inf, "abcd")])
@pytest.mark.parametrize("held", [0, 9], ids=["newcomers", "between two chunks"])
def test_no_more_share_a_step_than_the_engine_runs_together(most, together, held):
    waiting = [queued(name, 100, held=held) for name in "abcd"]
    bound = replace(rules(join_tokens=2048), most_members=most)
    assert choose(waiting, [], PLENTY, 0.0, bound).requests == tuple(together)


def test_prompts_that_share_a_step_can_be_stopped_in_time_together():
    assert bounded(100, 100, 100).requests == ("0", "1")


def test_who_shares_a_step_with_one_whose_cached_prefix_is_gone_does_not_wait_for_all_of_that():
    """What it was not expected to compute is left to its next chunk, but for what whole blocks round."""
    assert bounded(100, 100, 100) == Start(("0", "1"), most_tokens=256), "it can still be stopped in time"
    assert bounded(10, 10, 10, join_tokens=200) == Start(("0", "1", "2"), most_tokens=200)
    assert bounded(10, 20, within_s=1.0) == Start(("0", "1"), most_tokens=30 + 2 * 128)
    waiting = [queued("a"), queued("b")]
    assert choose(waiting, [], PLENTY, 0.0, rules(join_tokens=2048)).most_tokens == math.inf, "no bound"


def test_without_a_bound_a_step_takes_what_the_engine_takes():
    assert choose([queued("a", 100_000)], [], PLENTY, 0.0, rules()).most_tokens == math.inf


def test_a_blocked_step_goes_on_when_nothing_else_can_run():
    assert chosen(stopped=[suspended(1, blocked=True)]) == 1
    both = [suspended(1, deadline_s=9, blocked=True), suspended(2, deadline_s=5, blocked=True)]
    assert chosen(stopped=both) == 2
    assert chosen([queued("too-large", missing=9, weight=0.5)], both, free=8) == 2


def test_the_overdue_step_that_stopped_first_goes_before_everything():
    stopped = [
        suspended(1, deadline_s=2, since_s=0.0),
        suspended(2, since_s=5.0, overdue=True),
        suspended(3, since_s=4.0, overdue=True, blocked=True),
    ]
    assert chosen([queued("urgent", deadline_s=1)], stopped, free=0) == 3


def test_a_step_waits_for_its_beneficiary_to_arrive():
    awaiting = suspended(1, deadline_s=5, blocked=True, awaits_arrival=True)
    assert chosen(stopped=[awaiting]) is None
    assert chosen(stopped=[awaiting, suspended(2, deadline_s=9)]) in (None, 2)


def test_nothing_less_urgent_starts_while_a_beneficiary_is_about_to_arrive():
    """It would have to be stopped at once for the one that the replica has just been cleared for."""
    awaiting = suspended(1, blocked=True, awaits_arrival=True)
    assert chosen([queued("background", 5000)], [awaiting]) is None


def test_work_is_not_given_up_for_somebody_with_time_to_spare_while_its_beneficiary_is_about_to_arrive():
    awaiting = suspended(1, blocked=True, awaits_arrival=True, held=10)
    assert chosen([queued("background", missing=5)], [awaiting], free=0) is None


# Who shares a step


def test_small_prompts_share_a_step_as_far_as_the_tokens_go():
    queue = [queued(name, 100, deadline_s=due) for name, due in (("c", 30), ("a", 10), ("b", 20))]
    assert chosen(queue, join_tokens=200) == starts("a", "b")
    assert chosen(queue, join_tokens=300) == starts("a", "b", "c")


def test_nobody_joins_who_makes_another_late():
    queue = [queued("a", 100, deadline_s=0.15), queued("b", 100, deadline_s=1.0)]
    assert chosen(queue, join_tokens=1000) == starts("a")


def test_nobody_joins_past_a_suspended_step_that_would_go_first():
    queue = [queued("a", deadline_s=5), queued("b", deadline_s=20)]
    assert chosen(queue, [suspended(1, deadline_s=10)], join_tokens=1000) == starts("a")
    assert chosen(queue, [suspended(1, deadline_s=10, blocked=True)], join_tokens=1000) == starts("a", "b")


def test_nobody_joins_without_memory():
    queue = [queued(name, deadline_s=due, missing=4) for name, due in (("a", 5), ("b", 6), ("c", 7))]
    assert chosen(queue, free=9, join_tokens=1000) == starts("a", "b")
    assert chosen(queue, free=4, join_tokens=1000) == starts("a")


# Late steps leave room for the suspension of those that are not

LATER_S = 100.0
LATE_ROOM = Limits(max_suspended_steps=8, max_suspended_bytes=1000)


def late_step(number, due_s, done=0.5, kept_bytes=10, tokens=100, **about):
    step = SuspendedStep(number, {f"of-{number}": tokens}, 0.0, 5, done, kept_bytes, 0.0, "", 0.0)
    return Suspended(step, Prefill(JobId(f"step:{number}"), 1.0, due_s, 1.0, 0.0), 1, **about)


def started_over(*stopped, room=LATE_ROOM):
    return [step.step_id for step in in_excess(stopped, LATER_S, room)]


@pytest.mark.parametrize(
    "stopped",
    [
        [],
        [late_step(number, 50.0) for number in range(4)],
        [late_step(number, 50.0, kept_bytes=250) for number in range(2)],
        [late_step(number, math.inf, kept_bytes=900) for number in range(8)],
        [late_step(number, LATER_S + 1.0, kept_bytes=900) for number in range(8)],
        [late_step(number, 50.0, kept_bytes=900, overdue=True) for number in range(8)],
    ],
    ids=["none", "few steps", "few bytes", "no deadlines", "still on time", "about to go first"],
)
def test_within_their_part_they_stay(stopped):
    assert started_over(*stopped) == []


def test_the_least_advanced_start_over_until_few_enough_steps_are_left():
    stopped = [
        late_step(number, 50.0, done=done) for number, done in enumerate((0.9, 0.1, 0.5, 0.4, 0.8, 0.2))
    ]
    assert started_over(*stopped) == [1, 5]


def test_the_bytes_of_their_checkpoints_count_too():
    stopped = [late_step(1, 50.0, kept_bytes=300), late_step(2, 50.0, 0.6, kept_bytes=400)]
    assert started_over(*stopped) == [1]


def test_for_want_of_memory_nobody_starts_over_whose_checkpoint_takes_none():
    """It lies in KV blocks, which are not what is short."""
    in_blocks = [late_step(number, 50.0, 0.1 * number, kept_bytes=0) for number in (1, 2)]
    stopped = [*in_blocks, late_step(3, 50.0, 0.8, kept_bytes=300), late_step(4, 50.0, 0.9, kept_bytes=400)]
    assert started_over(*stopped) == [3]


@given(
    st.lists(st.tuples(st.floats(0, 200), st.floats(0, 1), st.integers(0, 400), st.booleans()), max_size=16),
    st.builds(Limits, max_suspended_steps=st.integers(0, 12), max_suspended_bytes=st.integers(0, 2000)),
)
def test_what_is_late_leaves_room_and_what_is_not_is_never_touched(drawn, room):
    stopped = [
        late_step(number, due_s, done, kept_bytes, overdue=overdue)
        for number, (due_s, done, kept_bytes, overdue) in enumerate(drawn)
    ]
    excess = set(started_over(*stopped, room=room))
    late = [item for item in stopped if item.prefill.deadline_s < LATER_S + 1.0 and not item.overdue]
    assert excess <= {item.step.step_id for item in late}
    left = [item.step for item in late if item.step.step_id not in excess]
    assert len(left) <= LATE_PART * room.max_suspended_steps
    assert sum(step.checkpoint_bytes for step in left) <= LATE_PART * room.max_suspended_bytes
