"""What vLLM would not take is refused, and nothing else: held against vLLM itself."""

import dataclasses
import shutil

import own_parsers
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from benchmarks.harness.tiny_models import build_tiny_llama
from deployments.config import ConfigError
from deployments.config.settings import parse
from deployments.engines import values
from deployments.engines.values import refusal

pytestmark = pytest.mark.slow

AUTO = {"enable_auto_tool_choice": True}
VALUES = ["nonsense", "5", "0.5", "true", -1, 0, 1, 2.5, True, 1e9, [1], {"a": 1}]


def test_a_section_that_is_written_as_text_is_left_to_vllm():
    given = {"structured_outputs_config": '{"backend": "auto"}', "reasoning_parser": "qwen33"}
    assert "did you mean 'qwen3'?" in refusal(given)


ARGUMENTS = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
OF_THE_SERVER = {field.name for field in dataclasses.fields(FrontendArgs)}
"""What Ray gives to vLLM's server, also where its engine has an argument of that name."""
LATER = {"load_format", "reasoning_parser", "reasoning_parser_plugin"}
"""What these name is looked for when weights are loaded, and where answers are made."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", context=2048))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"dtype": "bf16"}, "vLLM has no dtype 'bf16'; did you mean 'bfloat16'?"),
        ({"dtype": "fp16"}, "vLLM has no dtype 'fp16'; did you mean 'float16'?"),
        ({"quantization": "fp9"}, "vLLM has no quantization 'fp9'; did you mean 'fp8'?"),
        ({"kv_cache_dtype": "fp8e4m3"}, "vLLM has no kv_cache_dtype 'fp8e4m3'; did you mean 'fp8_e4m3'?"),
        ({"kv_cache_dtype": "x"}, "vLLM has no kv_cache_dtype 'x'; known are auto, float16, "),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype: Input should be 'auto', 'float16', "),
        ({"load_format": "safetensor"}, "vLLM has no load_format 'safetensor'; did you mean 'safetensors'?"),
        ({"attention_backend": "FLASHATTN"}, "no attention_backend 'FLASHATTN'; did you mean 'flash_attn'?"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization: Input should be less than or equal to 1 "),
        ({"gpu_memory_utilization": 0}, "Input should be greater than 0 (given: 0)"),
        (
            {"seed": "x"},
            "seed: Input should be a valid integer, unable to parse string as an integer (given: ",
        ),
        ({"reasoning_parser": "qwen33"}, "no reasoning_parser 'qwen33'; did you mean 'qwen3'?"),
        ({"tool_call_parser": "Hermes"} | AUTO, "no tool_call_parser 'Hermes'; did you mean 'hermes'?"),
        (AUTO, "enable_auto_tool_choice needs a tool_call_parser"),
        (
            {"chat_template_content_format": "openAI"},
            "vLLM has no chat_template_content_format 'openAI'; did you mean 'openai'?",
        ),
        ({"enable_prompt_tokens_details": "perhaps"}, "Input should be a valid boolean"),
    ],
    ids=str,
)
def test_a_value_that_vllm_does_not_know_is_refused_with_the_nearest(given, problem):
    assert problem in (refusal(given) or "")


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": None},
        {"dtype": "half"},
        {"quantization": "FP8"},
        {"kv_cache_dtype": "fp8"},
        {"load_format": "Safetensors"},
        {"attention_backend": "flash_attn"},
        {"attention_backend": "AUTO"},
        {"gpu_memory_utilization": "0.9"},
        {"gpu_memory_utilization": 1},
        {"moe_backend": "flashinfer-cutlass"},
        {"reasoning_parser": ""},
        {"reasoning_parser": "qwen3", "reasoning_parser_plugin": ""},
        {"tool_call_parser": "mine"},
        {"tool_call_parser": "hermes"} | AUTO,
        {"chat_template_content_format": "openai", "response_role": "assistant"},
        {"default_chat_template_kwargs": {"enable_thinking": False}},
        {"enable_prompt_tokens_details": True},
    ],
    ids=str,
)
def test_a_value_that_vllm_takes_is_not_refused(given):
    assert refusal(given) is None


def test_what_a_plugin_registers_is_known(monkeypatch):
    monkeypatch.setattr(ToolParserManager, "lazy_parsers", dict(ToolParserManager.lazy_parsers))
    methods = [*QUANTIZATION_METHODS]
    monkeypatch.setattr(values, "QUANTIZATION_METHODS", methods)

    def plugin():
        ToolParserManager.register_lazy_module("mine", "my.parsers", "MyParser")
        methods.append("mine")

    monkeypatch.setattr(values, "load_general_plugins", plugin)
    assert refusal({"tool_call_parser": "mine", "quantization": "mine"} | AUTO) is None


FILES = pytest.mark.parametrize(
    ("parser", "file"),
    [
        ({"reasoning_parser": "mine"}, lambda path: {"reasoning_parser_plugin": path}),
        (
            {"reasoning_parser": "mine"},
            lambda path: {"structured_outputs_config": {"reasoning_parser_plugin": path}},
        ),
        ({"tool_call_parser": "mine"} | AUTO, lambda path: {"tool_parser_plugin": path}),
    ],
    ids=["reasoning", "within", "tools"],
)


@pytest.fixture
def _no_parsers(monkeypatch):
    for manager in (ReasoningParserManager, ToolParserManager):
        monkeypatch.setattr(manager, "lazy_parsers", dict(manager.lazy_parsers))


@FILES
@pytest.mark.usefixtures("_no_parsers")
def test_what_a_file_registers_is_known(parser, file, tmp_path):
    path = shutil.copy(own_parsers.__file__, tmp_path)
    assert refusal(parser | file(path)) is None
    [key] = parser.keys() - AUTO.keys()
    assert f"vLLM has no {key} 'others'" in refusal(parser | {key: "others"} | file(path))


@FILES
def test_a_file_that_is_not_there_is_refused(parser, file, tmp_path):
    for path in (tmp_path, tmp_path / "mine.py"):
        assert f"_parser_plugin: there is no file {path}" in refusal(parser | file(str(path)))


@pytest.mark.parametrize("template", ["/no/such.jinja", "chatml", "", "."])
def test_a_chat_template_that_is_neither_text_nor_a_file_is_refused(template):
    assert f"chat_template: The supplied chat template ({template}) " in refusal({"chat_template": template})


def test_a_chat_template_is_text_a_file_or_one_of_vllms(tmp_path):
    path = tmp_path / "my.jinja"
    path.write_text("{{ messages }}")
    for template in ("{{ messages }}", "{{ messages }}" * 1000, str(path), "template_chatml.jinja", None):
        assert refusal({"chat_template": template}) is None


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "../no-such", "~", "~/no-such"])
def test_a_draft_model_that_is_not_there_is_refused(model):
    assert f"there is no directory {model}; " in refusal({"speculative_config": {"model": model}})


def test_a_draft_model_is_a_directory_or_has_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    for model in (str(tmp_path), "./draft", "draft", "org/draft", "ngram", None):
        assert refusal({"speculative_config": {"model": model}}) is None


def test_no_default_of_vllms_is_refused():
    defaults = AsyncEngineArgs(
        model="org/model", prefix_cache_retention_interval=None
    )  # else a mark of "not given"
    assert refusal({key: getattr(defaults, key) for key in ARGUMENTS}) is None
    assert refusal(vars(FrontendArgs())) is None


def test_nothing_is_refused_that_vllm_would_take(tiny):
    AsyncEngineArgs(model=tiny).create_engine_config()
    refused = [
        (key, value)
        for key in ARGUMENTS
        for value in VALUES
        if not (key in LATER and isinstance(value, str)) and refusal({key: value}) is not None
    ]
    assert len({key for key, _ in refused}) > 100
    taken = []
    for key, value in refused:
        try:
            AsyncEngineArgs(**{"model": tiny, key: value}).create_engine_config()
            FrontendArgs(**({key: value} if key in OF_THE_SERVER else {}))
        except Exception:  # noqa: BLE001 - whatever vLLM raises
            continue
        taken.append((key, value))
    assert not taken


@pytest.mark.parametrize("key", [key for key in ARGUMENTS if key.startswith("data_parallel_")])
def test_all_of_data_parallelism_is_the_number_of_replicas(key):
    with pytest.raises(ConfigError, match=f"may not set '{key}'; use the pool's replicas"):
        parse({"decode": {"engine_kwargs": {key: 1}}})
