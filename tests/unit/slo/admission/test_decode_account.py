"""What a class takes of decode, against its share of it."""

from dataclasses import replace

import pytest

from slo.admission.decode_account import DecodeAccount, DecodeTake
from slo.autoscaling.need import DecodeDemand
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM

CROWDED = DecodeDemand(0.2, 100, pace=0.9, replicas=1)
FULL = DecodeDemand(0.9, 100, pace=0.2, replicas=1)


def holding(takes, waiting=()):
    """An account of requests by tier; those of tiers that wait are not prefilled yet."""
    account = DecodeAccount(DEFAULT_TIERS)
    for tier, many, take in takes:
        for number in range(many):
            account.admitted(JobId(f"{tier}-{number}"), tier, take)
            if tier not in waiting:
                account.decodes(JobId(f"{tier}-{number}"))
    return account


def above(account, demand):
    account.sees(demand)
    return {tier for tier in (STANDARD, BACKGROUND) if account.is_above_share(tier)}


@pytest.mark.parametrize(
    ("standard", "background", "found"),
    [(60, 16, {STANDARD}), (38, 17, {BACKGROUND}), (40, 20, {STANDARD, BACKGROUND}), (38, 16, set())],
)
def test_where_pace_is_short_streams_count(standard, background, found):
    """A hundred of them are nine tenths of what decode can do."""
    few, many = DecodeTake(1, 10), DecodeTake(1, 10_000)
    rest = 100 - standard - background
    account = holding([(PREMIUM, rest, few), (STANDARD, standard, few), (BACKGROUND, background, many)])
    assert above(account, CROWDED) == found
    assert above(account, DecodeDemand(0.2, 100, pace=1.0, replicas=2)) == set(), "it is not crowded"


def test_where_memory_is_short_its_tokens_count():
    account = holding([(PREMIUM, 44, DecodeTake(1, 100)), (STANDARD, 55, DecodeTake(1, 100))])
    account.admitted(JobId("long"), BACKGROUND, DecodeTake(1, 5000))
    account.decodes(JobId("long"))
    assert above(account, FULL) == {BACKGROUND}
    account.ended(JobId("long"), 1.0)
    assert above(account, FULL) == {STANDARD}
    unknown = holding([(PREMIUM, 40, DecodeTake()), (STANDARD, 60, DecodeTake())])
    assert above(unknown, FULL) == {STANDARD}, "streams, where nobody says how long they are"


def test_a_request_with_many_answers_is_as_many_streams():
    account = holding([(PREMIUM, 70, DecodeTake()), (BACKGROUND, 1, DecodeTake(30, 0))])
    assert above(account, CROWDED) == {BACKGROUND}


def test_what_waits_for_prefill_will_decode_one_day():
    takes = [(PREMIUM, 100, DecodeTake()), (BACKGROUND, 20, DecodeTake())]
    account = holding(takes, waiting={BACKGROUND})
    assert above(account, CROWDED) == {BACKGROUND}
    for number in range(20):
        account.ended(JobId(f"{BACKGROUND}-{number}"), 1.0)
    assert above(account, CROWDED) == set()


def test_of_what_waits_for_prefill_only_what_decodes_at_one_time_counts_against_the_share():
    """One in five seconds stays for ten: two are there together, and thirty wait for prefill."""
    account = holding([(PREMIUM, 98, DecodeTake())])
    for number in range(200):
        now_s, job = 5.0 * number, JobId(f"{number}")
        account.arrived(BACKGROUND, DecodeTake(), now_s)
        account.admitted(job, BACKGROUND, DecodeTake())
        if number >= 30:
            account.decodes(JobId(f"{number - 30}"))
        if number >= 32:
            account.ended(JobId(f"{number - 32}"), now_s)
    assert above(account, CROWDED) == set()
    for number in range(100):
        account.arrived(BACKGROUND, DecodeTake(), now_s)
        account.admitted(JobId(f"burst-{number}"), BACKGROUND, DecodeTake())
    assert above(account, CROWDED) == {BACKGROUND}, "so many more come"


def test_streams_that_are_not_known_count_as_others_of_nobody():
    """As after a restart of the router: what it has admitted since is not all that there is."""
    account = holding([(BACKGROUND, 10, DecodeTake(1, 100))])
    assert above(account, CROWDED) == above(account, FULL) == set()


def test_nothing_of_the_servers_own_counts_nor_anything_twice():
    account = holding(
        [(PREMIUM, 100, DecodeTake()), (SYSTEM, 30, DecodeTake()), (BACKGROUND, 9, DecodeTake())]
    )
    for number in range(9):
        account.decodes(JobId(f"{BACKGROUND}-{number}"))
    assert above(account, CROWDED) == set()


