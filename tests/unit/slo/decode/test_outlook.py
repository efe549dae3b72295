"""Who fits onto a decode replica, and when: as a simulation of its streams says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.decode.headroom import DecodeLoad
from slo.decode.outlook import FAR_S, LEAST_STEP_S, Outlook
from slo.decode.predicted_peak import USABLE, Holding, predicted_peak
from slo.decode.running_streams import RunningStreams
from slo.request import JobId

NEWCOMER = st.builds(
    Holding,
    st.integers(1, 300),
    st.integers(0, 60),
    st.integers(0, 2),
    waits=st.just(value=False),
)
STREAMS = st.lists(NEWCOMER, max_size=10)
ANY = st.builds(
    Holding,
    st.integers(1, 300),
    st.integers(0, 60),
    st.integers(0, 1),
    st.booleans(),
)
SENT = ANY.map(lambda one: one._replace(waits=True))


def load(streams, pool=1000, **about):
    named = {JobId(f"{number}"): stream for number, stream in enumerate(streams)}
    about = {"shared_tokens": 0, "reserve_tokens": 0, "step_s": 0.1, **about}
    return DecodeLoad(pool, streams=named, **about)


def fits(load, newcomer, sent=(), **about):
    return Outlook(load, newcomer.rank, sent).fits(newcomer, **{"is_top": False, **about})


def wait_s(load, newcomer, sent=(), **about):
    return Outlook(load, newcomer.rank, sent).wait_s(newcomer, **{"is_top": False, **about})


@given(STREAMS, STREAMS, NEWCOMER, st.integers(100, 3000))
def test_it_fits_when_the_peak_of_all_that_do_not_yield_to_it_does(streams, sent, newcomer, pool):
    found = fits(load(streams, pool), newcomer, sent)
    peers = [one for one in (*streams, *sent) if one.rank >= newcomer.rank]
    assert found == (not peers or predicted_peak([*peers, newcomer]) <= USABLE * pool)


@given(STREAMS, NEWCOMER)
def test_one_more_raises_the_peak_by_no_more_than_it_takes(streams, newcomer):
    assert predicted_peak([*streams, newcomer]) <= predicted_peak(streams) + sum(newcomer[:2])


@given(STREAMS, NEWCOMER, st.integers(100, 3000))
def test_after_the_wait_it_fits_beside_those_that_are_left(streams, newcomer, pool):
    asked, peers = load(streams, pool), [one for one in streams if one.rank >= newcomer.rank]
    waits_s = wait_s(asked, newcomer)
    assert (waits_s == 0.0) == (fits(asked, newcomer) or all(stream.remaining == 0 for stream in peers))
    steps = round(waits_s / 0.1)
    later = [Holding(stream.tokens + steps, stream.remaining - steps, stream.rank) for stream in streams]
    left = [stream for stream in later if stream.remaining > 0]
    if waits_s:
        assert fits(load(left, pool), newcomer)


def test_who_fits_now_does_not_wait_although_the_streams_will_have_grown():
    asked, newcomer = load([Holding(1, 4), Holding(1, 8), Holding(1, 8)], pool=100), Holding(74, 4)
    assert fits(asked, newcomer)
    assert wait_s(asked, newcomer) == 0.0


def test_what_is_kept_for_the_top_tier_keeps_others_out():
    asked = load([Holding(500, 100)], reserve_tokens=200)
    newcomer = Holding(100, 100)
    assert not fits(asked, newcomer)
    assert fits(asked, newcomer, is_top=True)


def test_what_is_shared_counts_once_and_only_for_those_who_may_share_it():
    newcomer, tops = Holding(300, 100, 2), [Holding(300, 100, 2), Holding(300, 100, 2)]
    assert fits(load([*tops, Holding(10, 10)], shared_tokens=300), newcomer, is_top=True)
    lower = [Holding(300, 10), Holding(300, 10)]
    assert not fits(load([*tops, *lower], shared_tokens=300), newcomer, is_top=True), "of lower ones"
    waits = Holding(300, 10, waits=True)
    assert fits(load([*tops, waits], shared_tokens=300), newcomer, is_top=True), "it holds nothing"


def test_a_wait_is_never_nothing_while_steps_are_not_known():
    asked = load([Holding(900, 50)], step_s=0.0)
    assert wait_s(asked, Holding(100, 10)) == 50 * LEAST_STEP_S


def test_those_that_wait_for_memory_go_first_and_do_not_end_meanwhile():
    """Three answers of 400 tokens, each of which fills the memory: the last waits for both before it."""
    streams = {JobId("runs"): Holding(100, 400)} | {
        JobId(name): Holding(100, 400, waits=True) for name in ("first", "second")
    }
    there, newcomer = DecodeLoad(600, 0, 0, 0.01, streams), Holding(100, 400)
    assert wait_s(there, newcomer) == pytest.approx(12.0)
    assert wait_s(there, newcomer, [Holding(100, 400, waits=True)]) == pytest.approx(16.0)


def test_what_was_told_some_time_ago_has_gone_on_meanwhile():
    asked, newcomer = load([Holding(900, 100)]), Holding(100, 10)
    assert wait_s(asked, newcomer) == pytest.approx(10.0)
    assert wait_s(asked, newcomer, age_s=4.0) == pytest.approx(6.0)
    assert wait_s(asked, newcomer, age_s=11.0) == 0.0


def test_nothing_is_predicted_for_later_than_a_minute():
    streams = {JobId(str(number)): Holding(100, 400, waits=number > 0) for number in range(50)}
    assert wait_s(DecodeLoad(600, 0, 0, 0.01, streams), Holding(100, 400)) == FAR_S


def in_turn_s(load, newcomer, sent, prefix_tokens, age_s):
    """The wait for one newcomer, by going through the ends of all streams for it alone."""
    lower = sum(one.tokens for one in load.streams.values() if one.rank < newcomer.rank and not one.waits)
    limit = USABLE * load.pool_tokens - load.reserve_tokens
    limit += max(0, load.shared_tokens + prefix_tokens - lower)
    held = [one for one in (*load.streams.values(), *sent) if one.rank >= newcomer.rank]
    if all(one.remaining == 0 for one in held) or predicted_peak([*held, newcomer]) <= limit:
        return 0.0
    running = [one for one in held if not one.waits]
    waiting, steps = [*[one for one in held if one.waits], newcomer], 0
    while steps * load.step_s < FAR_S:
        while waiting and (not running or predicted_peak([*running, waiting[0]]) <= limit):
            running.append(waiting.pop(0))
        if not waiting:
            return max(0.0, steps * load.step_s - age_s)
        ends = max(1, min(one.remaining for one in running))
        running = [one._replace(tokens=one.tokens + ends, remaining=one.remaining - ends) for one in running]
        running = [one for one in running if one.remaining > 0]
        steps += ends
    return FAR_S


@given(
    st.lists(ANY, max_size=12),
    st.lists(st.tuples(SENT, st.booleans(), NEWCOMER, st.sampled_from([0, 100])), max_size=8),
    st.integers(100, 2000),
    st.sampled_from([0.1, 1.0]),
)
def test_one_that_was_asked_before_says_what_one_asked_for_the_first_time_does(streams, then, pool, step_s):
    asked = load(streams, pool, shared_tokens=50, reserve_tokens=20, step_s=step_s)
    sent = []
    outlooks = [Outlook(asked, rank, sent) for rank in (0, 1, 2)]
    for one, leaves, newcomer, shared in then:
        if leaves and sent:
            del sent[0]
            for outlook in outlooks:
                outlook.left()
        else:
            sent.append(one)
            for outlook in outlooks:
                outlook.joined(one)
        found_s = outlooks[newcomer.rank].wait_s(newcomer, is_top=False, age_s=0.3, prefix_tokens=shared)
        assert found_s == in_turn_s(asked, newcomer, sent, shared, 0.3)


def test_the_ends_of_the_streams_are_gone_through_once_however_many_ask(monkeypatch):
    steps, after = [], RunningStreams.after
    monkeypatch.setattr(RunningStreams, "after", lambda *args: steps.append(1) or after(*args))
    streams = [Holding(2500, 1000 + number, 1) for number in range(200)]
    sent = [Holding(1500, 256, 1, True) for _ in range(100)]
    outlook = Outlook(load(streams, 700_000, step_s=0.03), 1, sent)
    first_s = outlook.wait_s(Holding(500, 256, 1), is_top=False)
    assert 0 < first_s < FAR_S
    once = len(steps)
    for number in range(100):
        assert 0 < outlook.wait_s(Holding(400 + number, 256, 1), is_top=False) <= first_s
    assert len(steps) == once
    sent.append(Holding(500, 256, 1, True))
    outlook.joined(sent[-1])
    outlook.wait_s(Holding(500, 256, 1), is_top=False)
    assert len(steps) - once <= 3, "from where the newest was let in"
