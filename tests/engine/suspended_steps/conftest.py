"""The engines on which steps are suspended."""

import pytest


def pytest_generate_tests(metafunc):
    if "small" in metafunc.fixturenames:
        metafunc.parametrize("shared_engine", ["llama_small_memory"], indirect=True)
    elif "running" in metafunc.fixturenames:
        metafunc.parametrize("shared_engine", ["llama", "llama_tp2"], indirect=True)


@pytest.fixture
def small(running):
    """An engine with room for eleven blocks of 128 tokens."""
    return running
