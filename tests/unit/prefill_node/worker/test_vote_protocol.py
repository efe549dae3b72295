"""The vote as a protocol: real processes, any order of orders, looks, delays and deaths.

The machine plays the governor and the scheduler. It issues steps to N ranks, orders stops at any moment, and
checks after every step what the ranks have done.
"""

import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from voting_ranks import Ballot, DropOut, Outcome, Ranks, Run

from prefill_node.board.board import Board
from prefill_node.board.messages import StopOrder

BOUNDARIES = 6
PATIENT_S = 8.0
"""Limit where nobody fails: no stall of a busy machine reaches it."""
LIMIT_S = 1.0
"""Limit where somebody fails, and is waited for."""
HANGS_S = 15.0

boundaries = st.integers(0, BOUNDARIES - 1)
pauses_s = st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.0001, 0.001, 0.004))
ranks_drawn = st.integers(0, 7)  # taken modulo the ranks there are
of_real_processes = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate],  # how processes interleave cannot be repeated, so there is nothing to shrink
)


@st.composite
def paces(draw):
    """A pause before the look and one before the vote, for each rank and boundary."""
    if draw(st.booleans()):
        return {}
    return draw(
        st.dictionaries(st.tuples(ranks_drawn, boundaries), st.tuples(pauses_s, pauses_s), max_size=12)
    )


class Votes(RuleBasedStateMachine):
    """Steps that all ranks run to their end or to a stop."""

    def __init__(self, processes):
        super().__init__()
        self.processes = processes
        self.board = None
        self.step_id = 0
        self.ordered = 0

    def teardown(self):
        if self.board is not None:
            self.board.close()

    @initialize(ranks=st.integers(1, 8))
    def start(self, ranks):
        self.seat(ranks, PATIENT_S)

    @rule(back=st.integers(0, 3))
    def order_a_step_that_is_over(self, back):
        self.order(max(1, self.step_id - back))

    @rule(ahead=st.integers(1, 3))
    def order_a_step_that_is_to_come(self, ahead):
        self.order(self.step_id + ahead)

    @rule()
    def repeat_the_last_order(self):
        self.order(max(1, self.ordered))

    @rule(pace=paces())
    def run_a_step(self, pace):
        self.begin(pace)
        outcomes = self.finish()
        stop = (True,) if self.ordered == self.step_id else (False,) * BOUNDARIES
        assert outcomes == [Outcome("voted", stop)] * self.ranks

    @rule(pace=paces(), seen=ranks_drawn, boundary=boundaries, pause_s=pauses_s, ahead=st.integers(-2, 1))
    def order_while_a_step_runs(self, pace, seen, boundary, pause_s, ahead):
        before = self.ordered
        self.begin(pace)
        self.wait_until_reached(seen % self.ranks, boundary)
        time.sleep(pause_s)
        self.order(max(1, self.step_id + ahead))
        furthest = max(self.reached())
        outcomes = self.finish()
        assert outcomes == outcomes[:1] * self.ranks
        answers = outcomes[0].answers
        to_its_end = (False,) * BOUNDARIES
        match before == self.step_id, self.ordered == self.step_id:
            case True, True:
                assert answers == (True,)
            case True, False:
                assert answers in ((True,), to_its_end), "an order that is withdrawn counts at once or never"
            case False, False:
                assert answers == to_its_end
            case False, True:
                assert len(answers) > boundary, "stopped before it was ordered"
                assert len(answers) <= furthest + 2, "went on at a boundary that all reached after the order"
                assert answers[-1] or answers == to_its_end

    def seat(self, ranks, timeout_s):
        if self.board is not None:
            self.board.close()
        self.ranks = ranks
        self.board = Board.create(ranks)
        self.processes.join(ranks, self.board, timeout_s)
        self.board.unlink()
        self.ordered = 0

    def order(self, step_id):
        self.ordered = step_id
        self.board.order_stop(
            StopOrder(step_id=step_id, beneficiary="urgent", reason="test", ordered_s=time.monotonic())
        )

    def begin(self, pace, exits=None):
        self.step_id += 1
        paced = {(rank % self.ranks, boundary): both for (rank, boundary), both in pace.items()}
        self.processes.begin(
            *(
                Run(
                    tuple(
                        Ballot(self.step_id, boundary, None, *paced.get((rank, boundary), (0.0, 0.0)))
                        for boundary in range(BOUNDARIES)
                    ),
                    (exits or {}).get(rank),
                )
                for rank in range(self.ranks)
            )
        )

    def finish(self):
        return self.processes.finish(self.ranks, HANGS_S)

    def reached(self):
        """The boundaries of the running step that the ranks have reached, -1 for none."""
        places = map(self.board.progress, range(self.ranks))
        return [boundary if step_id == self.step_id else -1 for step_id, boundary in places]

    def wait_until_reached(self, rank, boundary):
        """Return at once when the rank gets there, or when the step will never get there."""
        until_s = time.monotonic() + HANGS_S
        while self.reached()[rank] < boundary and self.ordered != self.step_id:
            assert time.monotonic() < until_s, "a rank hangs"


