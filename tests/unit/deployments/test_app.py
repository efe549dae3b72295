"""The application builder, as far as it goes without a cluster."""

import contextlib
from pathlib import Path

import pytest
from ray.serve.deployment import deployment_to_schema
from vllm.engine.arg_utils import AsyncEngineArgs

import deployments
from benchmarks.harness.tiny_models import build_tiny_llama
from deployments.config import ConfigError
from deployments.config.settings import load, parse
from slo.tiers import PREMIUM

CONFIGS = sorted((Path(deployments.__file__).parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_that_come_along_are_valid(path):
    assert load(path).tiers.tier_set()[PREMIUM].sheddable is False


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", context=2048))


@pytest.fixture(scope="module")
def build():
    from deployments.app import build

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 4096}, "max_model_len: 4096 is more than the model's 2048"),
        (
            {"prefill": {"tensor_parallel_size": 3}},
            "3 does not divide the model's 4 attention heads",
        ),
        (
            {"decode": {"engine_kwargs": {"max_num_seq": 5}}},
            "decode.engine_kwargs: vLLM has no engine argument 'max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        (
            {"prefill": {"engine_kwargs": {"tool_call_parser": "hermes"}}},
            "prefill.engine_kwargs: 'tool_call_parser' is about prompts and answers; give it to decode alone",
        ),
        (
            {
                "prefill": {"engine_kwargs": {"max_logprobs": 20}},
                "decode": {"engine_kwargs": {"max_logprobs": 100}},
            },
            "prefill.engine_kwargs and decode.engine_kwargs differ in 'max_logprobs', 20 and 100; both",
        ),
        (
            {
                "prefill": {"engine_kwargs": {"hf_overrides": {"rope_theta": 1e6}}},
                "decode": {"engine_kwargs": {"hf_overrides": {"rope_theta": 1e4}}},
            },
            "differ in 'hf_overrides', {'rope_theta': 1000000.0} and {'rope_theta': 10000.0}; decode goes",
        ),
        (
            {
                "prefill": {"engine_kwargs": {"kv_cache_dtype": "fp8"}},
                "decode": {"engine_kwargs": {"kv_cache_dtype": "auto"}},
            },
            "prefill.engine_kwargs and decode.engine_kwargs differ in 'kv_cache_dtype', fp8 and auto; decode",
        ),
        (
            {"decode": {"engine_kwargs": {"load_format": "dummy"}}},
            "load_format is 'auto' and 'dummy'; 'dummy' makes weights up",
        ),
        ({"dtype": "bf16"}, "dtype: vLLM has no dtype 'bf16'; did you mean 'bfloat16'?"),
        (
            {"prefill": {"engine_kwargs": {"gpu_memory_utilization": 90}}},
            "prefill.engine_kwargs: gpu_memory_utilization: Input should be less than or equal to 1",
        ),
        (
            {"decode": {"engine_kwargs": {"kv_cache_memory_bytes": 1 << 28}}},
            "decode.engine_kwargs: 'kv_cache_memory_bytes' has no effect on cpu; use kv_cache_gib",
        ),
        (
            {"prefill": {"engine_kwargs": {"gpu_memory_utilization": 0.5}}},
            "prefill.engine_kwargs: 'gpu_memory_utilization' has no effect on cpu; use kv_cache_gib",
        ),
        (
            {"decode": {"engine_kwargs": {"enable_auto_tool_choice": True}}},
            "decode.engine_kwargs: enable_auto_tool_choice needs a tool_call_parser",
        ),
        ({"lora": {"adapters": {"a": "/no/such/adapter"}}}, "lora.adapters.a: /no/such/adapter has no"),
        ({"model_name": "tiny#8b"}, "'tiny#8b' is the name of a model or adapter and has '#'"),
        (
            {"accelerator": "cuda", "accelerator_type": "h100"},
            "accelerator_type: Ray knows no 'h100'; did you mean 'H100'?",
        ),
        (
            {"accelerator": "cuda", "decode": {"accelerator_type": "Gaudi9"}},
            "decode.accelerator_type: Ray knows no 'Gaudi9'; ",
        ),
        ({"node_labels": {"a b": "c"}}, "node_labels: Invalid label key name `a b`"),
        ({"prefill": {"node_labels": {"pool": "a b"}}}, "prefill.node_labels: Invalid label selector value"),
        (
            {"prefill": {"engine_kwargs": {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}}},
            "prefill.engine_kwargs: max_num_batched_tokens (1024) is less than the 2048 tokens",
        ),
        ({"model_name": "tiny:8b"}, "'tiny:8b' is the name of a model or adapter and has ':'"),
        ({"model_name": "tiny--8b"}, "has '--', with which it would not be found; give it another"),
        ({"profile": "/nowhere/profile.json"}, "profile: /nowhere/profile.json cannot be read"),
        ({"api_keys": [{"tenant": "a", "key_env": "NOT_SET"}]}, "from $NOT_SET, which is not set"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(build, tiny, values, message):
    with pytest.raises(ConfigError) as caught:
        build(parse({"model": tiny, **values}))
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_model", "values", "message"),
    [
        ({"max_model_len": 4096}, {}, "models.b: max_model_len: 4096 is more than the model's 2048"),
        (
            {"lora": {"adapters": {"a": "x/y"}}},
            {"model_name": "a"},
            "'a' is the name of two models or adapters",
        ),
        ({}, {"model_name": "b"}, "'b' is the name of two models or adapters"),
        ({"model": "/no/such"}, {}, "models.b: There is no directory /no/such"),
    ],
)
def test_what_cannot_work_of_a_further_model_is_refused_with_its_name(build, tiny, of_model, values, message):
    with pytest.raises(ConfigError) as caught:
        build(parse({"model": tiny, "models": {"b": {"model": tiny, **of_model}}, **values}))
    assert message in str(caught.value)


