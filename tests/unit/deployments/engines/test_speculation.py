"""Which drafters the two tiers may have, held against what vLLM makes of a configuration."""

from types import SimpleNamespace
from typing import get_args

import pytest
from vllm.config.speculative import MTPModelTypes, SpeculativeConfig, SpeculativeMethod

from deployments.config import ConfigError
from deployments.config.settings import parse
from deployments.engines.arguments import check_engine_kwargs

METHODS = get_args(SpeculativeMethod)


def check(prefill, decode):
    tiers = {"prefill": prefill, "decode": decode}
    given = {
        tier: {"engine_kwargs": {"speculative_config": {"num_speculative_tokens": 2, **config}}}
        for tier, config in tiers.items()
        if config
    }
    check_engine_kwargs(parse({"model": "org/model", "accelerator": "cuda", **given}))


def moves_kv(method):
    """Whether the drafters of a method are part of NIXL's hash, or a model of which every layer has KV."""
    used = SimpleNamespace(method="mtp" if method in get_args(MTPModelTypes) else method)
    return SpeculativeConfig.use_eagle(used) or method == "draft_model"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_of_prefill", [True, False])
def test_a_drafter_with_a_kv_cache_is_in_both_tiers_or_in_none(method, is_of_prefill):
    given = {"method": method, "model": "org/draft"}
    check(given, given)
    alone = (given, {}) if is_of_prefill else ({}, given)
    if not moves_kv(method):
        check(*alone)
        return
    with pytest.raises(ConfigError, match=r"differ in 'speculative_config'.*no KV could be pulled") as caught:
        check(*alone)
    assert "model org/draft" in str(caught.value)
    assert "none" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "is_told"),
    [
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, True),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, True),
        ({"method": "draft_model", "model": "org/EAGLE-8B"}, True),
        ({"method": "deepseek_mtp"}, True),
        ({"model": "org/draft"}, False),
        ({"model": "ngram"}, False),
    ],
    ids=str,
)
def test_what_names_tell_of_a_drafter_is_heeded(config, is_told):
    if is_told:
        with pytest.raises(ConfigError, match="speculative_config"):
            check({}, config)
    else:
        check({}, config)


@pytest.mark.parametrize(
    "other",
    [
        {"method": "eagle"},
        {"model": "org/another"},
        {"revision": "0123abc"},
        {"code_revision": "0123abc"},
        {"parallel_drafting": True},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
def test_what_the_handshake_compares_is_alike(other):
    given = {"method": "eagle3", "model": "org/draft"}
    with pytest.raises(ConfigError, match="speculative_config"):
        check(given, {**given, **other})


def test_what_it_does_not_compare_may_differ():
    given = {"method": "mtp"}
    check(given, {**given, "method": "deepseek_mtp", "num_speculative_tokens": 1})