class VotesAndDeaths(Votes):
    """The same, and ranks that die or leave their pass; after each death the engine restarts."""

    @rule(
        ranks=st.integers(2, 8),
        victim=ranks_drawn,
        drop_out=st.builds(
            DropOut,
            boundaries,
            st.sampled_from(("before_look", "before_vote", "after_vote")),
            st.sampled_from(("killed", "left")),
        ),
        ordered=st.booleans(),
        pace=paces(),
    )
    def a_rank_drops_out(self, ranks, victim, drop_out, ordered, pace):
        self.seat(ranks, LIMIT_S)
        if ordered:
            self.order(self.step_id + 1)
        self.begin(pace, {victim % ranks: drop_out})
        self.check_survivors(victim % ranks, ordered)

    @rule(ranks=st.integers(2, 8), victim=ranks_drawn, boundary=boundaries, pause_s=pauses_s, pace=paces())
    def a_rank_is_killed_at_any_moment(self, ranks, victim, boundary, pause_s, pace):
        self.seat(ranks, LIMIT_S)
        self.begin(pace)
        self.wait_until_reached(victim % ranks, boundary)
        time.sleep(pause_s)
        self.processes.kill(victim % ranks)
        self.check_survivors(victim % ranks, ordered=False)

    def check_survivors(self, victim, ordered):
        survivors = self.survivors(victim, self.finish())
        if survivors[0].kind == "voted":  # the rank had cast its last vote of this step before it went
            if ordered:
                assert survivors[0].answers == (True,)
            self.begin({}, {victim: DropOut(0, "before_look", "left")})
            survivors = self.survivors(victim, self.finish())
        for survivor in survivors:
            assert survivor.kind == "timeout"
            assert victim in survivor.absent
            assert survivor.where == (self.step_id, len(survivor.answers))
            assert not any(survivor.answers)
        self.seat(self.ranks, PATIENT_S)

    @staticmethod
    def survivors(victim, outcomes):
        survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
        places = {(outcome.kind, outcome.where, outcome.answers) for outcome in survivors}
        assert len(places) == 1, f"ranks part ways: {outcomes}"
        return survivors


@pytest.fixture(scope="module")
def processes():
    with Ranks() as ranks:
        yield ranks


def test_ranks_stop_together_and_only_when_told(processes):
    run_state_machine_as_test(
        lambda: Votes(processes),
        settings=settings(of_real_processes, max_examples=100, stateful_step_count=20),
    )


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_nobody_hangs(processes):
    run_state_machine_as_test(
        lambda: VotesAndDeaths(processes),
        settings=settings(of_real_processes, max_examples=12, stateful_step_count=6),
    )
