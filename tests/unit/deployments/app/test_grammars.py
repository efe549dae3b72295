"""One way to keep to grammars is all requests'."""

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from deployments.config import ConfigError
from deployments.config.settings import parse


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
