"""Who stops: for an order of one's own, with the other ranks, or not at all."""

import pytest
from layered_model import IN_ORDER, Model, assert_same, undisturbed, warmed_up

from prefill_node.worker.vote import SoleVote
from prefill_node.worker.vote_errors import VoteTimeoutError


def test_an_order_for_another_step_stops_nothing():
    for other in (0, 1, 3, 99):
        model = warmed_up()
        model.board.ordered = other
        output, stop = model.run()
        assert model.board.reached[0] == (2, 0), "this is step 2"
        assert stop is None
        assert_same(output, undisturbed()[0])


class Peers:
    """The other ranks, one of which has seen an order for these boundaries."""

    def __init__(self, *stops):
        self.stops = stops
        self.ballots = []

    def vote(self, step_id, boundary, wish):
        self.ballots.append((boundary, wish))
        return wish or boundary in self.stops


def test_it_stops_with_the_others_although_it_has_seen_no_order():
    peers = Peers()
    model = warmed_up(votes=peers)
    peers.stops = (4,)
    _, stop = model.run()
    assert stop.checkpoint.boundary == 4


def test_it_tells_the_others_its_wish_at_every_boundary():
    peers = Peers()
    model = warmed_up(votes=peers)
    peers.ballots.clear()
    model.board.stop_at = [5]
    model.run()
    assert peers.ballots == [*((boundary, False) for boundary in range(5)), (5, True)]


def test_the_first_pass_of_all_does_not_stop_before_it_knows_what_a_layer_returns():
    model = Model()
    model.board.stop_at = [0]
    _, stop = model.run()
    assert stop.checkpoint.boundary == 2
    assert_same(model.run(resume=stop.checkpoint)[0], undisturbed()[0])
    assert model.computed == IN_ORDER


class AbsentPeer:
    def vote(self, step_id, boundary, wish):
        if boundary == 3:
            raise VoteTimeoutError((1,), step_id, boundary, 1.0)
        return wish


def test_a_vote_that_times_out_is_recorded_and_is_no_stop():
    model = Model(votes=AbsentPeer())
    with pytest.raises(VoteTimeoutError, match="rank 1"):
        model.run()
    assert model.board.timed_out == [0]
    assert model.forward.end() is None


def test_a_layer_that_fails_is_no_stop_and_the_next_pass_is_sound():
    model = warmed_up()
    attention = model._attention
    model._attention = lambda *args: (_ for _ in ()).throw(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        model.run()
    model._attention = attention
    output, stop = model.run()
    assert stop is None
    assert_same(output, undisturbed()[0])


def test_ranks_may_come_late_in_the_first_pass_of_a_size_only():
    seen = []

    class Votes(SoleVote):
        def vote(self, step_id, boundary, wish):
            if boundary == 0:
                seen.append(self.is_first_pass)
            return wish

    model = Model(votes=Votes())
    model.run()
    model.run()
    model.run(rows=(("a", 40),))
    model.to_the_end(0, rows=(("a", 300),))
    model.run(rows=(("a", 300),))
    assert seen == [True, False, True, True, True, False], "a stopped pass is not through"
