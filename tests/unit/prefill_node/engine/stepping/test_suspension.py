"""The account of suspended steps: who is in one, for how long, and what becomes of each checkpoint."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_node.engine.stepping.suspension import SuspendedStep, Suspensions


def step(step_id, *requests, tokens=100, since_s=0.0, boundary=3, done=0.25, checkpoint_bytes=1000):
    return SuspendedStep(
        step_id=step_id,
        members=dict.fromkeys(requests, tokens),
        pairs=0.0,
        boundary=boundary,
        done=done,
        checkpoint_bytes=checkpoint_bytes,
        since_s=since_s,
        preempted_by="",
        arrival_by_s=0.0,
    )


def suspensions(*steps, max_suspended_s=10.0):
    all_ = Suspensions(max_suspended_s)
    for each in steps:
        all_.suspend(each)
    return all_


def test_a_step_has_the_tokens_of_all_its_members():
    assert step(1, "a", "b").tokens == 200


def test_each_stop_and_each_second_counts_for_every_member():
    first, second = step(1, "a", "b", since_s=10.0), step(2, "a", since_s=20.0)
    all_ = suspensions(first)
    all_.resume(first, 13.0)
    all_.suspend(second)
    assert all_.accounts["a"].preemptions == 2
    assert all_.accounts["b"].preemptions == 1
    assert all_.suspended_s("a", 25.0) == pytest.approx(3.0 + 5.0), "the open one included"
    assert all_.suspended_s("b", 25.0) == pytest.approx(3.0)
    assert all_.suspended_s("never-stopped", 25.0) == 0.0


def test_stops_of_a_long_prompt_are_counted_by_chunk():
    all_ = suspensions()
    for number, behind in enumerate((30, 20, 20, 10)):
        all_.begins("a", behind)
        for _ in range(3):
            stopped = step(number, "a")
            all_.suspend(stopped)
            all_.resume(stopped, 1.0)
        account = all_.accounts["a"]
        assert account.preemptions == (3, 6, 9, 12)[number]
        stops = account.preemptions - account.preemptions_before
        assert stops == (3, 3, 6, 3)[number], "the same one is no other"
    assert not all_.begins("never-stopped", 5)


def test_seconds_of_a_long_prompt_are_counted_by_chunk():
    all_ = suspensions()
    for number, behind in enumerate((30, 20, 20, 10)):
        all_.begins("a", behind)
        stopped = step(number, "a", since_s=0.0)
        all_.suspend(stopped)
        all_.resume(stopped, 4.0)
        assert all_.suspended_s("a", 99.0) == (4.0, 4.0, 8.0, 4.0)[number], "the same one is no other"


def test_a_step_is_overdue_as_soon_as_one_member_is():
    first, second = step(1, "a", since_s=0.0), step(2, "a", "b", since_s=100.0)
    all_ = suspensions(first, max_suspended_s=10.0)
    all_.resume(first, 6.0)
    all_.suspend(second)
    assert not all_.is_overdue(second, 103.9)
    assert all_.is_overdue(second, 104.0), "6 s before and 4 s now"


def test_a_resumed_step_takes_its_checkpoint_with_it():
    stopped = step(1, "a")
    all_ = suspensions(stopped)
    all_.resume(stopped, 1.0)
    assert all_.steps == []
    assert all_.take_discarded() == ()


def test_a_dropped_step_gives_its_checkpoint_up_once():
    stopped = step(1, "a", "b")
    all_ = suspensions(stopped)
    all_.drop(stopped, 2.0)
    assert all_.take_discarded() == (1,)
    assert all_.take_discarded() == ()
    assert all_.accounts["b"].suspended_s == pytest.approx(2.0)


def test_a_step_lives_until_its_last_member_is_gone():
    stopped = step(1, "a", "b")
    all_ = suspensions(stopped, step(2, "c"))
    all_.forget("a", 2.0)
    assert stopped.members == {"b": 100}
    assert all_.step_of("a") is None
    assert all_.take_discarded() == ()
    all_.forget("b", 3.0)
    assert [each.step_id for each in all_.steps] == [2]
    assert all_.take_discarded() == (1,)
    assert all_.accounts["a"].suspended_s == pytest.approx(2.0), (
        "it lost its blocks, and has waited all the same"
    )


def test_the_attention_of_who_has_left_is_not_computed_when_the_others_go_on():
    stopped = step(1, "a", "b")
    stopped.pairs = 30.0
    all_ = suspensions(stopped)
    all_.forget("a", 2.0, 20.0)
    assert (stopped.tokens, stopped.pairs) == (100, 10.0)
    all_.forget("c", 2.0, 5.0)
    assert stopped.pairs == 10.0


def test_forgetting_somebody_who_is_not_suspended_changes_nothing():
    all_ = suspensions(step(1, "a"))
    all_.forget("b", 1.0)
    assert [each.members for each in all_.steps] == [{"a": 100}]
    assert set(all_.accounts) == {"a"}


@pytest.mark.parametrize("ended_first", [True, False], ids=["ended, then forgotten", "forgotten, then ended"])
def test_a_request_that_leaves_the_engine_leaves_no_account(ended_first):
    all_ = suspensions(step(1, "a"))
    if ended_first:
        all_.ended("a")
        all_.forget("a", 1.0)
    else:
        all_.forget("a", 1.0)
        all_.ended("a")
    assert all_.accounts == {}
    assert all_.steps == []


class Bookkeeping(RuleBasedStateMachine):
    """Requests come, are stopped, resumed, dropped and leave, in any order."""

    def __init__(self):
        super().__init__()
        self.all = Suspensions(max_suspended_s=20.0)
        self.now_s = 0.0
        self.ids = itertools.count(1)
        self.names = (f"request-{n}" for n in itertools.count())
        self.free = set()
        self.stops = {}
        self.waited_s = {}
        self.taken = set()
        self.resumed = set()
        self.dropped = []

    @rule(seconds=st.integers(0, 9))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule()
    def a_request_comes(self):
        name = next(self.names)
        self.free.add(name)
        self.stops[name], self.waited_s[name] = 0, 0.0

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def a_step_stops(self, data):
        members = data.draw(st.sets(st.sampled_from(sorted(self.free)), min_size=1, max_size=3))
        self.free -= members
        stopped = step(next(self.ids), *sorted(members), since_s=self.now_s)
        self.taken.add(stopped.step_id)
        self.all.suspend(stopped)
        for name in members:
            self.stops[name] += 1

    def _close(self, stopped):
        for name in stopped.members:
            self.waited_s[name] += self.now_s - stopped.since_s
        self.free |= set(stopped.members)

    @precondition(lambda self: self.all.steps)
    @rule(data=st.data())
    def a_step_is_resumed(self, data):
        stopped = data.draw(st.sampled_from(self.all.steps))
        self._close(stopped)
        self.resumed.add(stopped.step_id)
        self.all.resume(stopped, self.now_s)

    @precondition(lambda self: self.all.steps)
    @rule(data=st.data())
    def a_step_is_dropped(self, data):
        stopped = data.draw(st.sampled_from(self.all.steps))
        self._close(stopped)
        self.all.drop(stopped, self.now_s)

    @precondition(lambda self: self.all.steps)
    @rule(data=st.data(), leaves=st.booleans())
    def a_member_is_taken_out(self, data, leaves):
        stopped = data.draw(st.sampled_from(self.all.steps))
        name = data.draw(st.sampled_from(sorted(stopped.members)))
        if leaves:
            self.all.ended(name)
            del self.stops[name], self.waited_s[name]
        else:
            self.waited_s[name] += self.now_s - stopped.since_s
            self.free.add(name)
        self.all.forget(name, self.now_s)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def a_request_ends(self, data):
        name = data.draw(st.sampled_from(sorted(self.free)))
        self.free.discard(name)
        self.all.ended(name)
        del self.stops[name], self.waited_s[name]

    @rule()
    def the_workers_are_told(self):
        self.dropped += self.all.take_discarded()

    @invariant()
    def each_checkpoint_is_kept_resumed_or_given_up(self):
        self.dropped += self.all.take_discarded()
        kept = {stopped.step_id for stopped in self.all.steps}
        assert len(set(self.dropped)) == len(self.dropped), "given up twice"
        assert kept | self.resumed | set(self.dropped) == self.taken
        assert len(kept) + len(self.resumed) + len(self.dropped) == len(self.taken)

    @invariant()
    def everybody_is_in_one_step_at_most(self):
        members = [name for stopped in self.all.steps for name in stopped.members]
        assert len(members) == len(set(members))
        assert all(stopped.members for stopped in self.all.steps)

    @invariant()
    def accounts_are_those_of_requests_that_are_there(self):
        assert set(self.all.accounts) == {name for name, stops in self.stops.items() if stops}
        for name, account in self.all.accounts.items():
            assert account.preemptions == self.stops[name]
            stopped = self.all.step_of(name)
            open_s = 0.0 if stopped is None else self.now_s - stopped.since_s
            assert self.all.suspended_s(name, self.now_s) == pytest.approx(self.waited_s[name] + open_s)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
