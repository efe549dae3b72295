"""Reports to a monitor that answers, fails, hangs and comes back."""

import asyncio
import math
import threading
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
from waiting import until

from slo.monitor.core import ALL_OBJECTIVES, MonitorCore
from slo.monitor.directives import DirectiveReason, PreemptDirective
from slo.monitor.messages import DecodeSeen, IngressSeen, MonitorAnswer, Role
from slo.monitor.policy import UNSTEERED
from slo.monitor.settings import MonitorSettings
from slo.outcomes import Outcome, RequestEnded
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD
from telemetry.catalogue import MONITOR_LOST, POLICY_APPLIED
from telemetry.reporting import monitor_client
from telemetry.reporting.monitor_client import MonitorClient, Participant

POLICY = UNSTEERED.revised(reserved=0.1)
SHED = RequestEnded("tiny", STANDARD, "acme", Outcome.SHED, 0.01, ttft_budget_s=0.5)
DIRECTIVE = PreemptDirective(ReplicaId("r"), 7, JobId("urgent"), DirectiveReason.OUT_OF_TIME)


class Instruments:
    def __init__(self):
        self.values = {}

    def set(self, metric, value, model):
        self.values[metric] = value


class Monitor:
    """Answers as an actor handle does."""

    def __init__(self):
        self.answer = MonitorAnswer()
        self.error = None
        self.hangs = False
        self.heard = []
        self.found = 0
        self.report = SimpleNamespace(remote=self._report)

    def find(self):
        self.found += 1
        if self.error is not None:
            raise self.error
        return self

    async def _report(self, report):
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        self.heard.append(report)
        return self.answer

    @property
    def dropped(self):
        """What a monitor counts that has heard all of it."""
        core = MonitorCore(MonitorSettings(), 0.0)
        for report in self.heard:
            core.heard(replace(report, seen=None), 0.0)
        return core.dropped

    @property
    def told(self):
        return [event for report in self.heard for event in report.seen.ended]


@pytest.fixture
def monitor():
    return Monitor()


@pytest.fixture
def client(monitor):
    followed, directed, corrected = [], [], []
    participant = Participant(
        "me", Role.INGRESS, IngressSeen, followed.append, directed.append, corrected.append
    )
    client = MonitorClient(participant, Instruments(), monitor.find, 0.01)
    client.followed, client.directed, client.corrected = followed, directed, corrected
    yield client
    client.stop()


def lost(client):
    return client._instruments.values.get(MONITOR_LOST)


async def test_what_is_noted_between_two_reports_goes_with_the_next_one_once(client, monitor):
    client.note("a")
    client.note("b")
    client.start()
    client.start()
    await until(lambda: len(monitor.heard) >= 3)
    client.note("c")
    await until(lambda: "c" in monitor.told)
    assert monitor.told == ["a", "b", "c"]
    assert monitor.heard[0].seen.ended == ("a", "b")
    assert monitor.found == 1
    assert lost(client) == 0.0


async def test_where_nothing_happens_one_interval_in_four_is_reported(client, monitor):
    client.start()
    await asyncio.sleep(1.0)
    assert 2 <= len(monitor.heard) <= 1.0 / 0.01 / 4 + 2


@pytest.mark.parametrize("happens", ["an event", "a stream"])
async def test_what_happens_is_reported_at_once(monitor, monkeypatch, happens):
    monkeypatch.setattr(monitor_client, "QUIET_INTERVALS", 10**6)
    running = 0
    seen = (lambda _: DecodeSeen(running)) if happens == "a stream" else IngressSeen
    client = MonitorClient(Participant("me", Role.DECODE, seen), Instruments(), monitor.find, 0.01)
    client.start()
    await until(lambda: monitor.heard)
    if happens == "an event":
        client.note("a")
        await until(lambda: monitor.told == ["a"])
    else:
        running = 1
        await until(lambda: len(monitor.heard) > 10)
        running = 0
        await until(lambda: monitor.heard[-1].seen.running == 0)
    quiet = len(monitor.heard)
    await asyncio.sleep(0.2)
    assert len(monitor.heard) <= quiet + 1
    client.stop()


