"""Where goodput ends, also on a server that remembers an overload."""

import random

import pytest

from deployments.bench.answer import Answer, Ended, Fate, Offered
from deployments.bench.score import score
from deployments.bench.search import Goodput, bisection, max_missed, rest_s, search
from simulator.workload.arrivals import Arrival
from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.monitor.core import MonitorCore
from slo.monitor.messages import IngressSeen, MonitorReport, Role, RouterSeen
from slo.monitor.settings import MonitorSettings
from slo.outcomes import Outcome, RequestEnded
from slo.tiers import PREMIUM, STANDARD


def found(limit_rps, low_rps=1.0, high_rps=9.0, precision=0.05):
    rates, tried = bisection(low_rps, high_rps, precision), []
    rate_rps = next(rates)
    while True:
        tried.append(rate_rps)
        try:
            rate_rps = rates.send(rate_rps <= limit_rps)
        except StopIteration as end:
            return end.value, tried


@pytest.mark.parametrize("limit_rps", [1.0, 2.34, 5.0, 8.99])
def test_bisection_closes_in_on_the_highest_good_rate(limit_rps):
    goodput, tried = found(limit_rps)
    assert goodput.is_bounded
    assert limit_rps * 0.94 <= goodput.rate_rps <= limit_rps
    assert len(tried) < 12


def test_bisection_says_when_the_limits_do_not_hold_it():
    assert found(0.5) == (Goodput(None, is_bounded=True), [1.0])
    assert found(100.0) == (Goodput(9.0, is_bounded=False), [1.0, 9.0])


OBJECTIVES_S = {PREMIUM: 1.0, STANDARD: 20.0}
WANTED = 0.9


class Monitored:
    """A server of so many requests a second, one after the other, that sheds by the monitor's own rules.

    Monitor and client judge a request when its first token comes, or when it is shed.
    """

    def __init__(self, capacity_rps, *, is_fresh):
        self._capacity_rps = capacity_rps
        self._is_fresh = is_fresh
        self.now_s = 0.0
        self._begin()

    def _begin(self):
        self._monitor = MonitorCore(MonitorSettings(models=("m",)), self.now_s)
        self._waiting = 0.0
        self._unjudged = []
        self._pass_second(0)

    def _pass_second(self, came):
        self.now_s += 1
        judged = [ended for at_s, ended in self._unjudged if at_s <= self.now_s]
        self._unjudged = [(at_s, ended) for at_s, ended in self._unjudged if at_s > self.now_s]
        monitor, rps = self._monitor, self._capacity_rps
        prefill = PrefillDemand(came / rps, self._waiting / rps, capacity=1.0)
        router = RouterSeen({}, {}, FleetDemand(prefill, DecodeDemand(0.1, 1, 0.1, 1)))
        for role, seen in ((Role.ROUTER, router), (Role.INGRESS, IngressSeen(tuple(judged)))):
            report = MonitorReport(role, role, monitor.policy.version, seen, batch=int(self.now_s), model="m")
            monitor.heard(report, self.now_s)
        monitor.look(self.now_s)
        self._waiting = max(0.0, self._waiting - rps)

    async def rest(self, seconds):
        for _ in range(int(seconds)):
            self._pass_second(0)

    async def probe(self, rate_rps):
        """A minute at a rate, or less if it is bad by then."""
        if self._is_fresh:
            self._begin()
        rng = random.Random(0)
        start_s, ended, missed_at_s, unsent = self.now_s, [], [], 0
        for second in range(60):
            came = 0
            for _ in range(int(rate_rps) + (rng.random() < rate_rps % 1)):
                tier = PREMIUM if rng.random() < 0.75 else STANDARD
                if sum(at_s <= self.now_s for at_s in missed_at_s) > max_missed(int(60 * rate_rps), WANTED):
                    unsent += 1
                    continue
                came += 1
                is_shed = rng.random() < self._monitor.policy.shed_level(tier)
                self._waiting += not is_shed
                ttft_s = None if is_shed else self._waiting / self._capacity_rps
                fate = Fate.REFUSED if is_shed else Fate.ANSWERED
                arrival = Arrival(len(ended), second, "chat", 10, 2, OBJECTIVES_S[tier], tier)
                reason = "429 shed_by_policy" if is_shed else ""
                ended.append(Ended(arrival, Answer(fate, 0.0, 1.0, reason, ttft_s), 0.0))
                outcome, due_s = Outcome.SHED if is_shed else Outcome.FINISHED, OBJECTIVES_S[tier]
                of_it = RequestEnded(
                    "m", tier, "a", outcome, ttft_s or 0.0, ttft_s=ttft_s, ttft_budget_s=due_s
                )
                judged_at_s = self.now_s + (ttft_s or 0.0)
                self._unjudged.append((judged_at_s, of_it))
                if not ended[-1].is_met:
                    missed_at_s.append(judged_at_s)
            self._pass_second(came)
            if unsent:
                break
        while self._waiting > 0 or self._unjudged:
            self._pass_second(0)
        return score(Offered(ended, self.now_s - start_s, unsent))


