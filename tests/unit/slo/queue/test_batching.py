"""Prefills share a step while that makes nobody late."""

from hypothesis import given
from hypothesis import strategies as st

from slo.predict.prefill_time import PrefillPredictor
from slo.queue.batching import Candidate, Step, StepLimit, compose_step
from slo.queue.slack import NO_DEADLINE

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)


def test_an_urgent_prefill_is_not_held_up_by_a_long_one():
    candidates = [Candidate(64, deadline_s=0.2), Candidate(3000, NO_DEADLINE)]
    assert compose_step(candidates, 0.0, LINE, 8192) == Step(1, StepLimit.SLACK)


def test_small_ones_share_a_step_while_everybody_stays_on_time():
    candidates = [Candidate(64, 0.21), Candidate(64, 0.21), Candidate(64, 0.25), Candidate(64, 0.3)]
    assert compose_step(candidates, 0.0, LINE, 8192) == Step(3, StepLimit.SLACK)


def test_without_deadlines_the_token_budget_is_the_limit():
    candidates = [Candidate(3000, NO_DEADLINE)] * 4
    assert compose_step(candidates, 0.0, LINE, 8192) == Step(2, StepLimit.TOKEN_BUDGET)


def test_an_infeasible_one_constrains_nobody():
    candidates = [Candidate(1000, deadline_s=0.5), Candidate(1000, NO_DEADLINE)]
    assert compose_step(candidates, 0.0, LINE, 8192) == Step(2, StepLimit.QUEUE_EMPTY)


def test_nothing_waits():
    assert compose_step([], 0.0, LINE, 8192) == Step(0, StepLimit.QUEUE_EMPTY)


@given(
    st.lists(
        st.builds(Candidate, st.integers(1, 5000), st.one_of(st.just(NO_DEADLINE), st.floats(0, 20))),
        min_size=1,
        max_size=12,
    )
)
def test_nobody_on_time_is_made_late_by_the_company(candidates):
    step = compose_step(candidates, 0.0, LINE, 8192)
    assert 1 <= step.size <= len(candidates)
    end_s = LINE.prefill_s(sum(c.tokens for c in candidates[: step.size]))
    for members in range(1, step.size):
        joined_s = LINE.prefill_s(sum(c.tokens for c in candidates[:members]))
        deadline_s = candidates[members - 1].deadline_s
        assert not joined_s <= deadline_s < end_s