async def test_the_answer_is_followed_and_told_back(client, monitor):
    monitor.answer = MonitorAnswer(POLICY)
    client.start()
    await until(lambda: monitor.heard and monitor.heard[-1].follows == 1)
    assert client.followed == [POLICY]
    assert client._instruments.values[POLICY_APPLIED] == 1


async def test_an_older_policy_is_not_followed(client, monitor):
    monitor.answer = MonitorAnswer(POLICY.raised_to(5))
    client.start()
    await until(lambda: client.followed)
    monitor.answer = MonitorAnswer(POLICY.raised_to(4))
    seen = len(monitor.heard)
    await until(lambda: len(monitor.heard) > seen + 2)
    assert client.policy.version == 5
    assert len(client.followed) == 1


async def test_directives_are_passed_on(client, monitor):
    monitor.answer = MonitorAnswer(directives=(DIRECTIVE,))
    client.start()
    await until(lambda: client.directed)
    assert client.directed[0] == DIRECTIVE


async def test_a_monitor_that_asks_is_told_the_whole_policy(client, monitor):
    monitor.answer = MonitorAnswer(POLICY)
    client.start()
    await until(lambda: client.followed)
    assert all(report.policy is None for report in monitor.heard)
    monitor.answer = MonitorAnswer(wanted=True)
    await until(lambda: monitor.heard[-1].policy == POLICY)
    monitor.answer = MonitorAnswer()
    await until(lambda: monitor.heard[-1].policy is None)


async def test_without_a_monitor_the_last_policy_holds_and_nothing_is_lost(client, monitor):
    monitor.answer = MonitorAnswer(POLICY)
    client.start()
    await until(lambda: client.followed)
    monitor.error = RuntimeError("dead")
    await until(lambda: lost(client) == 1.0)
    client.note("a")
    client.note("b")
    finds = monitor.found
    await until(lambda: monitor.found > finds + 1)
    assert client.policy is POLICY
    monitor.error = None
    await until(lambda: lost(client) == 0.0)
    assert monitor.told == ["a", "b"]
    assert monitor.heard[-1].follows == 1


@pytest.mark.parametrize("policy", [POLICY, UNSTEERED])
async def test_which_policy_is_applied_is_said_again_also_while_the_monitor_is_lost(client, monitor, policy):
    """Ray exports no gauge that has not been set for some seconds."""
    monitor.answer = MonitorAnswer(policy)
    client.start()
    await until(lambda: client.policy == policy and lost(client) == 0.0)
    monitor.error = RuntimeError("dead")
    await until(lambda: lost(client) == 1.0)
    client._instruments.values.clear()
    await until(lambda: lost(client) == 1.0)
    assert client._instruments.values[POLICY_APPLIED] == policy.version


async def test_a_monitor_that_does_not_exist_is_looked_for_until_it_does(client, monitor):
    monitor.error = ValueError("no such actor")
    client.start()
    await until(lambda: monitor.found > 2)
    assert lost(client) == 1.0
    monitor.error = None
    await until(lambda: monitor.heard)


async def test_a_monitor_that_hangs_holds_nobody_up(client, monitor, monkeypatch):
    monkeypatch.setattr(monitor_client, "_TIMEOUT_S", 0.02)
    monitor.hangs = True
    client.note("a")
    client.start()
    await until(lambda: lost(client) == 1.0)
    client.note("b")
    monitor.hangs = False
    await until(lambda: "b" in monitor.told)
    assert (monitor.told, monitor.dropped) == (["a", "b"], 0)


