"""Who is kept on time when not everybody can be, with and without an eye to what will arrive."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queued_prefills import DUE, best_weight, is_feasible, job, names, queues

from slo.predict.prefill_time import PrefillPredictor
from slo.queue.arrival_forecast import Forecast
from slo.queue.feasible_set import PREEMPTED_FACTOR, feasible_set, value
from slo.queue.prefill import Prefill, together_s
from slo.request import JobId

SOME_STOPPED = (0, 0, 1)


def expecting(load, weight=4.0, work_s=0.1):
    """What is expected after short prefills of so much work per second."""
    forecast = Forecast()
    for n in range(3000):
        forecast.arrived(work_s, weight, n * work_s / load)
    return forecast.at(3000 * work_s / load)


CALM, CROWDED = expecting(0.85), expecting(1.5)
FORECASTS = st.sampled_from([None, CALM, expecting(1.0), CROWDED, expecting(3.0, weight=1.0, work_s=1.0)])


def test_everybody_is_kept_where_everybody_can_be():
    queue = [job("c", 9.0, 3.0), job("a", 3.0, 2.0), job("b", 6.0, 3.0)]
    assert names(feasible_set(queue, 0.0).feasible) == ["a", "b", "c"]


def test_late_ones_and_those_without_a_deadline_are_left_out():
    found = feasible_set([job("infeasible", 0.5), job("undated"), job("met", 2.0)], 0.0)
    assert (names(found.feasible), found.tardy, names(found.rest)) == (["met"], [], ["infeasible", "undated"])


def test_what_was_stopped_has_more_value():
    assert value(job("stopped", weight=3.0, preemptions=2)) == 3.0 * PREEMPTED_FACTOR
    assert value(job("fresh", weight=3.0)) == 3.0


def test_the_least_dense_is_tardy_first_when_more_is_expected_than_can_be_done():
    """All three fit, if nothing as dense as `dense` arrives."""
    queue = [job("sparse", 3.0, 1.5), job("middle", 2.9, 0.7, weight=2.0), job("dense", 2.8, 0.1, weight=4.0)]
    assert names(feasible_set(queue, 0.0).feasible) == ["dense", "middle", "sparse"]
    assert names(feasible_set(queue, 0.0, CALM).feasible) == ["dense", "middle", "sparse"]
    assert names(feasible_set(queue, 0.0, expecting(1.1)).feasible) == ["dense", "middle"]
    assert names(feasible_set(queue, 0.0, expecting(1.9)).feasible) == ["dense"]


def test_the_densest_is_kept_however_much_is_expected():
    queue = [job("dense", 1.0, 0.01, weight=4.0)]
    assert names(feasible_set(queue, 0.0, expecting(50.0)).feasible) == ["dense"]


def test_of_the_nearest_time_nothing_is_kept_free():
    """Four mean works of 0.1 s are near."""
    assert names(feasible_set([job("near", 0.39, 0.39)], 0.0, CROWDED).feasible) == ["near"]
    assert names(feasible_set([job("near", 0.5, 0.5)], 0.0, CROWDED).tardy) == ["near"]


def test_who_has_the_time_is_kept_although_much_is_expected():
    assert names(feasible_set([job("far", 60.0, 2.0)], 0.0, CROWDED).feasible) == ["far"]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@given(prefills=queues(stopped=SOME_STOPPED))
def test_a_forecast_of_what_can_be_done_changes_nothing(load, prefills):
    assert feasible_set(prefills, 0.0, expecting(load)) == feasible_set(prefills, 0.0)


@settings(max_examples=300)
@given(queues(stopped=SOME_STOPPED), st.floats(0, 10), FORECASTS)
def test_all_that_are_kept_end_in_time_and_nobody_is_dropped_or_repeated(prefills, start_s, forecast):
    kept, tardy, rest = feasible_set(prefills, start_s, forecast)
    assert is_feasible(kept, start_s)
    assert [p.deadline_s for p in kept] == sorted(p.deadline_s for p in kept)
    assert all(is_feasible([prefill], start_s) for prefill in tardy)
    assert sorted(names(kept + tardy + rest)) == sorted(names(prefills))


@settings(max_examples=300)
@given(queues(due=DUE, stopped=SOME_STOPPED), st.floats(0, 10), FORECASTS)
def test_the_time_that_is_to_be_kept_free_is_kept_free(prefills, start_s, forecast):
    """Until the deadline of each that is kept, but soon, no more is done than its own density allows."""
    end_s = 0.0
    for prefill in feasible_set(prefills, start_s, forecast).feasible:
        end_s += prefill.remaining_s
        reserved = (
            0.0 if forecast is None else forecast.reserved_for([value(prefill) / prefill.remaining_s])[0]
        )
        if reserved > 0.0:
            due_s = prefill.deadline_s - start_s
            assert end_s <= due_s - reserved * max(0.0, due_s - forecast.near_s) + 1e-9


@settings(max_examples=200)
@given(queues(weights=(1.0,), due=DUE), st.integers(0, 10).map(float))
def test_with_equal_weights_and_no_forecast_as_many_are_kept_as_can_be(prefills, start_s):
    assert len(feasible_set(prefills, start_s).feasible) == best_weight(prefills, start_s)


GPU = PrefillPredictor(per_token_s=24e-6, fixed_s=0.0, per_pair_s=0.9e-9, floor_s=0.043)
"""Eager passes of an 8B on an H100: short ones all take what the host needs to launch them."""


def on_gpu(name, tokens, due_s):
    alone_s, idle_s = GPU.prefill_s(tokens), GPU.idle_s(tokens)
    return Prefill(JobId(name), 1.0, due_s, alone_s, 0.0, idle_s=idle_s)


def test_short_prompts_that_share_a_pass_are_charged_for_one():
    short = [on_gpu(f"short-{n}", 64, 0.14) for n in range(20)]
    kept, tardy, rest = feasible_set([*short, on_gpu("long", 4096, 0.4)], 0.0)
    assert (len(kept), tardy, rest) == (21, [], [])
    assert together_s(short) == pytest.approx(0.043 + 19 * 64 * 24e-6, rel=0.02)


def test_nobody_is_kept_who_could_not_be_in_time_even_in_a_pass_of_others():
    late, rest = on_gpu("late", 64, 0.09), on_gpu("never", 64, 0.04)
    before = [on_gpu(f"before-{n}", 2048, 0.08) for n in range(3)]
    kept, tardy, never = feasible_set([late, rest, *before], 0.0)
    assert (names(never), len(kept), len(tardy)) == (["never"], 1, 3)


@given(st.lists(st.tuples(st.sampled_from([32, 256, 1024, 4096]), st.floats(0.05, 2.0)), max_size=12))
def test_those_kept_end_in_time_where_the_short_ones_share_passes(prompts):
    jobs = [on_gpu(str(n), tokens, due_s) for n, (tokens, due_s) in enumerate(prompts)]
    kept = feasible_set(jobs, 0.0).feasible
    for position in range(len(kept)):
        assert together_s(kept[: position + 1]) <= kept[position].deadline_s + 1e-9


def test_what_has_started_is_charged_in_full():
    line = Prefill(JobId("a"), 1.0, 1.0, 0.5, 0.0)
    assert (line.work_s, together_s([line, line])) == (0.5, 1.0)
