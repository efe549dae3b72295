"""A prefix is held while a request that begins with it lives, and no longer."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.held_prefixes import HeldPrefixes
from slo.request import JobId, ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")
ONE, TWO, THREE = (JobId(name) for name in ("one", "two", "three"))


def test_a_prefix_is_held_as_long_as_a_request_that_begins_with_it_lives():
    held = HeldPrefixes()
    held.placed(A, ONE, (1, 2, 3), 100)
    held.placed(A, TWO, (1, 2, 4), 100)
    held.placed(B, THREE, (1,), 100)
    assert held.held_blocks((1, 2, 3, 5)) == {A: 3, B: 1}
    assert held.tokens_of(A) == 400
    held.ended(ONE)
    assert held.held_blocks((1, 2, 3, 5)) == {A: 2, B: 1}
    held.ended(TWO)
    held.ended(TWO)
    assert held.held_blocks((1, 2, 3, 5)) == {B: 1}
    assert held.tokens_of(A) == 0


def test_one_that_is_prefilled_once_more_keeps_what_it_holds_and_one_that_goes_elsewhere_does_not():
    held = HeldPrefixes()
    held.placed(A, ONE, (1, 2), 100)
    held.placed(A, ONE, (), 0)
    assert held.held_blocks((1, 2)) == {A: 2}
    held.placed(B, ONE, (), 0)
    assert held.held_blocks((1, 2)) == {}
    assert len(held) == 0


def test_no_more_is_held_than_the_memory_has_room_for_and_the_oldest_is_forgotten():
    held = HeldPrefixes()
    held.resize(A, 500)
    held.placed(A, ONE, (1, 2, 3), 100)
    held.placed(A, TWO, (1, 4, 5), 100)
    assert held.held_blocks((1, 2)) == {A: 2}
    held.placed(A, THREE, (1, 6), 100)
    assert held.held_blocks((1, 2)) == {A: 1}
    assert held.held_blocks((1, 4, 5)) == {A: 3}
    held.resize(A, 0)
    assert len(held) == 0


def test_a_replica_that_is_gone_holds_nothing():
    held = HeldPrefixes()
    held.placed(A, ONE, (1, 2), 100)
    held.forget(A)
    held.forget(B)
    held.ended(ONE)
    assert held.held_blocks((1, 2)) == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.integers(0, 5),
            st.sampled_from(["placed", "ended", "forgotten"]),
            st.integers(0, 4),
            st.sampled_from([100.0, 90.5]),
        ),
        max_size=40,
    )
)
def test_whatever_comes_and_goes_nothing_is_left_and_nothing_held_twice(events):
    held, alive = HeldPrefixes(), {}
    for replica, number, what, length, block_tokens in events:
        job = JobId(str(number))
        if what == "placed":
            held.placed(replica, job, tuple(range(length)), block_tokens)
            where, size = alive.get(job, (None, 0))
            if where != replica or size == 0:
                alive[job] = (replica, length)
        elif what == "ended":
            held.ended(job)
            alive.pop(job, None)
        else:
            held.forget(replica)
            alive = {name: one for name, one in alive.items() if one[0] != replica}
        for one in (A, B):
            longest = max([size for where, size in alive.values() if where == one], default=0)
            assert held.held_blocks(tuple(range(5))).get(one, 0) == longest
            assert 90.5 * longest <= held.tokens_of(one) + 1e-6
            assert held.tokens_of(one) <= 100 * longest + 1e-6
    for number in range(6):
        held.ended(JobId(str(number)))
    assert len(held) == 0
    assert held.tokens_of(A) == held.tokens_of(B) == 0
