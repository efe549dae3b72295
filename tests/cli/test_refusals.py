"""What cannot work on this machine is said at once, and nothing is left running."""

import subprocess
import sys

import pytest
import yaml
from ports import free_port

from benchmarks.harness.local_server import environment
from benchmarks.harness.tiny_models import build_tiny_llama

pytestmark = pytest.mark.slow


def test_gpus_with_the_packages_for_cpus(tmp_path):
    path = tmp_path / "config.yaml"
    model = build_tiny_llama(tmp_path / "tiny")
    path.write_text(yaml.safe_dump({"model": str(model), "port": free_port(), "accelerator": "cuda"}))
    run = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "serve", "--config", str(path)],
        env=environment() | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 2, run.stderr
    assert "ConfigError: accelerator: cuda, but the packages installed here are for CPUs" in run.stderr
    assert "install the extra `cuda`" in run.stderr