@pytest.mark.parametrize("demand", [CROWDED, FULL])
def test_what_all_ask_for_is_what_comes_times_how_long_it_stays(demand):
    """Two streams a second for 50 s each, of which a tenth is let in: that is ten at a time."""
    account, take, now_s, there = DecodeAccount(DEFAULT_TIERS), DecodeTake(1, 100), 0.0, []
    for number in range(2000):
        now_s = number / 2
        while there and there[0][0] <= now_s:
            account.ended(there.pop(0)[1], now_s)
        account.arrived(BACKGROUND, take, now_s)
        if number % 10 == 0:
            job = JobId(f"{number}")
            account.admitted(job, BACKGROUND, take)
            account.decodes(job)
            there.append((now_s + 50.0, job))
    account.sees(replace(demand, requests=10))
    assert account.replicas_asked(now_s) == pytest.approx(10 * demand.load, rel=0.05)
    account.sees(replace(demand, requests=10, replicas=4))
    assert account.replicas_asked(now_s) == pytest.approx(10 * demand.load, rel=0.05), "in replicas"
    assert account.replicas_asked(now_s + 600.0) == pytest.approx(demand.load, rel=0.05), "what is there"


def test_what_is_refused_for_want_of_memory_is_told_apart():
    """A stream a second for 50 s each: of ten one is let in, and three lack memory."""
    account, take, now_s, there = DecodeAccount(DEFAULT_TIERS), DecodeTake(1, 100), 0.0, []
    for number in range(1000):
        now_s, job = float(number), JobId(f"{number}")
        while there and there[0][0] <= now_s:
            account.ended(there.pop(0)[1], now_s)
        account.arrived(BACKGROUND, take, now_s)
        if number % 10 == 0:
            account.admitted(job, BACKGROUND, take)
            account.decodes(job)
            there.append((now_s + 50.0, job))
        elif number % 10 <= 3:
            account.admitted(job, BACKGROUND, take, job)
            account.lacked(job, now_s)
            account.withdrawn(job)
    account.sees(replace(FULL, requests=5))
    assert account.replicas_refused(now_s) == pytest.approx(3 * FULL.load, rel=0.1)
    assert account.replicas_asked(now_s) == pytest.approx(10 * FULL.load, rel=0.1)
    assert account.replicas_refused(now_s + 600.0) == pytest.approx(0.0, abs=1e-3)


def lacks(account, name, likeness, now_s):
    account.arrived(BACKGROUND, DecodeTake(), now_s, likeness)
    account.admitted(JobId(name), BACKGROUND, DecodeTake(), likeness)
    account.lacked(JobId(name), now_s)
    account.withdrawn(JobId(name))


def test_who_lacked_memory_and_comes_again_counts_once():
    account = holding([(PREMIUM, 100, DecodeTake())])
    account.sees(CROWDED)
    told = []
    for second in range(10):
        lacks(account, f"one-{second}", "one", float(second))
        lacks(account, f"other-{second}", "other" if second < 5 else f"other-{second}", float(second))
        told.append(100 * account.replicas_refused(float(second)))
    assert told == pytest.approx([0.9 * n for n in (2, 2, 2, 2, 2, 3, 4, 5, 6, 7)])
    account.arrived(BACKGROUND, DecodeTake(), 10.0, "one")
    account.admitted(JobId("one"), BACKGROUND, DecodeTake(), "one")
    assert 100 * account.replicas_refused(10.0) == pytest.approx(0.9 * 6), "it has found memory"


def test_who_lacked_memory_counts_for_a_minute_while_nobody_knows_how_long_they_stay():
    """As after a restart of the router."""
    account = DecodeAccount(DEFAULT_TIERS)
    account.sees(CROWDED)
    lacks(account, "one", "one", 0.0)
    lacks(account, "other", "other", 30.0)
    assert [100 * account.replicas_refused(at_s) for at_s in (59.0, 61.0, 91.0)] == pytest.approx(
        [1.8, 0.9, 0.0]
    )


def test_all_that_is_there_is_asked_for_though_nobody_knows_how_long_it_stays():
    account = DecodeAccount(DEFAULT_TIERS)
    account.sees(CROWDED)
    assert account.replicas_asked(0.0) == 0.0
    account = holding([(PREMIUM, 100, DecodeTake())])
    account.sees(CROWDED)
    assert account.replicas_asked(0.0) == pytest.approx(0.9)
    account.withdrawn(JobId(f"{PREMIUM}-0"))
    assert account.replicas_asked(0.0) == pytest.approx(0.99 * 0.9)
