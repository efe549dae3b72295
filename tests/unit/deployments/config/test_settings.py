"""What the configuration refuses, by name and all at once, and how it reaches the rules."""

import dataclasses

import pytest

from deployments.config import ConfigError
from deployments.config.replicas import PoolConfig
from deployments.config.settings import (
    SlackServeConfig,
    load,
    parse,
)
from router.fleet.view import RouterLimits
from slo.tiers import DEFAULT_TIERS, PREMIUM, STANDARD, SYSTEM


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
        (
            {"prefill": {"drain_s": 82_801}},
            "prefill.drain_s: give at most 82800",
            "`slackserve leave --within`",
        ),
        ({"port": 70000}, "port", "less than or equal to 65535"),
        ({"ray_metrics_port": 0}, "ray_metrics_port", "greater than or equal to 1"),
        ({"accelerator": "tpu"}, "accelerator", "'cpu' or 'cuda'"),
        ({"router": {"placement": "random"}}, "router.placement", "least_harm"),
        ({"tiers": {"premium": {"ttft_ms": 5, "ttft_scale": 2}}}, "tiers.premium", "not both"),
        ({"tiers": {"premium": {"ttft_ms": float("nan")}}}, "tiers.premium.ttft_ms", "finite number"),
        ({"tiers": {"premium": {"target": 1.0}}}, "tiers.premium.target", "less than 1"),
        ({"accelerator_type": "H100"}, "accelerator_type", "goes with accelerator: cuda"),
        (
            {
                "pressure": {"enabled": True},
                "decode": {"engine_kwargs": {"speculative_config": {"method": "ngram"}}},
            },
            "pressure.enabled",
            "remove decode's speculative_config",
        ),
        (
            {"lora": {"adapters": {"sql": "org/sql"}}, "preemption": {"compiled": True}},
            "preemption.compiled",
            "LoRA adapters are not supported",
        ),
        ({"lora": {"adapters": {"a b": "org/sql"}}}, "lora.adapters", "pattern"),
        ({"decode": {"engine_kwargs": {"max_loras": 2}}}, "decode.engine_kwargs", "use the section lora"),
        (
            {"prefill": {"accelerator_type": "H100"}},
            "prefill.accelerator_type",
            "goes with accelerator: cuda",
        ),
        ({"decode": {"gpus_per_worker": 0.5}}, "decode.gpus_per_worker", "goes with accelerator: cuda"),
        ({"decode": {"across_nodes": True}}, "decode.across_nodes", "goes with accelerator: cuda"),
        (
            {"accelerator": "cuda", "decode": {"gpus_per_worker": 1.5}},
            "decode.gpus_per_worker",
            "less than or equal to 1",
        ),
        (
            {"accelerator": "cuda", "prefill": {"gpus_per_worker": 0.5, "tensor_parallel_size": 2}},
            "prefill.gpus_per_worker",
            "NCCL refuses to run two",
        ),
        ({"kv_transfer": {"buffer_device": "cuda"}}, "kv_transfer.buffer_device", "needs accelerator: cuda"),
        (
            {"prefill": {"tensor_parallel_size": 2}, "decode": {"tensor_parallel_size": 3}},
            "prefill.tensor_parallel_size (2) and decode.tensor_parallel_size (3)",
            "one has to be a multiple of the other",
        ),
        (
            {
                "models": {
                    "b": {
                        "model": "x",
                        "prefill": {"tensor_parallel_size": 6},
                        "decode": {"tensor_parallel_size": 4},
                    }
                }
            },
            "models.b: top level: prefill.tensor_parallel_size (6) and decode.tensor_parallel_size (4)",
            "one has to be a multiple of the other",
        ),
        ({"warmup_tokens": [64, 64]}, "warmup_tokens", "two different lengths"),
        (
            {"max_model_len": 1024, "warmup_tokens": [32, 1024]},
            "warmup_tokens",
            "below max_model_len (1024)",
        ),
        (
            {"prefill": {"engine_kwargs": {"scheduler_cls": "x"}}},
            "prefill.engine_kwargs",
            "SlackServe brings its own",
        ),
        (
            {"prefill": {"engine_kwargs": {"prefill_context_parallel_size": 2}}},
            "may not set 'prefill_context_parallel_size'",
            "use the pool's tensor_parallel_size, or replicas",
        ),
        (
            {"decode": {"engine_kwargs": {"data_parallel_size_local": 2}}},
            "may not set 'data_parallel_size_local'",
            "use the pool's replicas",
        ),
        (
            {"decode": {"engine_kwargs": {"nnodes": 2}}},
            "may not set 'nnodes'",
            "use the pool's across_nodes",
        ),
        *(
            ({tier: {"engine_kwargs": {"hf_token": "hf_x"}}}, "may not set 'hf_token'", "set HF_TOKEN")
            for tier in ("prefill", "decode")
        ),
        (
            {"prefill": {"engine_kwargs": {"kv_events_config": {"enable_kv_cache_events": True}}}},
            "may not set 'kv_events_config'",
            "token ids of all prompts",
        ),
        (
            {"prefill": {"engine_kwargs": {"async_scheduling": False}}},
            "prefill.engine_kwargs",
            "off wherever a step may be stopped",
        ),
        (
            {"decode": {"engine_kwargs": {"async_scheduling": True}}},
            "decode.engine_kwargs",
            "to false only; it is on where it can be",
        ),
        (
            {"kv_transfer": {"prefill_port": 20000, "decode_port": 20001}, "prefill": {"replicas": 2}},
            "kv_transfer",
            "ports from 20000 on need 2 in a row",
        ),
        (
            {"kv_transfer": {"decode_port": 65535}, "decode": {"replicas": 2}},
            "kv_transfer",
            "ports from 65535 on need 2 in a row, one per worker; they run beyond 65535",
        ),
        ({"api_keys": [{"tenant": "a"}]}, "api_keys.0", "exactly one of key and key_env"),
        ({"router": {"silent_after_s": 0.3}}, "router.silent_after_s", "give at least 1, or leave it out"),
        ({"router": {"silent_after_s": 11}}, "router", "silent_after_s (11) is more than stale_after_s (10)"),
        ({"pressure": {"drop_after_s": 60}}, "pressure", "drop_after_s goes with enabled: true"),
        ({"pressure": {"reprefill": True}}, "pressure", "reprefill goes with enabled: true"),
        ({"pressure": {"swap_gib": 1}}, "pressure", "swap_gib goes with enabled: true"),
        ({"model_name": ""}, "model_name", "give a name without blanks around it, or leave it out"),
        ({"model_name": " a b\n"}, "model_name", "give a name without blanks around it, or leave it out"),
        ({"accelerator": "cuda", "kv_cache_gib": 4}, "kv_cache_gib", "goes with accelerator: cpu"),
        (
            {"preemption": {"compiled": True}, "prefill": {"engine_kwargs": {"enforce_eager": True}}},
            "preemption.compiled",
            "leave out one",
        ),
        *(
            (
                {"limits": {"allowed_origins": [origin]}},
                "limits.allowed_origins.0",
                "is no origin that a browser",
            )
            for origin in (
                "https://chat.example/",
                "chat.example",
                "https://*.example",
                "https://Chat.example",
                "https://chat.example:443",
                "http://chat.example:80",
                "https://chat.example/path",
                "",
            )
        ),
        ({"host": ""}, "host", "is empty; give an address"),
        ({"monitor": {"host": " "}}, "monitor.host", "is empty; give an address"),
        ({"monitor": {"host": "head..svc"}}, "monitor.host", "is neither an address nor a name"),
        ({"monitor": {"host": "x" * 64}}, "monitor.host", "is neither an address nor a name"),
        ({"host": "two names"}, "host", "is neither an address nor a name"),
        ({"monitor": {"host": "head:9465"}}, "monitor.host", "without a port"),
        *(
            ({tier: {"engine_kwargs": {key: value}}}, f"{tier}.engine_kwargs", hint)
            for tier in ("prefill", "decode")
            for key, value, hint in (
                ("spec_method", "ngram", "use speculative_config"),
                ("spec_model", "org/draft", "use speculative_config"),
                ("spec_tokens", 4, "use speculative_config"),
                ("kv_offloading_size", 4.0, "has no prefix cache beyond the engines' own memory"),
                ("kv_offloading_backend", "native", "has no prefix cache beyond the engines' own memory"),
                ("max_num_queued_reqs", 64, "use admission.max_backlog_s"),
                ("max_num_queued_tokens", 8192, "use admission.max_backlog_s"),
                ("stream_interval", 20, "tells that the KV cache has come: leave it out"),
                ("max_num_batched_tokens", "8192", "is a number from 1 on, not '8192'"),
                ("max_num_seqs", 0, "is a number from 1 on, not 0"),
                ("speculative_config", "ngram", "has keys and values of its own, not 'ngram'"),
                ("override_generation_config", "{}", "has keys and values of its own"),
                ("additional_config", "{}", "has keys and values of its own"),
                ("hf_overrides", "{}", "has keys and values of its own"),
                ("default_chat_template_kwargs", "{}", "has keys and values of its own"),
            )
        ),
        (
            {"decode": {"engine_kwargs": {"max_num_seqs": 256, "max_num_batched_tokens": 128}}},
            "decode.engine_kwargs",
            "max_num_batched_tokens (128) is less than max_num_seqs (256)",
        ),
        (
            {"decode": {"engine_kwargs": {"long_prefill_token_threshold": 64}}},
            "decode.engine_kwargs",
            "use degraded.chunk_tokens",
        ),
        ({"router": {"stale_after_s": 0.3}}, "router.stale_after_s", "give at least 1, or leave it out"),
        (
            {"limits": {"max_bytes_in_flight": 1024}},
            "limits",
            "max_bytes_in_flight (1024) is less than max_body_bytes (2097152)",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, key, hint):
    message = refusal(values)
    assert key in message
    assert hint in message