@pytest.mark.slow
def test_names_that_would_be_one_deployments_are_refused(build, tiny):
    values = {"model": tiny, "model_name": "a.b", "models": {"a_b": {"model": tiny}}}
    with pytest.raises(ConfigError, match=r"'a\.b' and 'a_b' differ only in characters that are replaced"):
        build(parse(values))


@pytest.mark.slow
def test_a_missing_model_directory_is_refused(build):
    with pytest.raises(RuntimeError, match="/no/such/model"):
        build(parse({"model": "/no/such/model"}))


@pytest.mark.slow
def test_serve_gives_the_builder_typed_arguments(build):
    """Serve turns a mapping into the builder's annotated model only if the annotation is a class."""
    import inspect

    from deployments.config.settings import SlackServeConfig

    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is SlackServeConfig


@pytest.fixture
def options(monkeypatch):
    """Serve's options of the prefill and the decode deployment that a configuration is turned into.

    What else their replicas are told stands in `nodes` then.
    """
    from deployments import app, replicas

    found, nodes = {}, {}

    def note(llm_config, *, name_prefix, deployment_cls, bind_kwargs):
        tier = name_prefix.rstrip(":").lower()
        found[tier] = llm_config, deployment_cls.get_deployment_options(llm_config)
        nodes[tier] = bind_kwargs["node"]

    monkeypatch.setattr(replicas, "build_llm_deployment", note)

    def options_of(values):
        with contextlib.suppress(TypeError):  # the ingress is not bound to what was not built
            app.build(parse(values))
        return found

    options_of.nodes = nodes
    return options_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "is_offline"),
    [
        ({}, True),
        ({"lora": {"adapters": {"sql": "org/sql"}, "max_rank": 16}}, False),
        ({"decode": {"engine_kwargs": {"speculative_config": {"model": "org/draft"}}}}, False),
        ({"decode": {"engine_kwargs": {"speculative_config": {"method": "ngram"}}}}, True),
    ],
    ids=str,
)
def test_engines_ask_the_hub_for_what_is_not_here(options, tiny, values, is_offline):
    for config, _ in options({"model": tiny, **values}).values():
        environment = config.runtime_env["env_vars"]
        assert ("HF_HUB_OFFLINE" in environment) is is_offline
        assert environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "step_tokens"),
    [
        ({}, 2048),
        ({"max_model_len": 64}, 64),
        ({"max_model_len": 64, "prefill": {"engine_kwargs": {"max_num_seqs": 128}}}, 128),
        ({"prefill": {"engine_kwargs": {"enable_chunked_prefill": False}}}, None),
        ({"prefill": {"engine_kwargs": {"max_num_batched_tokens": 512}}}, 512),
        ({"model": "org/model"}, 8192),
        ({"model": "org/model", "max_model_len": 4096}, 4096),
    ],
    ids=str,
)
def test_a_step_of_prefill_takes_as_much_as_a_chunk_whether_or_not_the_length_is_known(
    options, tiny, values, step_tokens
):
    config, _ = options({"model": tiny, **values})["prefill"]
    given = config.engine_kwargs
    assert given.get("max_num_batched_tokens") == step_tokens
    if "model" not in values:
        sizes = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill")
        AsyncEngineArgs(tiny, **{key: given[key] for key in sizes if key in given}).create_engine_config()


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"max_model_len": 1024}], ids=str)
def test_chunks_of_decode_are_no_longer_than_the_model(options, tiny, values):
    config, _ = options({"model": tiny, "degraded": {"chunk_tokens": 4096}, **values})["decode"]
    longest = values.get("max_model_len", 2048)
    assert config.engine_kwargs["long_prefill_token_threshold"] == longest


