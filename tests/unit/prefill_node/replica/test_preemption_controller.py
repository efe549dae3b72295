"""The governor's decisions reach the board, its timer wakes it, and its failure stops nothing."""

import asyncio
import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from published import running

from prefill_node.board.events import Served, encode
from prefill_node.board.messages import SchedulerView
from prefill_node.replica.preemption_controller import Watch
from slo.monitor.directives import DirectiveReason, PreemptDirective
from slo.preemption.types import Keep, KeepReason, Preempt, PreemptReason
from slo.request import JobId, ReplicaId

SOON_S = 0.02
LONG_AFTER_S = 0.1
STOP = Preempt(7, JobId("urgent"), PreemptReason.RESCUE)
DIRECTIVE = PreemptDirective(ReplicaId("r"), 7, JobId("urgent"), DirectiveReason.OUT_OF_TIME)
VIEW = SchedulerView(running("long", tokens=100))


def keep(recheck_in_s=math.inf):
    """Made when the governor is asked, as its times are absolute."""
    return lambda: Keep(KeepReason.WAITERS_IN_TIME, time.monotonic() + recheck_in_s)


@dataclass
class Governor:
    """Answers what the test says, the last answer for ever."""

    answers: list
    boundaries: int = 10
    has_failed: bool = False
    asked: list = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def profile(self):
        return SimpleNamespace(boundaries=self.boundaries)

    def direct(self, directive, view, reached, now_s):
        return self.decide(view, reached, now_s)

    def decide(self, view, reached, now_s):
        self.asked.append((view, reached, now_s))
        self.was_asked.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer = answer() if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer


class Record:
    """Notes what is recorded."""

    def __init__(self):
        self.is_available = []
        self.reasons = []
        self.outcomes = []
        self.taken = []
        self.took_s = []
        self.views = []

    def available(self, *, is_available):
        self.is_available.append(is_available)

    def kept(self, reason):
        self.reasons.append(reason)

    def directed(self, outcome):
        self.outcomes.append(outcome)

    def decided(self, seconds):
        self.took_s.append(seconds)

    def take(self, records):
        self.taken += records

    def votes(self, board):
        pass

    def dropped(self, board):
        pass

    def suspended(self, view):
        self.views.append(view)


@pytest.fixture
def engine(other):
    """The engine's side of the board."""
    return other


@pytest.fixture
def watching(board):
    watches = []

    def start(*answers, **rest):
        governor, record = Governor([*answers], **rest), Record()
        watches.append(Watch(board, governor, record))
        return watches[-1], governor, record

    yield start
    for watch in watches:
        watch.close()


async def asked_again(governor, times):
    async with asyncio.timeout(2.0):
        while len(governor.asked) < times:
            governor.was_asked.clear()
            await governor.was_asked.wait()
    return len(governor.asked)


async def test_an_order_is_on_the_board_before_the_call_returns(watching, engine):
    watch, _, record = watching(STOP)
    before_s = time.monotonic()
    watch.changed()
    assert engine.is_target(7)
    order = engine.stop_order()
    assert (order.step_id, order.beneficiary, order.reason) == (7, "urgent", "rescue")
    assert before_s <= order.ordered_s <= time.monotonic()
    assert len(record.took_s) == 1
    assert 0.0 <= record.took_s[0] < 1.0


async def test_the_governor_is_shown_what_is_on_the_board(watching, engine):
    watch, governor, _ = watching(keep())
    watch.changed()
    engine.publish(VIEW)
    engine.reach(0, 7, 3)
    watch.changed()
    assert [(view, reached) for view, reached, _ in governor.asked] == [(None, (0, 0)), (VIEW, (7, 3))]
    assert (watch.view(), watch.reached()) == (VIEW, (7, 3))


async def test_a_step_that_goes_on_is_not_ordered_to_stop(watching, engine):
    watch, _, record = watching(keep())
    watch.changed()
    assert (engine.is_target(0), engine.stop_order()) == (True, None)
    assert record.reasons == [KeepReason.WAITERS_IN_TIME]


async def test_it_is_decided_anew_at_the_time_that_was_named_and_not_earlier(watching):
    watch, governor, _ = watching(keep(SOON_S), keep())
    watch.changed()
    assert await asked_again(governor, 2) == 2
    (_, _, first_s), (_, _, second_s) = governor.asked
    assert second_s - first_s >= SOON_S * 0.9
    await asyncio.sleep(LONG_AFTER_S)
    assert len(governor.asked) == 2, "the timer is due once"


async def test_a_time_that_has_passed_is_now(watching):
    watch, governor, _ = watching(keep(-1.0), keep())
    watch.changed()
    assert await asked_again(governor, 2) == 2


@pytest.mark.parametrize("later", [keep(), STOP, keep(60.0)], ids=["no timer", "an order", "a later timer"])
async def test_a_new_decision_replaces_the_timer(later, watching):
    watch, governor, _ = watching(keep(SOON_S), later)
    watch.changed()
    watch.changed()
    await asyncio.sleep(LONG_AFTER_S)
    assert len(governor.asked) == 2


async def test_there_is_one_timer_however_often_things_change(watching):
    watch, governor, _ = watching(*[keep(SOON_S)] * 50, keep())
    for _ in range(50):
        watch.changed()
    await asyncio.sleep(LONG_AFTER_S)
    assert len(governor.asked) == 51