async def test_what_was_heard_and_not_answered_counts_once(client, monitor, monkeypatch):
    """Told again, as the monitor may not have heard it, but under its number."""
    monkeypatch.setattr(monitor_client, "_TIMEOUT_S", 0.02)
    client._dropped = 5
    core, hear = MonitorCore(MonitorSettings(), 0.0), monitor._report

    async def report(report):
        await hear(report)
        answer = core.heard(report, 0.0)
        if len(monitor.heard) <= 3:
            await asyncio.Event().wait()
        return answer

    monitor.report.remote = report
    for _ in range(2):
        client.note(SHED)
    client.start()
    await until(lambda: len(monitor.heard) > 5)
    client.note(SHED)
    await until(lambda: len(monitor.told) > 8)
    assert monitor.told == [SHED] * (4 * 2 + 1)
    assert core.judged[SHED.model, SHED.tier, ALL_OBJECTIVES, False] == 3
    assert (core.dropped, monitor.dropped) == (5, 5)
    monitor.heard.clear()  # another monitor
    await until(lambda: monitor.heard)
    assert monitor.dropped == 0, "what the one before has answered to is its"


async def test_what_was_not_sent_waits_while_the_search_for_the_monitor_blocks(monitor, monkeypatch):
    """As Ray's does while its head is away."""
    monkeypatch.setattr(monitor_client, "_TIMEOUT_S", 0.02)
    is_back, looking = threading.Event(), []

    def find():
        looking.append(threading.current_thread())
        is_back.wait(10)
        return monitor

    client = MonitorClient(Participant("me", Role.INGRESS, IngressSeen), Instruments(), find, 0.01)
    client.note("a")
    client.start()
    await until(lambda: lost(client) == 1.0)
    client.note("b")
    await asyncio.sleep(0.2)
    assert len(looking) == 1, "one thread at most is blocked"
    is_back.set()
    await until(lambda: lost(client) == 0.0)
    client.stop()
    assert monitor.told == ["a", "b"]
    assert monitor.dropped == 0


async def test_what_is_left_out_while_a_report_is_under_way_is_told_with_the_next(
    client, monitor, monkeypatch
):
    monkeypatch.setattr(monitor_client, "MOST_EVENTS", 2)
    client._events = deque(maxlen=2)
    hear = monitor._report

    async def report(report):
        for number in range(3 if not monitor.heard else 0):
            client.note(number)
        return await hear(report)

    monitor.report.remote = report
    client.start()
    await until(lambda: monitor.told)
    assert (monitor.told, monitor.dropped) == ([1, 2], 1)


async def test_what_does_not_fit_is_left_out_oldest_first_and_that_is_told(client, monitor, monkeypatch):
    monitor.error = RuntimeError("dead")
    client.start()
    await until(lambda: lost(client) == 1.0)
    for number in range(monitor_client.MOST_EVENTS + 10):
        client.note(number)
    finds = monitor.found
    await until(lambda: monitor.found > finds + 1)
    monitor.error = None
    await until(lambda: monitor.told)
    assert monitor.told[0] == 10
    assert len(monitor.told) == monitor_client.MOST_EVENTS
    assert monitor.dropped == 10


async def test_a_policy_that_cannot_be_carried_out_does_not_end_the_reports(monitor):
    def refuse(_):
        raise RuntimeError

    participant = Participant("me", Role.INGRESS, IngressSeen, refuse, refuse)
    client = MonitorClient(participant, Instruments(), monitor.find, 0.01)
    monitor.answer = MonitorAnswer(POLICY, (DIRECTIVE,))
    client.start()
    await until(lambda: len(monitor.heard) > 3)
    assert client.policy is POLICY
    assert lost(client) == 0.0
    client.stop()


def unchecked(policy, **lies):
    """A policy as it comes out of a pickle, which checks nothing."""
    liar = object.__new__(type(policy))
    for name in policy.__dataclass_fields__:
        object.__setattr__(liar, name, lies.get(name, getattr(policy, name)))
    return liar


