"""The engines on which steps are suspended."""

import pytest


def pytest_generate_tests(metafunc):
    if "running" in metafunc.fixturenames:
        metafunc.parametrize("shared_engine", ["llama", "llama_tp2"], indirect=True)
    if "small" in metafunc.fixturenames:
        metafunc.parametrize("shared_engine", ["llama_small_memory"], indirect=True)


@pytest.fixture
def small(shared_engine):
    """An engine with room for eleven blocks of 128 tokens, at rest before and after."""
    shared_engine.forget()
    yield shared_engine
    shared_engine.finish()
    shared_engine.check_at_rest()