async def test_what_the_scheduler_reported_is_taken_in_once(watching, engine):
    watch, _, record = watching(keep())
    first, second = (encode(Served(job, 1.0, 2.0)) for job in ("a", "b"))
    engine.append_events([first])
    watch.changed()
    engine.append_events([second])
    watch.collect()
    watch.collect()
    assert record.taken == [first, second]


async def test_collecting_decides_nothing(watching, engine):
    watch, governor, record = watching(STOP)
    engine.publish(VIEW)
    watch.collect()
    assert governor.asked == []
    assert engine.is_target(0)
    assert record.views == [VIEW]


async def test_why_a_step_goes_on_is_remembered_for_that_step(watching, engine):
    watch, _, _ = watching(keep())
    watch.changed()
    engine.publish(VIEW)
    assert watch.kept(7) is None
    watch.changed()
    assert watch.kept(7) is KeepReason.WAITERS_IN_TIME
    assert watch.kept(8) is None


async def test_a_directive_is_on_the_board_before_the_call_returns(watching, engine):
    watch, _, record = watching(Preempt(7, JobId("urgent"), PreemptReason.DIRECTED))
    watch.direct(DIRECTIVE)
    assert engine.is_target(7)
    assert (engine.stop_order().beneficiary, engine.stop_order().reason) == ("urgent", "directed")
    assert record.outcomes == ["stopped"]


async def test_a_directive_that_comes_late_does_nothing_and_leaves_the_timer_alone(watching, engine):
    watch, governor, record = watching(keep(SOON_S), Keep(KeepReason.IDLE), keep())
    watch.changed()
    watch.direct(DIRECTIVE)
    assert engine.is_target(0)
    assert record.outcomes == ["idle"]
    assert await asked_again(governor, 3) == 3


# Failure


async def test_a_governor_that_fails_is_asked_no_more_and_says_so(watching, engine):
    watch, governor, record = watching(keep(SOON_S), ZeroDivisionError("a bug"))
    watch.changed()
    assert record.is_available == [True]
    watch.changed()
    assert record.is_available[:2] == [True, False]
    assert record.is_available[-1] is False
    watch.changed()
    watch.collect()
    await asyncio.sleep(LONG_AFTER_S)
    assert len(governor.asked) == 2
    assert record.is_available[:2] == [True, False]
    assert record.is_available[-1] is False
    assert engine.is_target(0)


async def test_a_failure_in_the_timer_does_not_reach_the_loop(watching):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    watch, governor, record = watching(keep(SOON_S), ValueError("a bug"))
    watch.changed()
    assert await asked_again(governor, 2) == 2
    assert reported == []
    assert record.is_available[:2] == [True, False]
    assert record.is_available[-1] is False


async def test_after_the_governor_has_failed_what_the_engine_reports_is_taken_in_as_before(watching, engine):
    watch, governor, record = watching(RuntimeError("a bug"))
    first, second = (encode(Served(job, 1.0, 2.0)) for job in ("a", "b"))
    watch.changed()
    engine.append_events([first])
    engine.publish(VIEW)
    watch.collect()
    engine.append_events([second])
    watch.changed()
    assert record.taken == [first, second]
    assert record.views == [VIEW]
    assert len(governor.asked) == 1


@pytest.mark.parametrize("look", [Watch.changed, Watch.collect], ids=["deciding", "collecting"])
async def test_what_nobody_can_read_is_lost_and_said_and_stops_nothing(look, watching, engine, caplog):
    watch, governor, record = watching(STOP)
    read, known = record.take, encode(Served("a", 1.0, 2.0))
    record.take = lambda _: (_ for _ in ()).throw(ValueError("not a notice"))
    engine.append_events([encode(Served("lost", 1.0, 2.0))])
    look(watch)
    assert "record_failed" in caplog.text
    record.take = read
    engine.append_events([known])
    watch.changed()
    assert record.taken == [known]
    assert (set(record.is_available), watch.is_up) == ({True}, True)
    assert governor.asked
    assert engine.is_target(7)


@pytest.mark.parametrize("look", [Watch.changed, Watch.collect], ids=["deciding", "collecting"])
async def test_what_stays_unreadable_is_said_once_until_it_works_again(look, watching, caplog):
    watch, _, record = watching(keep())
    read = record.take

    def fails(_):
        raise ValueError("not a notice")

    for times in (1, 2):
        record.take = fails
        for _ in range(3):
            look(watch)
        assert caplog.text.count("record_failed") == times
        record.take = read
        look(watch)


async def test_a_failed_watch_still_shows_the_board(watching, engine):
    watch, _, _ = watching(RuntimeError("a bug"))
    watch.changed()
    engine.publish(VIEW)
    engine.reach(0, 7, 5)
    assert (watch.view(), watch.reached()) == (VIEW, (7, 5))


async def test_an_engine_that_cannot_stop_is_said_to_be_without_preemption(watching):
    _, _, record = watching(keep(), boundaries=0)
    assert record.is_available == [False]


async def test_after_closing_nothing_happens_any_more(watching):
    watch, governor, _ = watching(keep(SOON_S))
    watch.changed()
    watch.close()
    watch.changed()
    watch.collect()
    await asyncio.sleep(LONG_AFTER_S)
    assert len(governor.asked) == 1
