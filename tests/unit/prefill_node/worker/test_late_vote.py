"""Votes between hosts that answer one boundary late, with real processes."""

import time

import pytest
from voting_ranks import Ballot, DropOut, Run

from prefill_node.board.board import Board

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
LIMIT_S = 1.0


@pytest.fixture
def seated(processes):
    boards = []

    def seat(ranks, timeout_s=20.0):
        boards.append(Board.create(ranks))
        processes.join(ranks, boards[-1], timeout_s, across_hosts=True, is_late=True)

    yield seat
    for board in boards:
        board.close()


def a_pass(step_id, wish_at=None, boundaries=4, **about):
    return Run(tuple(Ballot(step_id, n, wish=n == wish_at) for n in range(boundaries)), **about)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_stop_one_boundary_after_the_wish_of_any(ranks, processes, seated):
    seated(ranks)
    outcomes = processes.run(*[a_pass(1, wish_at=1 if rank == 0 else None) for rank in range(ranks)])
    assert [outcome.answers for outcome in outcomes] == [(False, False, True)] * ranks


def test_a_wish_at_the_end_of_a_step_stops_no_other_step(processes, seated):
    seated(2)
    assert processes.run(a_pass(1, wish_at=3), a_pass(1))[1].answers == (False,) * 4
    assert [each.answers for each in processes.run(a_pass(2), a_pass(2))] == [(False,) * 4] * 2
    assert processes.run(a_pass(3), a_pass(3, wish_at=0))[0].answers == (False, True)


def test_after_a_stop_the_next_step_votes_as_any_other(processes, seated):
    seated(2)
    processes.run(a_pass(1, wish_at=0), a_pass(1))
    assert [each.answers for each in processes.run(a_pass(2), a_pass(2, wish_at=2))] == [
        (False,) * 3 + (True,)
    ] * 2


def test_a_rank_does_not_wait_for_one_that_is_slower_by_less_than_a_boundary(processes, seated):
    """A vote that is answered at once holds every rank until the last one is there."""
    seated(2)
    slow = Run(tuple(Ballot(1, n, wish=False, before_vote_s=0.3) for n in range(1)))
    fast = Run((Ballot(1, 0, wish=False),))
    processes.begin(fast, slow)
    began_s = time.monotonic()
    assert processes.reply(0).answers == (False,)
    assert time.monotonic() - began_s < 0.25
    assert processes.reply(1).answers == (False,)


def test_a_rank_that_is_gone_is_named(processes, seated):
    seated(2, LIMIT_S)
    outcomes = processes.run(a_pass(7), a_pass(7, drop_out=DropOut(2, "before_vote")))
    assert outcomes[1].kind == "killed"
    assert (outcomes[0].kind, outcomes[0].absent) == ("timeout", (1,))
    assert outcomes[0].where in ((7, 1), (7, 2)), "its last vote may have been on its way when it died"


def test_ranks_at_different_places_fail_one_boundary_later(processes, seated):
    seated(2)
    here = Run((Ballot(4, 3, False), Ballot(5, 0, False), Ballot(5, 1, False)))
    astray = Run((Ballot(4, 3, False), Ballot(6, 0, False), Ballot(6, 1, False)))
    outcomes = processes.run(here, astray)
    assert [outcome.kind for outcome in outcomes] == ["mismatch"] * 2
    assert [outcome.where for outcome in outcomes] == [(5, 0), (6, 0)]
    assert [outcome.answers for outcome in outcomes] == [(False, False)] * 2
