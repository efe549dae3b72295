"""Sections of further models."""

import pytest

from deployments.config import ConfigError
from deployments.config.settings import (
    parse,
)

TWO = {
    "prefill": {"replicas": 3, "engine_kwargs": {"seed": 1}},
    "decode": {"node_labels": {"pool": "a"}, "engine_kwargs": {"tool_call_parser": "hermes"}},
    "kv_transfer": {"lease_s": 60, "link": {"bytes_per_token": 1, "gigabytes_per_s": 1}},
}


def test_a_further_model_is_as_the_deployment_but_for_what_it_says_and_what_is_one_models_own():
    own = {"model": "b", "decode": {"replicas": 2}, "dtype": "half", "kv_transfer": {"local_below": 32}}
    config = parse({"model": "a", "max_model_len": 4096, "models": {"coder": own}} | TWO)
    first, coder = config.of_each_model()
    assert first is config
    assert (coder.model, coder.model_name, coder.models) == ("b", "coder", {})
    assert (coder.prefill.replicas, coder.decode.replicas, coder.dtype) == (3, 2, "half")
    assert coder.decode.node_labels == {"pool": "a"}
    assert coder.prefill.engine_kwargs == coder.decode.engine_kwargs == {}, "arguments are of one model"
    assert (coder.max_model_len, coder.profile, coder.kv_transfer.link) == (None, None, None)
    assert (coder.kv_transfer.lease_s, coder.kv_transfer.local_below) == (60, 32)
    assert coder.preemption == config.preemption
    transfer = config.kv_transfer
    assert coder.kv_transfer.prefill_port == transfer.prefill_port + 100
    assert coder.kv_transfer.decode_port == transfer.decode_port + 100


def test_the_names_of_models_are_given_when_all_are():
    further = {"model": "a", "models": {"coder": {"model": "b"}}} | TWO
    assert parse(further | {"model_name": "chat"}).names_given() == ("chat", "coder")
    assert parse(further).names_given() == (), "a directory would be called by its last part"


def test_the_bounds_of_a_further_models_tier_are_checked_with_what_it_inherits():
    own = {"model": "b", "prefill": {"min_replicas": 2}}
    config = parse({"prefill": {"replicas": 3, "max_replicas": 4}, "models": {"coder": own}})
    pool = config.of_each_model()[1].prefill
    assert (pool.fewest, pool.replicas, pool.most) == (2, 3, 4)


def test_a_further_models_accelerator_is_that_of_its_tiers_unless_they_say_otherwise():
    own = {"model": "b", "accelerator_type": "H100", "decode": {"accelerator_type": "L4"}}
    tiers = {"prefill": {"accelerator_type": "A100"}, "decode": {"accelerator_type": "A100"}}
    config = parse({"accelerator": "cuda", "models": {"coder": own}} | tiers)
    coder = config.of_each_model()[1]
    assert (coder.accelerator_type, coder.prefill.accelerator_type) == ("H100", None)
    assert coder.decode.accelerator_type == "L4"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": {"b": {}}}, r"models\.b\.model"),
        ({"models": {"b": {"model": "b", "modell": 1}}}, "modell"),
        ({"models": {"a b": {"model": "b"}}}, "models"),
        ({"models": {"a--b": {"model": "b"}}}, "two dashes"),
        (
            {"kv_transfer": {"decode_port": 65500}, "models": {"b": {"model": "b"}}},
            r"(?s)models\.b.*decode_port.*65535",
        ),
        (
            {"models": {"b": {"model": "b", "prefill": {"gpus_per_worker": 0.5}}}},
            r"(?s)models\.b.*gpus_per_worker goes with accelerator: cuda",
        ),
        ({"models": {"b": {"model": "b", "kv_transfer": {"prefill_port": 20000}}}}, "they run into 20000"),
        (
            {"models": {"b": {"model": "b", "prefill": {"replicas": 3, "max_replicas": 2}}}},
            r"models\.b: prefill: replicas, with which the tier starts, are 3",
        ),
        ({"prefill": {"replicas": 101}, "models": {"b": {"model": "b"}}}, "need 101 in a row"),
    ],
)
def test_models_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(values)