@pytest.mark.slow
def test_each_tier_is_told_when_its_engine_has_failed(options, tiny):
    options({"model": tiny, "accelerator": "cuda", "decode": {"hung_after_s": 90}})
    assert {tier: node.hung_after_s for tier, node in options.nodes.items()} == {"prefill": 30, "decode": 90}


@pytest.mark.slow
def test_decode_is_told_how_many_ranks_prefill_has(options, tiny):
    options({"model": tiny, "accelerator": "cuda", "prefill": {"tensor_parallel_size": 2}})
    assert options.nodes["decode"].prefill_ranks == 2


@pytest.mark.slow
def test_each_tier_is_placed_where_it_is_told(options, tiny):
    found = options(
        {
            "model": tiny,
            "prefill": {"tensor_parallel_size": 2, "node_labels": {"pool": "a"}},
            "decode": {},
        }
    )
    _, prefill = found["prefill"]
    assert prefill["placement_group_bundles"] == [{"CPU": 2, "GPU": 0}, {"CPU": 1}]
    assert prefill["placement_group_bundle_label_selector"] == [{"pool": "a"}]
    assert prefill["placement_group_strategy"] == "STRICT_PACK"
    assert found["decode"][1]["placement_group_bundle_label_selector"] is None


@pytest.mark.slow
def test_the_cores_that_there_are_to_use_are_split(options, tiny):
    from deployments.app import application

    with contextlib.suppress(TypeError):  # the ingress is not bound to what was not built
        application(parse({"model": tiny}), [4, 7])
    assert {tier: node.cores for tier, node in options.nodes.items()} == {"prefill": ("4",), "decode": ("7",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "most_per_node", "surge_percent"),
    [
        ({}, None, 100),
        ({"ingress_replicas": 2}, None, 100),
        ({"node_labels": {"pool": "a"}}, None, 100),
        ({"node_labels": {"pool": "a"}, "ingress_replicas": 2}, 1, 0),
    ],
    ids=str,
)
def test_several_ingresses_on_labelled_nodes_have_a_node_each(
    build, tiny, values, most_per_node, surge_percent
):
    """One more than there are nodes would never start, so an upgrade stops one of the old first."""
    ingress = deployment_to_schema(build(parse({"model": tiny, **values}))._bound_deployment)
    given = ingress.model_dump(exclude_unset=True)
    assert given.get("max_replicas_per_node") == most_per_node
    assert given.get("max_surge_percent", 0) == surge_percent


