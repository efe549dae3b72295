import dataclasses

import pytest

from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig, load, parse
from slo.errors import AuthenticationError
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM


def refusal(values):
    with pytest.raises(ConfigError) as caught:
        parse(values)
    return str(caught.value)


def test_defaults_are_the_documented_tiers():
    assert SlackServeConfig().tiers.tier_set() == DEFAULT_TIERS


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        ({"modle": "x"}, "unknown key 'modle'", "did you mean 'model'?"),
        ({"prefill": {"replica": 2}}, "prefill: unknown key 'replica'", "did you mean 'replicas'?"),
        (
            {"tiers": {"gold": {}}},
            "tiers: there is no tier 'gold'",
            "known are premium, standard, background",
        ),
        ({"prefill": {"replicas": 0}}, "prefill.replicas", "greater than or equal to 1"),
        ({"port": 70000}, "port", "less than or equal to 65535"),
        ({"accelerator": "tpu"}, "accelerator", "'cpu' or 'cuda'"),
        ({"router": {"placement": "random"}}, "router.placement", "least_harm"),
        ({"tiers": {"premium": {"ttft_ms": 5, "ttft_scale": 2}}}, "tiers.premium", "not both"),
        ({"tiers": {"premium": {"ttft_ms": float("nan")}}}, "tiers.premium.ttft_ms", "finite number"),
        ({"tiers": {"premium": {"target": 1.0}}}, "tiers.premium.target", "less than 1"),
        ({"accelerator_type": "H100"}, "accelerator_type", "goes with accelerator: cuda"),
        ({"kv_transfer": {"buffer_device": "cuda"}}, "kv_transfer.buffer_device", "needs accelerator: cuda"),
        ({"warmup_tokens": [64, 64]}, "warmup_tokens", "two different lengths"),
        ({"max_model_len": 1024}, "warmup_tokens", "below max_model_len (1024)"),
        (
            {"prefill": {"engine_kwargs": {"scheduler_cls": "x"}}},
            "prefill.engine_kwargs",
            "SlackServe brings its own",
        ),
        (
            {"kv_transfer": {"prefill_port": 20000, "decode_port": 20001}, "prefill": {"replicas": 2}},
            "kv_transfer",
            "ports from 20000 on need 2 in a row",
        ),
        ({"api_keys": [{"tenant": "a"}]}, "api_keys.0", "exactly one of key and key_env"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, key, hint):
    message = refusal(values)
    assert key in message
    assert hint in message


def test_all_complaints_come_at_once():
    message = refusal({"port": 0, "prefill": {"replicas": 0}})
    assert len(message.splitlines()) == 2


def test_a_file_is_read_and_named_in_complaints(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("port: 9000\nprefill: {replicas: 2}\n")
    assert load(path).prefill.replicas == 2
    path.write_text("prot: 9000\n")
    with pytest.raises(ConfigError, match=r"config.yaml.*did you mean 'port'"):
        load(path)
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="expected keys and values"):
        load(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


def test_keys_come_from_config_file_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("UMBRA_KEY", "key-of-umbra")
    path = tmp_path / "keys.yaml"
    path.write_text("- {tenant: file, key: key-of-file, highest_tier: background}\n")
    config = parse(
        {
            "api_keys": [
                {"tenant": "acme", "key": "key-of-acme"},
                {"tenant": "umbra", "key_env": "UMBRA_KEY"},
            ],
            "api_keys_file": str(path),
        }
    )
    ring = config.key_ring()
    assert ring.tenant("key-of-acme").name == "acme"
    assert ring.tenant("key-of-umbra").name == "umbra"
    assert ring.tenant("key-of-file").highest_tier == BACKGROUND
    with pytest.raises(AuthenticationError):
        ring.tenant("key-of-nobody")


def test_a_key_that_is_missing_or_shared_is_refused(tmp_path):
    missing = parse({"api_keys": [{"tenant": "a", "key_env": "NOT_SET_ANYWHERE"}]})
    with pytest.raises(ConfigError, match=r"\$NOT_SET_ANYWHERE, which is not set"):
        missing.key_ring()
    shared = parse({"api_keys": [{"tenant": "a", "key": "same-key-1"}, {"tenant": "b", "key": "same-key-1"}]})
    with pytest.raises(ConfigError, match="two tenants have the same key"):
        shared.key_ring()
    path = tmp_path / "keys.yaml"
    path.write_text("tenant: x\n")
    with pytest.raises(ConfigError, match="expected a list of keys"):
        parse({"api_keys_file": str(path)}).key_ring()


def test_a_key_is_not_shown():
    config = parse({"api_keys": [{"tenant": "a", "key": "secret-key-1"}]})
    assert "secret-key-1" not in repr(config)


def test_a_tier_given_in_part_keeps_its_defaults_for_the_rest():
    premium = parse({"tiers": {"premium": {"ttft_ms": 300}}}).tiers.tier_set()[PREMIUM]
    assert premium == dataclasses.replace(DEFAULT_TIERS[PREMIUM], ttft_s=0.3)
    scaled = parse({"tiers": {"standard": {"ttft_scale": 1.3}}}).tiers.tier_set()[STANDARD]
    assert (scaled.ttft_s, scaled.ttft_scale, scaled.tpot_s) == (None, 1.3, 0.08)
    undated = parse({"tiers": {"standard": {"ttft_ms": None}}}).tiers.tier_set()[STANDARD]
    assert undated.ttft_s is None


def test_a_file_that_is_not_text_or_no_mapping_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(path)
    path.write_text("false")
    with pytest.raises(ConfigError, match="expected keys and values"):
        load(path)


def test_shares_have_defaults_and_are_of_one_whole():
    policies = parse({"tiers": {"standard": {"share": 0.2}}}).tiers.tier_set()
    assert [policies[tier].share for tier in DEFAULT_TIERS.names] == [0.5, 0.2, 0.15]
    with pytest.raises(ConfigError, match=r"at most 1, not 1.2"):
        parse({"tiers": {"background": {"share": 0.35}}})


@pytest.mark.parametrize(
    "values",
    [{"tiers": {"system": {}}}, {"api_keys": [{"tenant": "a", "key": "key-of-a", "highest_tier": "system"}]}],
)
def test_the_servers_own_tier_can_be_given_to_nobody(values):
    with pytest.raises(ConfigError, match="tier"):
        parse(values)
    assert parse({}).tiers.tier_set()[SYSTEM] == DEFAULT_TIERS[SYSTEM]
