"""One fleet of two prefill and two decode replicas for all tests of failures."""

import os
from pathlib import Path

import fleet as fleets
import pytest
import ray
from ports import free_port, side_channels
from serving import deployed

from benchmarks.harness.otlp import receiving
from benchmarks.harness.tiny_models import build_tiny_llama
from engine_host.processes import named_shared_memory

KEYS = {"acme": "key-of-acme", "single": "key-of-single"}
_FAULTS = Path(fleets.__file__).parent / "faults"


@pytest.fixture(scope="package")
def spans():
    """All spans of the fleet's requests."""
    with receiving(free_port()) as receiver:
        yield receiver


@pytest.fixture(scope="package")
def fleet(tmp_path_factory, spans):
    directory = tmp_path_factory.mktemp("fleet")
    faults = directory / "faults.json"
    faults.write_text("{}")
    os.environ["SLACKSERVE_TEST_FAULTS"] = str(faults)
    shared_memory = named_shared_memory()
    ports = side_channels()
    config = {
        "model": str(build_tiny_llama(directory / "tiny", context=16_384)),
        "model_name": "tiny",
        "port": free_port(),
        "kv_transfer": ports,
        "max_model_len": 16_384,
        "warmup_tokens": [32, 512],
        "ingress_replicas": 2,
        "prefill": {
            "replicas": 2,
            "max_ongoing_requests": 4,
            "engine_kwargs": {"max_num_batched_tokens": 4096},
        },
        # An engine takes a pass of the longest length when it starts.
        "decode": {"replicas": 2, "drain_s": 100, "engine_kwargs": {"max_num_batched_tokens": 512}},
        "monitor": {"port": 0, "shed": False},
        "tracing": {"endpoint": f"http://127.0.0.1:{spans.port}", "ratio": 1},
        "tiers": {
            "premium": {"ttft_ms": 30_000, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 30_000, "weight": 2},
            "background": {"weight": 1},
        },
        "api_keys": [
            {"tenant": "acme", "key": KEYS["acme"]},
            {"tenant": "single", "key": KEYS["single"], "limits": {"max_concurrent": 1}},
        ],
    }
    with deployed(directory, config, KEYS, python_path=(_FAULTS,)) as deployment:
        del os.environ["SLACKSERVE_TEST_FAULTS"]
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
            of_prefill = range(ports["prefill_port"], ports["decode_port"])
            yield fleets.Fleet(deployment, of_prefill, faults, shared_memory)
        finally:
            ray.shutdown()
