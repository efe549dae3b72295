"""A replica whose engine dies gets no more requests, and is replaced."""

import httpx
import psutil
import pytest
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e


def engine_core_of(tier):
    """The EngineCore process of the tier's replica."""
    for process in psutil.process_iter(["cmdline"]):
        if "VLLM::EngineCore" in " ".join(process.info["cmdline"] or []):
            above = [" ".join(parent.cmdline()) for parent in process.parents()]
            if any(f"ServeReplica:slackserve:{tier}:" in line for line in above):
                return process
    pytest.fail(f"no EngineCore below a {tier} replica")


def test_after_its_engine_died_a_replica_is_avoided_and_then_replaced(deployment):
    def ask():
        return httpx.post(
            f"{deployment.url}/v1/completions",
            json={"model": "tiny", "prompt": "hello", "max_tokens": 2},
            headers={"authorization": f"Bearer {deployment.keys['acme']}"},
            timeout=60,
        )

    assert ask().status_code == 200
    engine_core_of("Prefill").kill()
    assert_soon(lambda: ask().status_code == 503, 5, "requests still go to the dead engine")
    refused = ask()
    assert refused.json()["error"]["code"] == "no_replica"
    assert int(refused.headers["retry-after"]) >= 1
    assert_soon(lambda: ask().status_code == 200, 180, "the replica was not replaced")
    assert_soon(lambda: at_rest(deployment), 10)
