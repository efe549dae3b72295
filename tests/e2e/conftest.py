"""One real deployment for all end-to-end tests: Ray, two vLLM engines, NIXL, a tiny random model."""

import gc
import os
from pathlib import Path

import pytest
from ports import free_port, side_channels
from serving import Deployment, deployed

from benchmarks.harness.tiny_models import build_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def short_collections():
    """A whole collection of what pytest has imported takes half a second, and the server would seem to."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def otlp_port() -> int:
    """Where the deployment sends the spans of requests that bring a sampled trace.

    It is free until a test listens there, so it is none of those that the system gives away meanwhile.
    """
    return free_port()


@pytest.fixture(scope="session")
def ray_metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def deployment(tmp_path_factory, tiny_model, otlp_port, ray_metrics_port):
    keys = {name: f"key-of-{name}" for name in ("acme", "batch", "metered", "ci", "crowd")}
    if url := os.environ.get("SLACKSERVE_TEST_URL"):  # one that runs already, with the configuration below
        yield Deployment(url, "tiny", None, None, keys)
        return
    config = {
        "model": str(tiny_model),
        "model_name": "tiny",
        "port": free_port(),
        "grpc": {"port": free_port()},
        "ray_metrics_port": ray_metrics_port,
        "kv_transfer": side_channels(),
        # These tests pile requests up and let deadlines pass; nobody is to be turned away for that.
        "monitor": {"port": free_port(), "shed": False},
        "tracing": {"endpoint": f"http://127.0.0.1:{otlp_port}", "ratio": 0},
        "admission": {"calm_s": 600},
        "max_model_len": 4096,
        "warmup_tokens": [32, 512, 2048],
        "preemption": {"stop_within_ms": 10_000},  # whole prompts, however slow the machine
        "limits": {"max_body_bytes": 200_000, "idle_timeout_s": 20},
        "tiers": {
            "premium": {"ttft_ms": 2000, "tpot_ms": 200, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 4000, "tpot_ms": 400, "weight": 2},
            "background": {"weight": 1},
        },
        "api_keys": [
            {"tenant": "acme", "key": keys["acme"]},
            {"tenant": "batch", "key": keys["batch"], "highest_tier": "background"},
            {"tenant": "crowd", "key": keys["crowd"], "limits": {"max_concurrent": 2}},
            {"tenant": "acme", "name": "ci", "key": keys["ci"], "key_limits": {"max_concurrent": 1}},
            {
                "tenant": "metered",
                "key": keys["metered"],
                "limits": {"output_tokens_per_s": 0.1, "burst_output_tokens": 1000},
            },
        ],
    }
    with deployed(tmp_path_factory.mktemp("serve"), config, keys) as running:
        yield running