async def found_of(server, high_rps, max_rest_s=240.0):
    return await search(bisection(0.1, high_rps, 0.05), WANTED, server.probe, server.rest, max_rest_s)


@pytest.mark.parametrize(
    ("high_rps", "capacity_rps"),
    [(8.0, 2.0), (10.0, 2.5), (10.0, 4.0), (10.0, 6.0), (20.0, 4.0), (20.0, 5.0)],
)
async def test_what_a_server_sheds_after_one_rate_does_not_count_against_the_next(high_rps, capacity_rps):
    fresh = await found_of(Monitored(capacity_rps, is_fresh=True), high_rps)
    rested = Monitored(capacity_rps, is_fresh=False)
    assert (await found_of(rested, high_rps)).rate_rps == pytest.approx(fresh.rate_rps, rel=0.08)
    assert rested.now_s < 25 * 60


@pytest.mark.parametrize(("high_rps", "capacity_rps"), [(10.0, 2.5), (8.0, 2.0), (20.0, 4.0)])
async def test_without_a_rest_it_does(high_rps, capacity_rps):
    fresh = await found_of(Monitored(capacity_rps, is_fresh=True), high_rps)
    unrested = await found_of(Monitored(capacity_rps, is_fresh=False), high_rps, 0.0)
    assert unrested.rate_rps < 0.8 * fresh.rate_rps


def ran(fate, wall_s=1.0, ttft_s=9.0, late_s=0.0):
    arrival = Arrival(0, 0.0, "chat", 10, 2, 1.0, PREMIUM)
    reason = "" if fate is Fate.ANSWERED else "429 shed_by_policy"
    return score(Offered([Ended(arrival, Answer(fate, 0.0, 1.0, reason, ttft_s), late_s)], wall_s))


@pytest.mark.parametrize(
    ("fate", "wall_s", "is_good", "expected_s"),
    [
        (Fate.ANSWERED, 60.0, True, 0.0),
        (Fate.ANSWERED, 10.0, False, 90.0),  # late: it may have begun to shed by the last answers
        (Fate.REFUSED, 10.0, False, 90.0),
        (Fate.REFUSED, 10.0, True, 90.0),
        (Fate.FAILED, 10.0, False, 90.0),
        (Fate.REFUSED, 600.0, False, 240.0),
    ],
)
def test_a_server_rests_by_how_long_it_was_overloaded(fate, wall_s, is_good, expected_s):
    assert rest_s(ran(fate, wall_s), 240.0, is_good=is_good) == expected_s


@pytest.mark.parametrize("max_rest_s", [0.0, 240.0])
async def test_after_failures_there_is_a_rest_the_last_rate_included(max_rest_s):
    did = []

    async def probe(rate_rps):
        did.append(rate_rps)
        return ran(Fate.FAILED if rate_rps > 1.0 else Fate.ANSWERED, ttft_s=0.5)

    async def rest(seconds):
        did.append("rest")
        assert seconds == min(max_rest_s, 63.0)

    found = await search(bisection(1.0, 4.0, 0.5), WANTED, probe, rest, max_rest_s)
    assert (found, did) == (Goodput(1.0, is_bounded=True), [1.0, 4.0, "rest", 2.5, "rest", 1.75, "rest"])


@pytest.mark.parametrize(
    ("requests", "wanted", "most"), [(10, 0.9, 1), (600, 0.9, 60), (7, 0.9, 0), (5, 1.0, 0), (5, 0.0, 5)]
)
def test_how_many_may_miss(requests, wanted, most):
    assert max_missed(requests, wanted) == most


@pytest.mark.parametrize(
    ("slow_from_rps", "bad_from_rps", "expected"),
    [
        (3.0, 3.0, Goodput(2.75, is_bounded=False)),
        (4.0, 3.0, Goodput(2.75, is_bounded=True)),  # a lower rate was bad that it did offer
        (9.0, 3.0, Goodput(2.75, is_bounded=True)),
        (0.1, 0.1, Goodput(None, is_bounded=False)),
    ],
)
async def test_a_client_that_was_too_slow_bounds_nothing(slow_from_rps, bad_from_rps, expected):
    after_good = []

    async def probe(rate_rps):
        after_good[:] = [rate_rps < bad_from_rps]
        late_s = 0.5 if rate_rps >= slow_from_rps else 0.0
        return ran(Fate.ANSWERED, ttft_s=9.0 if rate_rps >= bad_from_rps else 0.5, late_s=late_s)

    async def rest(_):
        assert after_good == [False]

    assert await search(bisection(0.5, 5.0, 0.1), WANTED, probe, rest, 240.0) == expected
