"""Parsers of an operator's own are in the processes that need them."""

import shutil
import subprocess
import sys

import own_parsers
import pytest
from ray import cloudpickle

TASK = """
import sys
from pathlib import Path
from ray import cloudpickle
from ray.llm._internal.serve.engines.vllm.vllm_engine import _get_vllm_engine_config
from vllm.parser import ParserManager

args, config = _get_vllm_engine_config(cloudpickle.loads(Path(sys.argv[1]).read_bytes()))
parser = ParserManager.get_parser("mine", config.structured_outputs_config.reasoning_parser, True)
print(parser.tool_parser_cls.__name__, parser.reasoning_parser_cls.__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_within", [False, True])
def test_a_process_that_makes_an_engines_configuration_has_them(options, tiny, tmp_path, is_within):
    """On CUDA it is a task of Ray's, and then the replica has the configuration from there."""
    path = shutil.copy(own_parsers.__file__, tmp_path)
    reasoning = {"reasoning_parser": "mine", "reasoning_parser_plugin": path}
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "mine", "tool_parser_plugin": path}
    given = tools | ({"structured_outputs_config": reasoning} if is_within else reasoning)
    config, _ = options({"model": tiny, "decode": {"engine_kwargs": given}})["decode"]
    (tmp_path / "config").write_bytes(cloudpickle.dumps(config))
    command = [sys.executable, "-c", TASK, str(tmp_path / "config")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["MyCalls MyReasoning"], run.stderr
