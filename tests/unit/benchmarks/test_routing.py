"""Placement policies are held against what no policy can do better."""

from dataclasses import replace

from benchmarks.cores.placement.routing import PRESET, Asked, _bound, _run
from simulator.study.presets import PRESETS
from simulator.workload.arrivals import Kind, Mix
from slo.tiers import PREMIUM

SHORT = Mix({"text": Kind(1.0, 0, 1.0, PREMIUM, range_tokens=(32, 96), is_uniform=True)})


def test_no_policy_does_better_than_the_bound_where_prompts_share_passes():
    asked = Asked(replace(PRESETS[PRESET], workload=SHORT), 2000, 1)
    served = _run(asked, "round_robin", 2.0)
    assert served.attainment <= _bound(asked, 2.0).attainment
