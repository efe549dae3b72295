"""A real fleet grows under load and shrinks after it, and nobody gets an error."""

import asyncio
import random
import time

import pytest
from serving import serving_tiny
from steady_load import SteadyLoad

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

KEY = "key-of-acme"
MOST = 3


@pytest.fixture
def deployment(tmp_path):
    """On few cores three replicas do not compute thrice as much: they are planned to be in use little."""
    settings = {
        "max_model_len": 4096,
        "prefill": {"replicas": 1, "max_replicas": MOST},
        "autoscaling": {"start_s": 20, "keep_s": 20, "busy": 0.3},
        "tiers": {
            "premium": {"ttft_ms": 30_000, "sheddable": False, "weight": 4},
            "standard": {"ttft_ms": 30_000, "weight": 2},
            "background": {"weight": 1},
        },
    }
    with serving_tiny(tmp_path, KEY, **settings) as running:
        yield running


async def replicas(deployment):
    """Prefill replicas that take requests."""
    fleet = await asyncio.to_thread(deployment.fleet)
    return sum(not state["draining"] for state in fleet["prefill"])


async def until(deployment, count, within_s):
    """Seconds until there are so many."""
    started_s = time.monotonic()
    while await replicas(deployment) != count:
        assert time.monotonic() - started_s < within_s, f"{await replicas(deployment)} of {count}"
        await asyncio.sleep(0.5)
    return time.monotonic() - started_s


async def ask_now_and_then(client, answers):
    while True:
        answer = await asyncio.to_thread(
            client.completions.create,
            model="tiny",
            prompt=[random.randrange(200) for _ in range(64)],
            max_tokens=4,
        )
        answers.append(answer.usage.completion_tokens)
        await asyncio.sleep(0.5)


async def test_one_replica_becomes_three_under_load_and_one_again_without_an_error(deployment, capsys):
    assert await replicas(deployment) == 1
    answers = []
    async with SteadyLoad(deployment.url, KEY) as load:
        grown_s = await until(deployment, MOST, 150)
        await asyncio.sleep(10)
        with load.paused():
            asking = asyncio.create_task(ask_now_and_then(deployment.client(), answers))
            shrunk_s = await until(deployment, 1, 150)
            await asyncio.sleep(5)
            asking.cancel()
    assert len(load.asked) > 20
    assert {one.error for one in load.asked} == {None}
    assert len(answers) > 20
    log = deployment.log.read_text()
    took = f"1 to {MOST} in {grown_s:.0f} s, back in {shrunk_s:.0f} s, {len(load.asked)} answers under load"
    with capsys.disabled():
        print(f"\n{took}")  # noqa: T201 - the measurements
    assert "tier_scaled tier=prefill" in log
    assert not any(failed in log for failed in ("autoscaling_failed", "request_failed"))
