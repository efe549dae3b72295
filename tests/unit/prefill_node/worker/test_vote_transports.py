"""What every vote transport must do, run against each of them with real processes."""

import itertools
import random
import time
from pathlib import Path

import pytest
from voting_ranks import Ballot, DropOut, Run

from prefill_node.board.board import Board, BoardUnavailableError
from prefill_node.board.messages import StopOrder
from prefill_node.worker import vote
from prefill_node.worker.vote import BoardVote, SoleVote, choose_transport
from prefill_node.worker.vote_errors import VoteTimeoutError

LIMIT_S = 1.0
MARGIN_S = 2.0
"""A vote across hosts asks for another second who is there; the rest is for a busy machine."""


@pytest.fixture
def seated(processes, board_of, across_hosts):
    """`seated(ranks)` seats so many and returns the board; a second call is a restart."""

    def seat(ranks, timeout_s=20.0):
        board = board_of(ranks)
        processes.join(ranks, board, timeout_s, across_hosts)
        return board

    return seat


@pytest.fixture(
    params=[pytest.param(False, id="board"), pytest.param(True, id="allreduce", marks=pytest.mark.slow)]
)
def across_hosts(request):
    if request.param:
        pytest.importorskip("torch")
    return request.param


@pytest.fixture
def board_of():
    boards = []

    def make(ranks):
        boards.append(Board.create(ranks))
        return boards[-1]

    yield make
    for board in boards:
        board.close()


def order(step_id):
    return StopOrder(step_id=step_id, beneficiary="urgent", reason="test", ordered_s=0.0)


