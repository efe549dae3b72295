"""Settings of all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # several share the cores; PyTorch reads it when it is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")

NEVER_ALONE = [Path(__file__).with_name(folder) for folder in ("engine", "unit")]
"""Where the Makefile does not look for tests that need the machine to themselves."""

# How long an example takes says how busy the machine is; tests that are about time measure it themselves.
# The same examples are tried everywhere; HYPOTHESIS_PROFILE=random looks for others.
settings.register_profile("slackserve", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "slackserve"))


def pytest_collection_modifyitems(items):
    """Refuse a mark with which a test would not be run."""
    for item in items:
        alone = {"serial", "e2e"} & {mark.name for mark in item.iter_markers()}
        if alone and any(item.path.is_relative_to(folder) for folder in NEVER_ALONE):
            raise pytest.UsageError(f"{item.nodeid} is marked {alone.pop()}: it would not be run; move it")