@pytest.mark.slow
def test_proxies_forget_what_model_a_client_names_to_serve(build, tiny):
    ingress = build(parse({"model": tiny}))._bound_deployment
    chosen = ingress._deployment_config.request_router_config.request_router_class
    assert "AnyIngress" in str(chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "backend", "parser"),
    [
        ({}, "xgrammar", ""),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "xgrammar", ""),
        (
            {"structured_outputs_config": {"backend": "guidance"}, "reasoning_parser": "qwen3"},
            "guidance",
            "qwen3",
        ),
    ],
)
def test_one_way_to_keep_to_grammars_is_all_requests(options, tiny, given, backend, parser):
    config, _ = options({"model": tiny, "decode": {"engine_kwargs": given}})["decode"]
    grammars = config.get_engine_config().get_initialization_kwargs()["structured_outputs_config"]
    engine = AsyncEngineArgs(**{"model": tiny, **given, "structured_outputs_config": grammars})
    made = engine.create_engine_config().structured_outputs_config
    assert (made.backend, made.reasoning_parser) == (backend, parser)
    assert made.disable_any_whitespace == (
        "disable_any_whitespace" in given.get("structured_outputs_config", {})
    )


@pytest.mark.slow
def test_a_way_to_keep_to_grammars_that_there_is_not_is_refused(build, tiny):
    engine = {"engine_kwargs": {"structured_outputs_config": {"backend": "xgramar"}}}
    with pytest.raises(ConfigError, match=r"(?s)decode.engine_kwargs: structured_outputs_config: .*backend"):
        build(parse({"model": tiny, "decode": engine}))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "lm-format-enforcer"])
def test_a_way_to_keep_to_grammars_that_cannot_be_checked_before_is_refused(build, tiny, backend):
    engine = {"engine_kwargs": {"structured_outputs_config": {"backend": backend}}}
    asked = (
        rf"structured_outputs_config: backend: '{backend}' .*set it to 'xgrammar', .*'guidance' or 'outlines'"
    )
    with pytest.raises(ConfigError, match=asked):
        build(parse({"model": tiny, "decode": engine}))


@pytest.mark.slow
@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_both_tiers_sample_alike(options, tiny, section):
    sampling = {
        "logits_processors": ["some.Processor"],
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 100,
        "generation_config": "vllm",
        "override_generation_config": {"temperature": 0.5},
    }
    found = options({"model": tiny, section: {"engine_kwargs": {**sampling, "max_num_seqs": 7}}})
    for tier in ("prefill", "decode"):
        given = found[tier][0].engine_kwargs
        assert {name: given[name] for name in sampling} == sampling
        assert (given.get("max_num_seqs") == 7) == (tier == section)


@pytest.mark.slow
@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_both_tiers_have_the_same_model_and_kv_cache(options, tiny, section):
    """What NIXL's handshake does not compare would make answers of two models."""
    of_the_model = {
        "revision": "0123abc",
        "code_revision": "0123abc",
        "tokenizer_revision": "0123abc",
        "hf_overrides": {"rope_theta": 1e6},
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "block_size": 32,
    }
    own = {"load_format": "safetensors", "language_model_only": True}
    found = options({"model": tiny, section: {"engine_kwargs": {**of_the_model, **own}}})
    for tier in ("prefill", "decode"):
        given = found[tier][0].engine_kwargs
        assert {name: given.get(name) for name in of_the_model} == of_the_model
        assert all((name in given) == (tier == section) for name in own)


@pytest.mark.slow
def test_what_bounds_an_answer_adds_to_what_one_tier_names_of_sampling(options, tiny):
    given = {"override_generation_config": {"temperature": 0.5}}
    values = {"model": tiny, "limits": {"max_output_tokens": 9}}
    found = options({**values, "decode": {"engine_kwargs": given}})
    for config, _ in found.values():
        assert config.engine_kwargs["override_generation_config"] == {
            "temperature": 0.5,
            "max_new_tokens": 9,
        }


def _environment_of(options):
    """Of a replica: its engine, a process of its own, has the same."""
    return options["ray_actor_options"]["runtime_env"]["env_vars"]


@pytest.mark.slow
def test_a_whole_gpu_is_what_vllm_takes_by_itself(options, tiny):
    for _, tier in options({"model": tiny, "accelerator": "cuda"}).values():
        assert "VLLM_RAY_PER_WORKER_GPUS" not in _environment_of(tier)


