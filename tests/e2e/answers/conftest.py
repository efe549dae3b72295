"""One application with two models and adapters of both, for all tests of answers and of models apart."""

import pytest
from ports import free_port, side_channels
from serving import deployed

from benchmarks.harness.tiny_models import build_tiny, build_tiny_adapter

KEYS = {"acme": "key-of-acme", "metered": "key-of-metered"}


@pytest.fixture(scope="package")
def answers():
    """How decode engines cut tool calls and schemas; without whitespace, a random model ends an object."""
    return {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "pythonic",
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }


@pytest.fixture(scope="package")
def places(tmp_path_factory, tiny_model):
    """Where each model is, and the adapters: `a` and `b` of the first, `small-lora` of the second."""
    directory = tmp_path_factory.mktemp("two")
    small = build_tiny(directory / "small", "llama", layers=2, context=1024, hidden=64)
    return {
        "tiny": tiny_model,
        "a": build_tiny_adapter(directory / "a", tiny_model, 0),
        "b": build_tiny_adapter(directory / "b", tiny_model, 1),
        "small": small,
        "small-lora": build_tiny_adapter(directory / "lora", small, 1),
    }


@pytest.fixture(scope="package")
def monitor_port():
    return free_port()


@pytest.fixture(scope="package")
def served(tmp_path_factory, places, answers, monitor_port):
    config = {
        "model": str(places["tiny"]),
        "model_name": "tiny",
        "lora": {"adapters": {name: str(places[name]) for name in "ab"}},
        "decode": {"engine_kwargs": answers},
        "models": {
            "small": {
                "model": str(places["small"]),
                "lora": {"adapters": {"small-lora": str(places["small-lora"])}},
                "warmup_tokens": [32, 256],
            }
        },
        "port": free_port(),
        "kv_transfer": side_channels(),
        "monitor": {"port": monitor_port},
        "admission": {"max_backlog_s": 0.1},
        "warmup_tokens": [32, 512],
        "tiers": {"standard": {"ttft_ms": 20_000}},
        "api_keys": [
            {"tenant": "acme", "key": KEYS["acme"]},
            {"tenant": "metered", "key": KEYS["metered"], "limits": {"max_concurrent": 1}},
        ],
    }
    with deployed(tmp_path_factory.mktemp("serve-two"), config, KEYS) as running:
        yield running
