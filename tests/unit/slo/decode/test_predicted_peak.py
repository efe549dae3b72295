"""The predicted peak is the one that a simulation of the streams, token by token, comes to."""

from hypothesis import given
from hypothesis import strategies as st

from slo.decode.predicted_peak import USABLE, Holding, Pool, predicted_peak, shared_from

HOLDING = st.builds(Holding, st.integers(0, 500), st.integers(0, 60), st.integers(0, 2))
STREAMS = st.lists(HOLDING, max_size=12)


def simulated(streams):
    """At each moment: what those hold that have not ended, or end with this very token."""
    longest = max([stream.remaining for stream in streams], default=0)
    return max(
        [
            sum(stream.tokens + step for stream in streams if stream.remaining >= step)
            for step in range(longest + 1)
        ],
        default=0,
    )


@given(STREAMS)
def test_the_peak_is_that_of_the_simulation(streams):
    assert predicted_peak(streams) == simulated(streams)


@given(STREAMS, HOLDING)
def test_one_more_never_lowers_it(streams, newcomer):
    assert predicted_peak([*streams, newcomer]) >= predicted_peak(streams)


@given(STREAMS, HOLDING, st.integers(1, 5000))
def test_who_is_admitted_fits_until_all_have_ended_that_do_not_yield_to_it(streams, newcomer, tokens):
    free = max(0, tokens - sum(stream.tokens for stream in streams))
    peers = [stream for stream in streams if stream.rank >= newcomer.rank]
    has_room = newcomer.tokens <= free and simulated([*peers, newcomer]) <= USABLE * tokens
    assert Pool(tokens, free).fits(streams, newcomer) == (has_room or not streams)


def test_the_reserve_of_the_tiers_above_counts_now_and_later():
    held = [Holding(500, 100)]
    assert Pool(1000, 500).fits(held, Holding(100, 100))
    assert Pool(1000, 500).fits(held, Holding(100, 0), reserve_tokens=200)
    assert not Pool(1000, 500).fits(held, Holding(100, 100), reserve_tokens=200), "the memory would not last"
    assert not Pool(1000, 250).fits(held, Holding(100, 0), reserve_tokens=200), "what is free is too little"


def test_what_is_shared_counts_once():
    held, newcomer = [Holding(300, 100), Holding(300, 100)], Holding(300, 100)
    assert not Pool(1000, 700).fits(held, newcomer)
    assert Pool(1000, 700, shared_tokens=300).fits(held, newcomer)


def test_what_the_upper_tiers_share_counts_once_beside_a_stream_of_a_lower_one():
    held, newcomer = [Holding(300, 100, 1), Holding(300, 100, 1), Holding(10, 10, 0)], Holding(300, 100, 1)
    pool = Pool(1000, 690, shared_tokens=300)
    assert pool.fits(held, newcomer)
    lower = [*held[:2], Holding(310, 10, 0)]
    assert not pool.fits(lower, newcomer), "it may be the lower one that shares all of it"


@given(STREAMS, HOLDING, st.data())
def test_those_of_a_tier_and_above_use_no_more_than_all_do(streams, newcomer, data):
    streams = [stream._replace(waits=False) for stream in streams]
    held = sum(stream.tokens for stream in streams)
    used = data.draw(st.integers(0, held))
    prefix = data.draw(st.integers(0, min(used, newcomer.tokens)))
    peers = [stream for stream in streams if stream.rank >= newcomer.rank]
    shared = max(0, sum(stream.tokens for stream in peers) + prefix - used)
    assert shared_from(newcomer.rank, streams, held - used + prefix) == shared


def test_what_others_hold_of_a_newcomers_sequence_needs_no_memory():
    held, newcomer = [Holding(800, 0)], Holding(800, 50)
    assert not Pool(1000, 200).fits(held, newcomer), "what is free is too little"
    assert Pool(1000, 200).fits(held, newcomer, prefix_tokens=780)
    assert not Pool(1000, 200).fits(held, newcomer, prefix_tokens=640), "the memory would not last"


def test_whoever_is_alone_is_admitted_whatever_it_takes():
    assert Pool(100, 10).fits([], Holding(90, 5000))


def test_one_that_would_never_fit_starts_at_last_beside_those_who_go_before_it_alone():
    long, above, same = Holding(850, 50, 1), Holding(60, 30, 2), Holding(60, 30, 1)
    pool = Pool(1000, 940)
    assert not pool.fits([above], long, reserve_tokens=40)
    assert pool.fits_at_last([above], long, 100, 32)
    assert not pool.fits_at_last([same], long, 100, 32), "that one ends, and it is alone"
    assert not Pool(1000, 860).fits_at_last([above], long, 100, 32), "there is no room to begin"
    assert not pool.fits_at_last([above], Holding(800, 40, 1), 100, 32), "it will fit some time"