@pytest.mark.slow
def test_each_tier_has_an_accelerator_and_a_part_of_it(options, tiny):
    found = options(
        {
            "model": tiny,
            "accelerator": "cuda",
            "accelerator_type": "H100",
            "prefill": {"gpus_per_worker": 0.5},
            "decode": {
                "accelerator_type": "L40S",
                "across_nodes": True,
                "gpus_per_worker": 0.16666667,
                "engine_kwargs": {"gpu_memory_utilization": 0.1},
            },
        }
    )
    config, prefill = found["prefill"]
    assert prefill["placement_group_bundles"] == [{"CPU": 1, "GPU": 0.5, "accelerator_type:H100": 0.001}]
    assert prefill["placement_group_strategy"] == "STRICT_PACK"
    assert config.engine_kwargs["gpu_memory_utilization"] == 0.45
    assert _environment_of(prefill)["VLLM_RAY_PER_WORKER_GPUS"] == "0.5"
    config, decode = found["decode"]
    assert decode["placement_group_strategy"] == "PACK"
    assert [bundle["GPU"] for bundle in decode["placement_group_bundles"]] == [0.16666667]
    assert _environment_of(decode)["VLLM_RAY_PER_WORKER_GPUS"] == "0.16666667", (
        "not rounded up beyond its bundle"
    )
    assert all(bundle["accelerator_type:L40S"] for bundle in decode["placement_group_bundles"])
    assert config.engine_kwargs["gpu_memory_utilization"] == 0.1


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
    ("values", "is_ahead"),
    [
        ({}, True),
        ({"accelerator": "cpu"}, False),
        ({"pressure": {"enabled": True}}, False),
        ({"decode": {"engine_kwargs": {"speculative_config": {"method": "ngram"}}}}, False),
        ({"decode": {"engine_kwargs": {"async_scheduling": False}}}, False),
    ],
    ids=str,
)
def test_decode_composes_steps_ahead_on_gpus_unless_something_forbids_it(options, tiny, values, is_ahead):
    from decode_node.carrying import ASYNC_SCHEDULER

    found = options({"model": tiny, "accelerator": "cuda", **values})
    decode = found["decode"][0].engine_kwargs
    assert decode["async_scheduling"] is is_ahead
    assert (decode["scheduler_cls"] == ASYNC_SCHEDULER) is is_ahead
    assert found["prefill"][0].engine_kwargs["async_scheduling"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "is_eager", "is_ahead"),
    [
        ({}, True, False),
        ({"preemption": {"compiled": True}}, False, False),
        ({"preemption": {"mode": "off"}}, False, None),
        ({"preemption": {"mode": "off"}, "prefill": {"engine_kwargs": {"enforce_eager": True}}}, True, None),
        ({"preemption": {"mode": "off"}, "accelerator": "cpu"}, True, None),
    ],
    ids=str,
)
def test_where_prefill_is_never_stopped_it_runs_as_vllm_does(options, tiny, values, is_eager, is_ahead):
    config, _ = options({"model": tiny, "accelerator": "cuda", **values})["prefill"]
    assert config.engine_kwargs["enforce_eager"] is is_eager
    assert config.engine_kwargs["async_scheduling"] is is_ahead
    assert "VLLM_USE_V2_MODEL_RUNNER" not in config.runtime_env["env_vars"], "vLLM chooses it"


@pytest.mark.slow
def test_prefill_that_turns_out_to_be_refused_knows_how_vllm_would_run(tiny):
    from deployments.engine_kwargs import stock_prefill

    for accelerator, is_eager in (("cuda", False), ("cpu", True)):
        config = parse({"model": tiny, "accelerator": accelerator})
        assert stock_prefill(config) == {"async_scheduling": None, "enforce_eager": is_eager}


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


@pytest.mark.slow
def test_a_whole_gpu_has_its_memory_as_the_engine_likes(options, tiny):
    config, _ = options({"model": tiny, "accelerator": "cuda"})["decode"]
    assert "gpu_memory_utilization" not in config.engine_kwargs
