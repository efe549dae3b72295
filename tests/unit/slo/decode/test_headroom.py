"""Who fits onto a decode replica, and when: as a simulation of its streams says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.decode.headroom import FAR_S, LEAST_STEP_S, DecodeLoad
from slo.decode.output_length import FIRST_GUESS
from slo.decode.predicted_peak import USABLE, Holding, predicted_peak
from slo.request import JobId
from slo.tiers import BACKGROUND, STANDARD

NEWCOMER = st.builds(
    Holding,
    st.integers(1, 300),
    st.integers(0, 60),
    st.integers(0, 2),
    waits=st.just(value=False),
    lasts=st.none(),
)
STREAMS = st.lists(NEWCOMER, max_size=10)


def load(streams, pool=1000, **about):
    named = {JobId(f"{number}"): stream for number, stream in enumerate(streams)}
    about = {"shared_tokens": 0, "reserve_tokens": 0, "step_s": 0.1, **about}
    return DecodeLoad(pool, streams=named, **about)


@given(STREAMS, STREAMS, NEWCOMER, st.integers(100, 3000))
def test_it_fits_when_the_peak_of_all_that_do_not_yield_to_it_does(streams, sent, newcomer, pool):
    fits = load(streams, pool).fits(newcomer, sent, is_top=False)
    peers = [one for one in (*streams, *sent) if one.rank >= newcomer.rank]
    assert fits == (not peers or predicted_peak([*peers, newcomer]) <= USABLE * pool)


@given(STREAMS, NEWCOMER)
def test_one_more_raises_the_peak_by_no_more_than_it_takes(streams, newcomer):
    assert predicted_peak([*streams, newcomer]) <= predicted_peak(streams) + sum(newcomer[:2])


@given(STREAMS, NEWCOMER, st.integers(100, 3000))
def test_after_the_wait_it_fits_beside_those_that_are_left(streams, newcomer, pool):
    asked, peers = load(streams, pool), [one for one in streams if one.rank >= newcomer.rank]
    wait_s = asked.wait_s(newcomer, [], is_top=False)
    assert (wait_s == 0.0) == (
        asked.fits(newcomer, [], is_top=False) or all(stream.remaining == 0 for stream in peers)
    )
    steps = round(wait_s / 0.1)
    later = [Holding(stream.tokens + steps, stream.remaining - steps, stream.rank) for stream in streams]
    left = [stream for stream in later if stream.remaining > 0]
    if wait_s:
        assert load(left, pool).fits(newcomer, [], is_top=False)


def test_who_fits_now_does_not_wait_although_the_streams_will_have_grown():
    asked, newcomer = load([Holding(1, 4), Holding(1, 8), Holding(1, 8)], pool=100), Holding(74, 4)
    assert asked.fits(newcomer, [], is_top=False)
    assert asked.wait_s(newcomer, [], is_top=False) == 0.0


def test_what_is_kept_for_the_top_tier_keeps_others_out():
    asked = load([Holding(500, 100)], reserve_tokens=200)
    newcomer = Holding(100, 100)
    assert not asked.fits(newcomer, [], is_top=False)
    assert asked.fits(newcomer, [], is_top=True)


def test_what_is_shared_counts_once_and_only_for_those_who_may_share_it():
    newcomer, tops = Holding(300, 100, 2), [Holding(300, 100, 2), Holding(300, 100, 2)]
    assert load([*tops, Holding(10, 10)], shared_tokens=300).fits(newcomer, [], is_top=True)
    lower = [Holding(300, 10), Holding(300, 10)]
    assert not load([*tops, *lower], shared_tokens=300).fits(newcomer, [], is_top=True), "of lower ones"
    waits = Holding(300, 10, waits=True)
    assert load([*tops, waits], shared_tokens=300).fits(newcomer, [], is_top=True), "it holds nothing"


def test_a_newcomer_has_what_answers_of_its_tier_have():
    asked = load([], answers={STANDARD: 70})
    assert asked.newcomer(STANDARD, 1, 100, 1, 0) == Holding(100, 70, 1, lasts=70)
    assert asked.newcomer(STANDARD, 1, 100, 3, 0) == Holding(100, 210, 1, lasts=210)
    assert asked.newcomer(STANDARD, 1, 100, 1, 20) == Holding(100, 20, 1, lasts=20)
    assert asked.newcomer(BACKGROUND, 0, 100, 1, 0) == Holding(100, FIRST_GUESS, lasts=FIRST_GUESS)


def test_memory_is_corrected_and_ends_are_not():
    asked = load([], answers={STANDARD: 70}, factor=0.5)
    assert asked.newcomer(STANDARD, 1, 100, 1, 0) == Holding(100, 35, 1, lasts=70)
    assert asked.newcomer(STANDARD, 1, 100, 1, 20) == Holding(100, 20, 1, lasts=20)


def test_a_wait_goes_by_when_streams_end_and_not_by_what_memory_is_reckoned_with():
    stream = Holding(900, 50, lasts=100)
    assert load([stream]).wait_s(Holding(100, 10), [], is_top=False) == pytest.approx(10.0)
    assert stream.after(40) == Holding(940, 50, lasts=60), "nobody will see its end come"
    assert Holding(900, 100, lasts=100).after(40) == Holding(940, 60, lasts=60), "it may have no more"
    growing = Holding(900, 10, lasts=100)
    assert load([growing]).wait_s(Holding(30, 10), [], is_top=False) == pytest.approx(0.0)


def test_a_wait_is_never_nothing_while_steps_are_not_known():
    asked = load([Holding(900, 50)], step_s=0.0)
    assert asked.wait_s(Holding(100, 10), [], is_top=False) == 50 * LEAST_STEP_S


def test_those_that_wait_for_memory_go_first_and_do_not_end_meanwhile():
    """Three answers of 400 tokens, each of which fills the memory: the last waits for both before it."""
    streams = {JobId("runs"): Holding(100, 400)} | {
        JobId(name): Holding(100, 400, waits=True) for name in ("first", "second")
    }
    load = DecodeLoad(600, 0, 0, 0.01, streams)
    assert load.wait_s(Holding(100, 400), [], is_top=False) == pytest.approx(12.0)
    assert load.wait_s(Holding(100, 400), [Holding(100, 400, waits=True)], is_top=False) == pytest.approx(
        16.0
    )


def test_what_was_told_some_time_ago_has_gone_on_meanwhile():
    asked, newcomer = load([Holding(900, 100)]), Holding(100, 10)
    assert asked.wait_s(newcomer, [], is_top=False) == pytest.approx(10.0)
    assert asked.wait_s(newcomer, [], is_top=False, age_s=4.0) == pytest.approx(6.0)
    assert asked.wait_s(newcomer, [], is_top=False, age_s=11.0) == 0.0


def test_nothing_is_predicted_for_later_than_a_minute():
    streams = {JobId(str(number)): Holding(100, 400, waits=number > 0) for number in range(50)}
    assert DecodeLoad(600, 0, 0, 0.01, streams).wait_s(Holding(100, 400), [], is_top=False) == FAR_S
