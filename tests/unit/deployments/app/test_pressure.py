"""What decode has for want of memory: its scheduler, whom it may end, memory of the host."""

import pytest

from deployments.config import ConfigError
from deployments.config.settings import parse


@pytest.mark.slow
def test_decode_has_a_scheduler_for_pressure_if_that_is_said_and_vllms_otherwise(options, tiny):
    from decode_node.carrying import PRESSURE_SCHEDULER, SCHEDULER

    engine_kwargs = options({"model": tiny})["decode"][0].engine_kwargs
    assert engine_kwargs["scheduler_cls"] == SCHEDULER
    assert "additional_config" not in engine_kwargs
    values = {"model": tiny, "pressure": {"enabled": True}, "tiers": {"premium": {"weight": 9}}}
    values["decode"] = {"engine_kwargs": {"additional_config": {"other": 1}}}
    engine_kwargs = options(values)["decode"][0].engine_kwargs
    assert engine_kwargs["scheduler_cls"] == PRESSURE_SCHEDULER
    weights = engine_kwargs["additional_config"]["slackserve"]["weights"]
    assert next(iter(weights.items())) == ("premium", 9.0)
    assert engine_kwargs["additional_config"]["other"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pressure", "droppable", "after_s"),
    [
        ({"enabled": True}, {"background"}, 300.0),
        ({"enabled": True, "drop_after_s": 20}, {"background"}, 20.0),
        ({"enabled": True, "drop_after_s": None}, set(), None),
        ({}, set(), None),
    ],
    ids=str,
)
def test_whose_streams_decode_may_end_for_lack_of_memory(options, tiny, pressure, droppable, after_s):
    values = {"model": tiny, "pressure": pressure}
    engine_kwargs = options(values)["decode"][0].engine_kwargs
    setup = engine_kwargs.get("additional_config", {}).get("slackserve", {})
    assert setup.get("drop_after_s") == after_s
    config = parse(values)
    assert config.pressure.droppable(config.tiers.tier_set()) == droppable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "swap_gib", "expected"),
    [("cpu", None, {}), ("cpu", 0.5, 1 << 29), ("cuda", None, None), ("cuda", 0, {}), ("cuda", 2, 2 << 30)],
)
def test_decode_has_host_memory_for_kv_under_pressure(options, tiny, accelerator, swap_gib, expected):
    pressure = {"enabled": True} | ({} if swap_gib is None else {"swap_gib": swap_gib})
    found = options({"model": tiny, "accelerator": accelerator, "pressure": pressure})
    extra = {
        tier: found[tier][0].engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]
        for tier in ("prefill", "decode")
    }
    given = {} if expected == {} else {"slackserve_swap_bytes": expected}
    assert extra["decode"] == extra["prefill"] | given
    assert "slackserve_swap_bytes" not in extra["prefill"]


def test_host_memory_for_kv_that_nothing_would_use_is_refused():
    with pytest.raises(ConfigError, match="pressure: swap_gib goes with enabled: true"):
        parse({"pressure": {"swap_gib": 1}})
