"""Numbers that YAML reads otherwise than they look."""

import re

import pytest

from deployments.config import ConfigError
from deployments.config.keys import read_keys
from deployments.config.settings import load, parse
from slo.files.strict_yaml import parse_yaml


@pytest.fixture
def loaded(tmp_path):
    def load_text(text):
        path = tmp_path / "slackserve.yaml"
        path.write_text(text)
        return load(path)

    return load_text


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("tiers: {premium: {ttft_ms: yes}}", "tiers.premium.ttft_ms"),
        ("tiers: {premium: {rank: no}}", "tiers.premium.rank"),
        ("prefill: {replicas: on}", "prefill.replicas"),
        ("prefill: {drain_s: yes}", "prefill.drain_s"),
        ("limits: {max_output_tokens: true}", "limits.max_output_tokens"),
        ("kv_transfer: {local_below: on}", "kv_transfer.local_below"),
        ("lora: {max_rank: yes}", "lora.max_rank"),
        ("warmup_tokens: [yes, 5]", "warmup_tokens"),
        ("models: {coder: {model: x, max_model_len: yes}}", "models.coder.max_model_len"),
    ],
)
def test_a_truth_is_no_number(text, key, loaded):
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: .*write the number"):
        loaded(text)
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: .*write the number"):
        parse(parse_yaml(text, "the args of an application", ConfigError))


def test_a_truth_stays_one_where_it_is_asked_for(loaded):
    config = loaded("pin_cores: off\ndecode: {engine_kwargs: {enable_prefix_caching: yes}}")
    assert config.pin_cores is False
    assert config.decode.engine_kwargs == {"enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("host: a\nport: 010000", "line 2: port: YAML reads 010000 as 4096"),
        ("tiers: {premium: {tpot_ms: 1:30}}", "line 1: tpot_ms: YAML reads 1:30 as 90"),
        ("tiers: {premium: {tpot_ms: 1:30.5}}", "line 1: tpot_ms: YAML reads 1:30.5 as 90.5"),
        ("warmup_tokens:\n  - 64\n  - -012", "line 3: YAML reads -012 as -10"),
        ("models: {007: {model: x}}", "line 1: YAML reads 007 as 7"),
    ],
)
def test_leading_zeros_and_colons_are_in_no_number(text, complaint, loaded):
    hint = "; write a number without leading zeros and colons, and text in quotes"
    with pytest.raises(ConfigError, match=re.escape(f"{complaint}{hint}")):
        loaded(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("0.50", 0.5),
        ("1_000", 1000),
        ("0x1F", 31),
        ("'010'", "010"),
        ("'1:30'", "1:30"),
        ("2026-06-30", None),
        ("08", "08"),
        ("::1", "::1"),
    ],
)
def test_other_numbers_and_texts_are_read_as_ever(text, value):
    found = parse_yaml(f"a: {text}", "a file", ValueError)["a"]
    assert value is None or found == value


def test_no_digits_of_a_key_are_told(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("- tenant: acme\n  key: 0123456712345670\n")
    with pytest.raises(
        ConfigError, match=r"line 2: a number has leading zeros or colons; .* in quotes"
    ) as it:
        read_keys(path)
    assert "1234567" not in str(it.value)