def a_pass(step_id, boundaries=4, drop_out=None):
    return Run(tuple(Ballot(step_id, boundary) for boundary in range(boundaries)), drop_out)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_answer_is_the_or_of_all_wishes(ranks, processes, seated):
    seated(ranks)
    table = list(itertools.product((False, True), repeat=ranks))
    outcomes = processes.run(
        *(
            Run(tuple(Ballot(1, n, wishes[rank]) for n, wishes in enumerate(table)), go_on=True)
            for rank in range(ranks)
        )
    )
    for outcome in outcomes:
        assert outcome.answers == tuple(any(wishes) for wishes in table)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_unequal_speed_get_the_same_answers(ranks, processes, seated):
    seated(ranks)
    rng = random.Random(7)
    rounds = 300  # more than the laps that a vote's word can count
    wishes = [[rng.random() < 0.2 for _ in range(rounds)] for _ in range(ranks)]
    pauses = [[rng.choice((0.0,) * 9 + (0.002,)) for _ in range(rounds)] for _ in range(ranks)]
    outcomes = processes.run(
        *(
            Run(
                tuple(Ballot(1 + n // 50, n % 50, wishes[rank][n], pauses[rank][n]) for n in range(rounds)),
                go_on=True,
            )
            for rank in range(ranks)
        )
    )
    for outcome in outcomes:
        assert outcome.answers == tuple(any(column) for column in zip(*wishes, strict=True))


def test_an_order_stops_its_step_and_no_other(processes, seated):
    board = seated(2)
    board.order_stop(order(3))
    stops = {}
    for step_id in (1, 2, 3, 4, 5):
        outcomes = processes.run(a_pass(step_id), a_pass(step_id))
        assert outcomes[0] == outcomes[1]
        stops[step_id] = outcomes[0].answers
        if step_id == 4:
            board.order_stop(order(3))
    assert stops == {3: (True,), **dict.fromkeys((1, 2, 4, 5), (False,) * 4)}


def test_ranks_that_see_an_order_at_different_times_stop_together(processes, seated):
    board = seated(3)
    early = Run(tuple(Ballot(1, n) for n in range(3)))
    late = Run((Ballot(1, 0, before_look_s=0.3), Ballot(1, 1), Ballot(1, 2)))
    processes.begin(early, early, late)
    while board.progress(0) != (1, 0):
        pass
    board.order_stop(order(1))  # the last one alone may see it at its first look
    outcomes = processes.finish(3)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0].answers == (True,)


@pytest.mark.parametrize("moment", ["before_look", "before_vote", "after_vote"])
def test_a_killed_rank_is_named_by_all_others_in_time(moment, processes, seated):
    seated(3, LIMIT_S)
    outcomes = processes.run(a_pass(7), a_pass(7, drop_out=DropOut(2, moment)), a_pass(7))
    assert outcomes[1].kind == "killed"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.kind == "timeout"
        assert outcome.absent == (1,)
        assert outcome.where == (7, 2 if moment != "after_vote" else 3)
        assert outcome.waited_s < LIMIT_S + MARGIN_S
        assert "rank 1 did not come" in outcome.message
        assert "of step 7" in outcome.message


def test_a_killed_first_rank_is_named(processes, seated):
    seated(3, LIMIT_S)
    outcomes = processes.run(a_pass(1, drop_out=DropOut(1, "before_vote")), a_pass(1), a_pass(1))
    assert [outcome.kind for outcome in outcomes] == ["killed", "timeout", "timeout"]
    assert outcomes[1].absent == outcomes[2].absent == (0,)


def test_all_absent_ranks_are_named(processes, seated):
    seated(4, LIMIT_S)
    gone = DropOut(1, "before_vote")
    outcomes = processes.run(a_pass(1), a_pass(1, drop_out=gone), a_pass(1), a_pass(1, drop_out=gone))
    assert outcomes[0].absent == outcomes[2].absent == (1, 3)


def test_a_rank_that_left_its_pass_makes_nobody_hang(processes, seated):
    seated(2, LIMIT_S)
    outcomes = processes.run(a_pass(1), a_pass(1, drop_out=DropOut(1, "before_vote", "left")))
    assert [outcome.kind for outcome in outcomes] == ["timeout", "left"]
    assert outcomes[0].absent == (1,)
    assert outcomes[0].where == (1, 1)


def test_a_rank_whose_vote_failed_can_end_while_the_absent_one_lives(processes, seated):
    seated(2, LIMIT_S)
    processes.run(a_pass(1), a_pass(1, drop_out=DropOut(1, "before_vote", "left")))
    assert processes.end(0)


def test_a_failed_vote_stays_failed(processes, seated):
    seated(2, LIMIT_S)
    processes.run(a_pass(1), a_pass(1, drop_out=DropOut(0, "before_vote", "left")))
    outcomes = processes.run(a_pass(2), a_pass(2))
    assert outcomes[0].kind == "timeout"
    assert outcomes[0].where == (1, 0)
    assert outcomes[1].kind in ("timeout", "mismatch")


def test_a_rank_that_is_slow_within_the_limit_has_not_failed(processes, seated):
    seated(2, LIMIT_S)
    slow = Run((Ballot(1, 0, True, before_vote_s=LIMIT_S / 3),))
    outcomes = processes.run(Run((Ballot(1, 0, False),)), slow)
    assert [outcome.answers for outcome in outcomes] == [(True,), (True,)]


@pytest.mark.parametrize("elsewhere", [(5, 1), (6, 0)], ids=["boundary", "step"])
@pytest.mark.parametrize("wish", [False, True])
def test_ranks_at_different_places_all_fail(elsewhere, wish, processes, seated):
    seated(3)
    here = Run((Ballot(4, 3, False), Ballot(5, 0, wish)))
    astray = Run((Ballot(4, 3, False), Ballot(*elsewhere, wish)))
    outcomes = processes.run(here, here, astray)
    assert [outcome.kind for outcome in outcomes] == ["mismatch"] * 3
    assert [outcome.answers for outcome in outcomes] == [(False,)] * 3
    assert [outcome.where for outcome in outcomes] == [(5, 0), (5, 0), elsewhere]
    assert [outcome.met for outcome in outcomes] == [elsewhere, elsewhere, (5, 0)]


def test_a_restart_with_a_new_board_forgets_the_failure(processes, seated):
    seated(2, LIMIT_S)
    processes.run(a_pass(1), a_pass(1, drop_out=DropOut(1, "before_vote")))
    board = seated(2)
    board.order_stop(order(2))
    assert [outcome.answers for outcome in processes.run(a_pass(2), a_pass(2))] == [(True,), (True,)]


def test_a_store_that_no_longer_answers_keeps_nobody():
    pytest.importorskip("torch")
    from prefill_node.worker.allreduce_vote import AllReduceVote

    class GroupOfALostHost:
        def allreduce(self, *_):
            raise RuntimeError("Connection closed by peer")

        def get_group_store(self):
            return self

        def set(self, *_):
            time.sleep(60.0)
            raise RuntimeError("Connection timed out")

    began_s = time.monotonic()
    with pytest.raises(VoteTimeoutError, match="rank 0 did not come") as failure:
        AllReduceVote(GroupOfALostHost(), rank=1, ranks=2, timeout_s=0.1).vote(3, 4, False)
    assert (failure.value.step_id, failure.value.boundary, failure.value.absent) == (3, 4, (0,))
    assert time.monotonic() - began_s < 0.1 + 2 + MARGIN_S


class FrozenClock:
    """Stands in for the module `time`; its sleeps do what they are given, and later ones last 0.1 s."""

    def __init__(self, *sleeps):
        self.now_s = 1000.0
        self._sleeps = [*sleeps]

    def monotonic(self):
        return self.now_s

    def sleep(self, _):
        self.now_s += self._sleeps.pop(0)() if self._sleeps else 0.1


def test_the_time_in_which_a_rank_was_itself_frozen_is_no_limit_for_the_others(board_of, monkeypatch):
    board = board_of(2)
    first, second = (BoardVote(board, rank, 20.0) for rank in range(2))
    clock = FrozenClock(lambda: 40.0, lambda: 0.1 * second.vote(1, 0, True))
    monkeypatch.setattr(vote, "time", clock)
    assert first.vote(1, 0, False)


def test_who_does_not_come_has_the_limit_from_when_the_others_are_awake(board_of, monkeypatch):
    clock = FrozenClock(lambda: 40.0)
    monkeypatch.setattr(vote, "time", clock)
    with pytest.raises(VoteTimeoutError, match=r"rank 1 did not come within 20\.0 s"):
        BoardVote(board_of(2), 0, 20.0).vote(1, 0, False)
    assert clock.now_s == pytest.approx(1000.0 + 40.0 + 19.0, abs=0.2), "what it did not see counts as 1 s"


def test_a_rank_cannot_take_its_seat_on_a_board_twice(board_of):
    board = board_of(1)
    BoardVote(board, 0, LIMIT_S).vote(1, 0, False)
    with pytest.raises(BoardUnavailableError, match="rank 0 has voted on it in an earlier life"):
        BoardVote(board, 0, LIMIT_S)


@pytest.mark.parametrize("place", [(1 << 40, 0), (1, 1 << 16), (-1, 0), (1, -1)])
def test_a_place_that_does_not_fit_is_refused(place, board_of):
    with pytest.raises(ValueError, match="does not fit into a vote"):
        BoardVote(board_of(1), 0, LIMIT_S).vote(*place, False)


def test_the_largest_places_fit(board_of):
    vote = BoardVote(board_of(1), 0, LIMIT_S)
    assert [vote.vote((1 << 40) - 1, (1 << 16) - 1, wish) for wish in (True, False)] == [True, False]


def test_the_transport_follows_from_where_the_ranks_are(board_of):
    def chosen(ranks, **where):
        return choose_transport(0, ranks, LIMIT_S, board=board_of(ranks), group=None, **where)

    assert isinstance(chosen(1, same_host=True), SoleVote)
    assert isinstance(chosen(1, same_host=False), SoleVote)
    assert isinstance(chosen(2, same_host=True), BoardVote)
    assert [SoleVote().vote(1, 0, wish) for wish in (True, False)] == [True, False]


def test_the_votes_of_one_host_load_no_torch():
    import subprocess
    import sys

    code = "import sys, prefill_node.worker.vote; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[4])
