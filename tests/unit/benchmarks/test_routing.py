"""Placement policies are held against what no policy can do better."""

from dataclasses import replace

from benchmarks.cores.placement.routing import LOADS, PRESET, Asked, _bound, _run, bounds, long_run_load
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import Kind, Mix
from slo.tiers import PREMIUM

SHORT = Mix({"text": Kind(1.0, 0, 1.0, PREMIUM, range_tokens=(32, 96), is_uniform=True)})


def test_no_policy_does_better_than_the_bound_where_prompts_share_passes():
    asked = Asked(replace(PRESETS[PRESET], workload=SHORT), 2000, 1)
    served = _run(asked, "round_robin", 2.0)
    assert served.attainment <= _bound(asked, 2.0).attainment


def test_in_the_long_run_no_more_can_be_done_than_in_a_stream_that_ends():
    asked = Asked(PRESETS[PRESET], 500, 1)
    limits = bounds([asked, asked])
    assert [point["load"] for point in limits["points"]] == list(LOADS)
    beyond = [found for found in limits["goodput_load"] if found is not None]
    assert all(found >= load for found, load in zip(beyond, limits["long_run_load"], strict=False))
    assert limits["long_run_load"] == [long_run_load(asked)] * 2
    assert long_run_load(asked) > 1.0