@pytest.mark.parametrize(
    "lies",
    [
        {"version": 1 << 62},
        {"version": -1},
        {"shed": {STANDARD: math.nan}},
        {"shed": {STANDARD: 17.0}},
        {"reserved": math.nan},
        {"margin": math.inf},
        {"margin": math.nan},
        {"shed": None},
    ],
    ids=str,
)
async def test_a_policy_that_breaks_its_own_rules_is_refused(client, monitor, lies):
    monitor.answer = MonitorAnswer(unchecked(POLICY, **lies))
    client.start()
    await until(lambda: len(monitor.heard) >= 2)
    assert client.policy == UNSTEERED
    assert client.followed == []
    monitor.answer = MonitorAnswer(POLICY)
    await until(lambda: client.followed == [POLICY])


async def test_a_correction_is_followed_apart_from_the_policy(client, monitor):
    monitor.answer = MonitorAnswer(correction=2.0)
    client.start()
    await until(lambda: len(monitor.heard) > 3)
    assert (client.corrected, client.followed) == ([2.0], [])
    monitor.answer = MonitorAnswer()
    heard = len(monitor.heard)
    await until(lambda: len(monitor.heard) > heard + 2)
    assert client.corrected == [2.0]
    monitor.answer = MonitorAnswer(correction=1.0)
    await until(lambda: client.corrected == [2.0, 1.0])


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0, -1.0, 6.0])
async def test_a_correction_out_of_its_range_is_refused(client, monitor, factor):
    monitor.answer = MonitorAnswer(correction=factor)
    client.start()
    await until(lambda: len(monitor.heard) > 3)
    assert client.corrected == []
    assert lost(client) == 0.0


@pytest.mark.parametrize("policy", [POLICY, None])
async def test_what_is_shed_and_corrected_expires_without_a_monitor(client, monitor, monkeypatch, policy):
    monkeypatch.setattr(monitor_client, "EXPIRES_AFTER_S", 0.2)
    monitor.answer = MonitorAnswer(policy, correction=2.0)
    client.start()
    await until(lambda: client.corrected == [2.0])
    monitor.error = ConnectionError("gone")
    await asyncio.sleep(0.1)
    assert client.corrected == [2.0]
    await until(lambda: client.corrected == [2.0, 1.0])
    assert client.policy == UNSTEERED
    monitor.error = None
    await until(lambda: client.corrected == [2.0, 1.0, 2.0])


async def test_what_is_shed_expires_without_a_monitor(client, monitor, monkeypatch):
    monkeypatch.setattr(monitor_client, "EXPIRES_AFTER_S", 0.2)
    monitor.answer = MonitorAnswer(POLICY)
    client.start()
    await until(lambda: client.policy == POLICY)
    monitor.error = ConnectionError("gone")
    await asyncio.sleep(0.1)
    assert client.policy == POLICY
    await until(lambda: client.followed == [POLICY, UNSTEERED])
    assert client._instruments.values[POLICY_APPLIED] == 0.0
    monitor.error, monitor.answer = None, MonitorAnswer(POLICY.raised_to(9))
    await until(lambda: client.policy.version == 9)


async def test_a_monitor_that_is_away_for_ten_minutes(client, monitor, monkeypatch):
    """In virtual time: the policy holds for a minute, then what is configured, until the monitor is back."""
    started_s, policies = 1000.0, {}
    now_s = started_s
    monkeypatch.setattr(monitor_client, "time", SimpleNamespace(monotonic=lambda: now_s))
    monitor.answer = MonitorAnswer(POLICY)
    client.start()
    await until(lambda: client.policy == POLICY)
    monitor.error = ConnectionError("gone")
    await until(lambda: lost(client) == 1.0)
    while now_s < started_s + 600.0:
        now_s += 5.0
        finds = monitor.found
        await until(lambda: monitor.found >= finds + 2)  # noqa: B023 - called at once
        policies[now_s - started_s] = client.policy
    assert [at_s for at_s, policy in policies.items() if policy == POLICY] == [5.0 * n for n in range(1, 12)]
    assert client.followed == [POLICY, UNSTEERED]
    monitor.error, monitor.answer = None, MonitorAnswer(POLICY.raised_to(2))
    await until(lambda: client.policy.version == 2)
    assert lost(client) == 0.0
