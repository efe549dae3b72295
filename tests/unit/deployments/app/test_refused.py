"""What cannot work is refused before anything starts."""

import socket

import pytest
import ray
import yaml
from ports import free_port
from typer.testing import CliRunner

from deployments.cli import app
from deployments.config import ConfigError
from deployments.config.settings import parse
from deployments.models.embedded import EmbeddedModelMissingError
from deployments.models.store import ModelStore

REFUSED = pytest.mark.parametrize(
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
        (
            {"decode": {"engine_kwargs": {"speculative_config": {"method": "mtp"}}}},
            "of drafters with a KV cache of their own: none and method mtp; no KV could be pulled",
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
        (
            {"decode": {"engine_kwargs": {"tool_parser_plugin": "/no/such/parsers.py"}}},
            "decode.engine_kwargs: tool_parser_plugin: there is no file /no/such/parsers.py",
        ),
        (
            {"decode": {"engine_kwargs": {"chat_template": "/no/such.jinja"}}},
            "decode.engine_kwargs: chat_template: The supplied chat template (/no/such.jinja) looks like a",
        ),
        (
            {"decode": {"engine_kwargs": {"speculative_config": {"method": "x", "model": "/no/such"}}}},
            "decode.engine_kwargs: speculative_config: there is no directory /no/such; ",
        ),
        ({"lora": {"adapters": {"a": "/no/such/adapter"}}}, "lora.adapters.a: /no/such/adapter has no"),
        ({"model_name": "tiny#8b"}, "'tiny#8b' is the name of a model or adapter and has '#'"),
        (
            {"accelerator": "cuda", "accelerator_type": "h100"},
            "accelerator_type: Ray knows no 'h100'; did you mean 'H100'?",
        ),
        (
            {"accelerator": "cuda", "accelerator_type": "A10"},  # Ray Serve LLM would wait for an A10G
            "accelerator_type: Ray knows no 'A10'; did you mean 'A10G'? (what it has no name for is left out",
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


@pytest.mark.slow
@REFUSED
def test_what_cannot_work_is_refused_before_anything_starts(build, tiny, values, message):
    with pytest.raises(ConfigError) as caught:
        build(parse({"model": tiny, **values}))
    assert message in str(caught.value)


REFUSED_OF_TWO = pytest.mark.parametrize(
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
        ({"model": "s3://bucket/b"}, {}, "models.b: 's3://bucket/b' is neither a directory here nor a"),
    ],
)


@pytest.mark.slow
@REFUSED_OF_TWO
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


class TestCheck:
    """`slackserve check` says the same without a Ray, and all of it at once."""

    pytestmark = pytest.mark.slow

    @pytest.fixture(autouse=True)
    def _no_ray(self, monkeypatch):
        monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray would have been started"))

    @pytest.fixture
    def check(self, tmp_path):
        """Runs the command; its exit code, and the lines that it prints of the file."""
        path = tmp_path / "my.yaml"

        def run(values):
            path.write_text(yaml.safe_dump({"port": free_port(), "monitor": {"port": 0}, **values}))
            ran = CliRunner().invoke(app, ["check", "--config", str(path)])
            assert ran.exception is None or isinstance(ran.exception, SystemExit)
            return ran.exit_code, ran.output.replace(f"{path}", "my.yaml").splitlines()

        return run

    @REFUSED
    def test_it_says_what_the_builder_refuses(self, tiny, values, message):
        from deployments.check import problems

        found = problems(parse({"model": tiny, **values}))
        assert message in "\n".join(found)

    @REFUSED_OF_TWO
    def test_it_says_whose_it_is_of_several_models(self, tiny, of_model, values, message):
        from deployments.check import problems

        found = problems(parse({"model": tiny, "models": {"b": {"model": tiny, **of_model}}, **values}))
        assert message in "\n".join(found)
        assert len(found) == 1

    def test_it_says_each_thing_that_is_wrong_in_a_line(self, tiny, check):
        code, lines = check(
            {
                "model": tiny,
                "prefill": {"engine_kwargs": {"quantisation": "awq"}},
                "decode": {"node_labels": {"pool": "a"}},
                "api_keys_file": "nowhere.yaml",
                "profile": "nope.json",
                "tls": {"certificate": "no.pem", "key": "no.key"},
                "lora": {"adapters": {"a": "/no/such/adapter"}},
                "models": {"b": {"model": "/no/such/model", "profile": "neither.json"}},
                "ray_metrics_port": 52365,
                "kv_cache_gib": 100_000,
            }
        )
        assert code == 2
        beginnings = (
            "kv_cache_gib: ",
            "decode.node_labels: ",
            "ray_metrics_port: ",
            "tls.certificate: no.pem cannot be read",
            "nowhere.yaml",
            "prefill.engine_kwargs: vLLM has no engine argument 'quantisation'",
            "profile: nope.json cannot be read",
            "lora.adapters.a: ",
            "models.b: profile: neither.json cannot be read",
            "models.b: There is no directory /no/such/model",
        )
        assert len(lines) == len(beginnings), lines
        for line, beginning in zip(lines, beginnings, strict=True):
            assert line.startswith(f"my.yaml: {beginning}"), line

    def test_nobody_is_told_to_add_the_embedded_model_to_packages_for_something_else(
        self, check, monkeypatch
    ):
        def resolve(*_):
            raise EmbeddedModelMissingError("Install it")

        monkeypatch.setattr(ModelStore, "resolve", resolve)
        _, [line] = check({"accelerator": "cuda"})
        assert "the packages installed here are for CPUs" in line
        _, [line] = check({})
        assert line == "my.yaml: Install it"

    def test_it_says_that_a_configuration_can_be_started_beside_the_server_that_it_replaces(
        self, tiny, check
    ):
        with socket.create_server(("127.0.0.1", 0)) as running:
            code, lines = check({"model": tiny, "port": running.getsockname()[1]})
        assert (code, lines) == (0, ["my.yaml can be started"])

    def test_values_that_no_model_or_machine_could_have_are_lines_as_well(self, tiny, check):
        code, lines = check({"model": tiny, "prefill": {"replicas": 0}, "router": {"placment": "x"}})
        assert code == 2
        assert [line.split(": ")[:2] for line in lines] == [
            ["my.yaml", "prefill.replicas"],
            ["my.yaml", "router"],
        ]

    def test_an_address_that_this_machine_has_not_is_said(self, tiny, check):
        code, lines = check({"model": tiny, "host": "192.0.2.77"})
        assert code == 2
        assert lines == [
            "my.yaml: host: 192.0.2.77 is no address of this machine (Cannot assign requested address)"
        ]

    def test_grammars_that_nobody_holds_against_the_limits_are_said(self, tiny, check):
        given = {"structured_outputs_config": {"backend": "lm-format-enforcer"}}
        code, lines = check({"model": tiny, "decode": {"engine_kwargs": given}})
        assert code == 2
        assert "'lm-format-enforcer' compiles grammars" in lines[0]
