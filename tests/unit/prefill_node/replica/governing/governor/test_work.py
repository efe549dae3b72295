"""What long and cached prompts take."""

import msgspec
import pytest
from governors import CURVE, ENGINE, LONG, curved, job, view
from published import Account, suspended


def test_a_prefix_that_is_expected_to_be_cached_is_no_work_but_is_looked_at():
    cached = msgspec.structs.replace(job("cached", 1000), cached_tokens=600)
    everything = msgspec.structs.replace(job("everything", 1000), cached_tokens=1000)
    waiting = {it.job_id: it.remaining_s for it in curved(cached, everything, LONG).waiting(view(), 0.0)}
    assert waiting["long"] == pytest.approx(CURVE.prefill_s(1000))
    assert waiting["cached"] == pytest.approx(CURVE.prefill_s(400, 600))
    assert waiting["everything"] == pytest.approx(CURVE.prefill_s(1, 999)), "one token is always computed"


def test_what_is_computed_counts_more_than_what_was_expected_to_be():
    cached = msgspec.structs.replace(job("cached", 1000), cached_tokens=600)
    (waiting,) = curved(ENGINE.knows(cached)).waiting(view(predictor=CURVE, cached=Account(0, 0.0, 200)), 0.0)
    assert waiting.remaining_s == pytest.approx(CURVE.prefill_s(800, 200))


def test_a_corrected_predictor_holds_for_those_who_wait_already():
    asked = curved(LONG)
    asked.waiting(view(), 0.0)
    asked.ledger.predictor = CURVE.times(2.0)
    (waiting,) = asked.waiting(view(), 0.0)
    assert waiting.remaining_s == pytest.approx(2 * CURVE.prefill_s(1000))


def test_the_chunks_behind_a_suspended_one_are_work_too():
    pairs = 400 * (200 + 200)
    chunk = suspended("long", tokens=400, pairs=pairs)
    shown = view(None, chunk, predictor=CURVE, long=Account(1, 0.0, 200))
    (waiting,) = curved(LONG).waiting(shown, 0.0)
    expected_s = 0.5 * CURVE.prefill_s(400, 200) + CURVE.prefill_s(400, 600)
    assert waiting.remaining_s == pytest.approx(expected_s)
