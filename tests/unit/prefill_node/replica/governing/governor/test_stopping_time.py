"""How soon a step stops, by what of its pass is attention."""

import math

import msgspec
import pytest
from governors import CURVE, LONG, curved, view
from published import running

from prefill_node.board.messages import Reached
from prefill_node.replica.governing.governor import ForwardProfile
from slo.predict.pass_shape import PassShape
from slo.predict.prefill_time import attention_pairs

ATTENTION_LAST = PassShape.of([3, 1, 0], [0, 0, 1])
"""One boundary before what grows with the tokens, one in it, one before attention."""


def stopping_in_s(context, *, tokens=1000, ahead_s=0.0):
    """The longest that a stop of a step behind a context may take."""
    asked = curved(LONG)
    asked.profile = ForwardProfile(ATTENTION_LAST, (), ahead_s)
    step = msgspec.structs.replace(running("long", tokens=tokens), pairs=attention_pairs(tokens, context))
    longest_s = asked.profile.stop_s(step.tokens, step.pairs, asked.ledger.predictor)
    told_s = asked.preemptible_in_s(view(step), Reached(7, 0), 0.0)
    assert ahead_s < told_s < longest_s, "the router is told the mean"
    return longest_s


def test_a_step_behind_a_long_context_stops_after_its_attention():
    """With attention as for a prompt of 4,096 tokens it would promise the same whatever the context is."""
    of_tokens_s = 0.75 * (CURVE.fixed_s + 1000 * CURVE.per_token_s)
    assert stopping_in_s(0) == pytest.approx(of_tokens_s)
    assert stopping_in_s(100_000) == pytest.approx(CURVE.per_pair_s * attention_pairs(1000, 100_000))
    assert stopping_in_s(100_000) > 100 * of_tokens_s


def test_what_is_launched_ahead_runs_on():
    assert stopping_in_s(0, ahead_s=0.002) == pytest.approx(stopping_in_s(0) + 0.002)


def test_half_of_the_boundaries_are_little_of_a_pass_that_is_mostly_attention():
    asked = curved(LONG)
    asked.profile = ForwardProfile(ATTENTION_LAST)
    step = msgspec.structs.replace(running("long", tokens=1000), pairs=attention_pairs(1000, 100_000))
    before_attention_s = CURVE.fixed_s + 1000 * CURVE.per_token_s
    whole_s = CURVE.pass_s(1000, step.pairs)
    assert asked.progress(step, Reached(7, 2)) == pytest.approx(before_attention_s / whole_s)
    assert asked.remaining_s(step, Reached(7, 2)) == pytest.approx(whole_s - before_attention_s)


@pytest.mark.parametrize(
    ("shape", "within_s", "expected"),
    [
        (ATTENTION_LAST, 0.010, 0.008),
        (ATTENTION_LAST, 0.001, 0.0),
        (ATTENTION_LAST, math.inf, None),
        (PassShape(()), 0.010, None),
    ],
)
def test_the_scheduler_is_told_how_long_a_stretch_may_be(shape, within_s, expected):
    bound = ForwardProfile(shape, (), 0.002, within_s).bound
    assert (None if bound is None else bound.within_s) == pytest.approx(expected)
