"""What holds on vLLM's first model runner holds on its second, which is its own choice on GPUs.

The same tests again, in a process of their own: there the second runner's kernels, written in Triton, run in
Triton's interpreter (`tests/support/triton_interpreter`), as they are.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
IN_TURN = "engine/test_exactness.py::test_stopped_at_every_boundary_in_turn"
RANDOM = "engine/test_exactness.py::test_stopped_at_random_boundaries_many_times"
SEVERAL = "engine/test_exactness.py::test_several_suspended_at_operators_and_stopped_there_again"


def run(*arguments):
    """Run tests on the second runner; all pass, and there are some."""
    environment = os.environ | {
        "PYTHONPATH": str(TESTS / "support/triton_interpreter"),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


def test_a_stopped_pass_is_exact_eager_and_compiled():
    run(f"{RANDOM}[llama_operator]", f"{IN_TURN}[llama_compiled]", f"{SEVERAL}[llama_operator]")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param("test_exactness.py", marks=pytest.mark.nightly, id="exactness"),
        pytest.param("suspended_steps", marks=pytest.mark.long, id="suspended_steps"),
        *(pytest.param(f"test_{of}.py", marks=pytest.mark.long, id=of) for of in ("adapters", "seeds")),
    ],
)
def test_whole_files_pass_on_the_second_runner(tests):
    run(f"engine/{tests}")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_first_token_comes_from_prefill_whatever_the_seed():
    run("engine/test_first_token.py", "-k", "one and not ahead")
