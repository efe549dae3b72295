"""Placement policies are held against what no policy can do better."""

from dataclasses import replace

from benchmarks.cores.placement.routing import LOADS, PRESET, Asked, _bound, _run, bounds, long_run_load
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import Kind, Mix
from slo.tiers import PREMIUM

SHORT = Mix({"text": Kind(1.0, 0, 0.2, PREMIUM, range_tokens=(32, 96), is_uniform=True)})


def test_no_policy_does_better_than_the_bound_where_prompts_share_passes():
    asked, load = Asked(replace(PRESETS[PRESET], workload=SHORT), 1000, 1), 10.0
    served, bound = _run(asked, "round_robin", load).attainment, _bound(asked, load).attainment
    assert 0.5 < served <= bound < 0.9, "neither all nor a bound that holds for all"


def test_in_the_long_run_no_more_can_be_done_than_in_a_stream_that_ends():
    asked = [Asked(PRESETS[PRESET], 4000, seed) for seed in (1, 2)]
    limits = bounds(asked)
    assert [point["load"] for point in limits["points"]] == list(LOADS)
    assert limits["long_run_load"] == [long_run_load(each) for each in asked]
    assert None not in limits["goodput_load"], "the streams are long enough to fall below the level"
    for found, load in zip(limits["goodput_load"], limits["long_run_load"], strict=True):
        assert 1.0 < load <= found