@pytest.mark.parametrize(
    "values",
    [
        {"pressure": {"enabled": False, "reprefill": False, "drop_after_s": None}},
        {"router": {"stale_after_s": 1}},
        {"accelerator": "cuda"},
        {"preemption": {"aim": "targets", "policy": "rescue"}},
        {"preemption": {"patience": 0, "policy": "rescue"}},
        {"preemption": {"mode": "off", "compiled": False}},
        *(
            {"limits": {"allowed_origins": [origin]}}
            for origin in (
                "*",
                "null",
                "https://chat.example",
                "http://localhost:3000",
                "http://[::1]:8080",
                "https://chat.example:80",
                "chrome-extension://abcdefghijklmnop",
            )
        ),
    ],
    ids=str,
)
def test_what_says_no_more_than_the_rest_is_taken(values):
    assert parse(values)


@pytest.mark.parametrize(
    ("values", "complains"),
    [
        ({"max_model_len": 64}, None),
        ({"models": {"b": {"model": "b", "max_model_len": 512}}}, None),
        (
            {"models": {"b": {"model": "b", "max_model_len": 512, "warmup_tokens": [32, 512]}}},
            "models.b: top level: warmup_tokens must stay below",
        ),
        (
            {"warmup_tokens": [32, 512], "models": {"b": {"model": "b", "max_model_len": 512}}},
            "models.b: top level: warmup_tokens must stay below",
        ),
    ],
)
def test_only_warm_up_lengths_that_were_named_are_held_against_the_longest(values, complains):
    if complains is None:
        assert parse(values).of_each_model()[-1].warmup_tokens is None
    else:
        assert complains in refusal(values)


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
    for text in ("a: [", "[" * 1200, "port: 2026-06-31"):  # June has 30 days
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not YAML"):
            load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


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
    [{"tiers": {"system": {}}}, {"api_keys": [{"tenant": "a", "key_env": "KEY", "highest_tier": "system"}]}],
)
def test_the_servers_own_tier_can_be_given_to_nobody(values):
    with pytest.raises(ConfigError, match="tier"):
        parse(values)
    assert parse({}).tiers.tier_set()[SYSTEM] == DEFAULT_TIERS[SYSTEM]


