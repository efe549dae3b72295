"""How long a decode replica that starts waits for prefill replicas."""

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError
from waiting import until

from decode_node import handshakes
from decode_node.handshakes import Handshakes, NothingPulledError


class Tier:
    """Prefill replicas, of which as many answer as `up` says."""

    def __init__(self, up):
        self.up = up

    async def broadcast(self, method, request, within_s):
        assert method == "prewarm_prefill"
        return [{"remote_port": number} for number in range(self.up)]


class Engine:
    """Remembers from whom it has pulled; what comes from `broken` does not come, and from `late` never."""

    def __init__(self, broken=(), late=()):
        self.pulled = []
        self.asked = 0
        self.broken = broken
        self.late = late
        self.serving = OpenAIServingChat.__new__(OpenAIServingChat)
        self.serving.create_error_response = create_error_response

    async def completions(self, request, info):
        port = request.kv_transfer_params["remote_port"]
        self.asked += 1
        if port in self.broken:
            raise GenerationError
        if port in self.late:
            yield await self.serving.chat_completion_full_generator(request, never(), "", "", [], None, None)
        self.pulled.append(port)
        yield "token"


async def never():
    await asyncio.Event().wait()
    yield


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    limits = {"FIRST_S": 1.0, "OTHERS_S": 0.4, "WITHOUT_PREFILL_S": 0.2, "_RETRY_S": 0.05, "_LATER_S": 0.1}
    for name, limit_s in limits.items():
        monkeypatch.setattr(handshakes, name, limit_s)


async def began(up, *, needed, broken=(), late=()):
    """The tier, the engine and how long a replica of two prefill replicas' has waited."""
    tier, engine = Tier(up), Engine(broken, late)
    backend = SimpleNamespace(prepare_prefill_request=lambda request, peer: request)
    started_s = time.monotonic()
    shaking = Handshakes(engine, tier, "tiny", backend)
    await shaking.begin(2, needed=needed)
    return tier, engine, shaking, time.monotonic() - started_s


@pytest.mark.parametrize("needed", [False, True])
async def test_all_are_known_at_once(needed):
    _, engine, _, took_s = await began(2, needed=needed)
    assert engine.pulled == [0, 1]
    assert took_s < 0.2


async def test_one_that_needs_prefill_waits_for_the_tier():
    _, engine, _, took_s = await began(0, needed=True)
    assert engine.pulled == []
    assert took_s >= 1.0


async def test_one_that_can_compute_prompts_does_not_wait_and_meets_them_later():
    tier, engine, shaking, took_s = await began(0, needed=False)
    assert 0.2 <= took_s < 0.9
    assert not shaking.has_pulled
    tier.up = 2
    await asyncio.wait_for(shaking._task, 1.0)
    assert engine.pulled == [0, 1]
    assert shaking.has_pulled


async def test_one_replica_that_is_down_is_not_waited_for_long():
    _, engine, _, took_s = await began(1, needed=True)
    assert set(engine.pulled) == {0}
    assert 0.4 <= took_s < 0.9


async def test_one_replica_whose_kv_cache_does_not_come_keeps_nobody_from_starting(monkeypatch):
    """It may be an old one, which ends soon, or one that has just died."""
    told = []
    monkeypatch.setattr(handshakes.logs, "event", lambda name, **what: told.append((name, what)))
    _, engine, _, took_s = await began(2, needed=True, broken={1})
    assert set(engine.pulled) == {0}
    assert took_s >= 0.4
    assert "handshake_failed" in {name for name, _ in told}
    assert told[-1] == ("handshakes_done", {"replicas": 1, "expected": 2})


async def test_one_that_can_pull_from_nobody_does_not_start_and_says_what_to_look_at():
    with pytest.raises(NothingPulledError, match="both tiers need the same engine_kwargs"):
        await began(2, needed=True, broken={0, 1})


async def test_pulls_that_are_late_say_nothing_against_the_configuration(monkeypatch):
    """vLLM answers the end of the time with an error of its own."""
    monkeypatch.setattr(handshakes, "HANDSHAKE_DUE_S", 0.05)
    told = []
    monkeypatch.setattr(handshakes.logs, "event", lambda name, **_: told.append(name))
    await began(2, needed=True, late={0, 1})
    assert told == ["handshakes_done"]