def test_every_limit_reaches_the_router():
    given = {"stale_after_s": 7, "silent_after_s": 3, "stretch": 4}
    limits = RouterLimits(stale_after_s=7, silent_after_s=3, stretch=4)
    config = parse({"router": given, "degraded": {"max_prompts": 9}})
    expected = dataclasses.replace(limits, local_prefill=True, max_local_prefills=9)
    assert config.router.limits(config.degraded) == expected
    off = parse({"router": given, "degraded": {"local_prefill": False}})
    assert off.router.limits(off.degraded) == limits


def test_an_engine_may_take_longer_where_it_compiles_kernels():
    pool = parse({"prefill": {"hung_after_s": 120}}).prefill
    assert [pool.hung_after(accelerator) for accelerator in ("cpu", "cuda")] == [120, 120]
    assert [PoolConfig().hung_after(accelerator) for accelerator in ("cpu", "cuda")] == [5, 30]


def test_prompts_that_decode_shall_compute_need_the_means():
    with pytest.raises(ConfigError, match=r"degraded\.local_prefill"):
        parse({"kv_transfer": {"local_below": 64}, "degraded": {"local_prefill": False}})


def test_a_transfer_takes_its_latency_and_bytes_over_bandwidth():
    link = {"bytes_per_token": 100_000, "gigabytes_per_s": 1, "latency_ms": 10}
    given = parse({"model": "m", "kv_transfer": {"link": link}}, "test")
    assert given.kv_transfer.link.link().transfer_s(1000) == pytest.approx(0.01 + 0.1)