@pytest.mark.parametrize("needed", [False, True])
async def test_one_that_learns_later_that_nothing_can_be_pulled_says_so_until_something_can(
    needed, monkeypatch
):
    """The prefill replicas take longer to load than it waits for them."""
    monkeypatch.setattr(handshakes, "FIRST_S", 0.2)
    told = []
    monkeypatch.setattr(handshakes.logs, "event", lambda name, **what: told.append((name, what)))
    tier, engine, shaking, _ = await began(0, needed=needed, broken={0, 1})
    assert shaking.failure is None
    tier.up = 2
    await until(lambda: shaking.failure is not None)
    assert "both tiers need the same engine_kwargs" in str(shaking.failure)
    await until(lambda: "nothing_pulled" in [name for name, _ in told])
    (what,) = [what for name, what in told if name == "nothing_pulled"][:1]
    assert (what["error"], what["level"]) == (str(shaking.failure), logging.ERROR)
    engine.broken = {1}
    await until(lambda: shaking.failure is None)
    await asyncio.wait_for(shaking._task, 1.0)
    assert engine.pulled[0] == 0


@pytest.mark.parametrize("needed", [False, True])
async def test_a_pull_that_is_late_does_not_tell_that_something_can_be_pulled(needed, monkeypatch):
    """An engine that computes all prompts itself is busy, and takes long over what fails in the end."""
    monkeypatch.setattr(handshakes, "FIRST_S", 0.2)
    monkeypatch.setattr(handshakes, "HANDSHAKE_DUE_S", 0.05)
    tier, engine, shaking, _ = await began(0, needed=needed, broken={0, 1})
    tier.up = 2
    await until(lambda: shaking.failure is not None)
    engine.broken, engine.late, engine.asked = (), {0, 1}, 0
    await until(lambda: engine.asked > 2)
    assert shaking.failure is not None
    assert not shaking._task.done(), "it goes on"
    engine.late = ()
    await asyncio.wait_for(shaking._task, 1.0)
    assert shaking.failure is None
    assert set(engine.pulled) == {0, 1}


async def test_one_that_starts_with_pulls_that_are_all_late_learns_later_that_they_fail(monkeypatch):
    monkeypatch.setattr(handshakes, "HANDSHAKE_DUE_S", 0.05)
    _, engine, shaking, _ = await began(2, needed=True, late={0, 1})
    assert shaking.failure is None
    engine.broken = {0, 1}
    await until(lambda: shaking.failure is not None)


async def test_one_failed_try_says_nothing_against_a_replica_that_serves(monkeypatch):
    """The prefill replica ends just then; Serve would replace the decode replica, with all its streams."""
    monkeypatch.setattr(handshakes, "FIRST_S", 0.2)
    tier, engine, shaking, _ = await began(0, needed=True, broken={0, 1})
    tier.up = 2
    await until(lambda: engine.asked == 2)
    assert shaking.failure is None
    engine.broken = ()
    await asyncio.wait_for(shaking._task, 1.0)
    assert shaking.failure is None
    assert engine.pulled == [0, 1]


async def test_what_is_pulled_for_a_request_shows_that_something_can_be(monkeypatch):
    monkeypatch.setattr(handshakes, "FIRST_S", 0.2)
    told = []
    monkeypatch.setattr(handshakes.logs, "event", lambda name, **_: told.append(name))
    tier, engine, shaking, _ = await began(0, needed=True, broken={0, 1})
    tier.up = 2
    await until(lambda: engine.asked)
    shaking.pulled()
    told.clear()
    await until(lambda: "handshakes_done" in told)
    assert shaking.failure is None
    await until(lambda: "nothing_pulled" in told)
    assert shaking.failure is not None, "of none since"
    shaking.pulled()
    assert shaking.failure is None


async def test_a_call_to_the_tier_that_fails_does_not_end_the_handshakes_of_one_that_serves():
    tier, engine, _, _ = await began(0, needed=False)

    async def fails(*_, **__):
        tier.broadcast = of_class
        raise ConnectionError

    tier.broadcast, of_class = fails, tier.broadcast
    tier.up = 2
    await until(lambda: engine.pulled)
