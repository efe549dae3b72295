"""Prompts are made tokens of in turn by tier and tenant, one at a time."""

import asyncio
import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import vllm.renderers
from vllm.utils.async_utils import make_async

from decode_node.fair_places import FairPlaces
from decode_node.tokenizing import turns
from decode_node.tokenizing.turns import rendering_for
from slo.request import JobId, RequestContext
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM


def request(tenant, tier=PREMIUM, weight=1.0):
    return RequestContext(JobId("job"), "request", tier, None, tenant=tenant, tenant_weight=weight)


class Renderer:
    """As vLLM's: one thread of it does all, what is held until it is let go."""

    def __init__(self):
        self.done, self.begun, self._go_on = [], threading.Semaphore(0), threading.Semaphore(0)
        executor = ThreadPoolExecutor(1)
        self._tokenize_prompt_async = make_async(self._work, executor=executor)
        self._apply_chat_template_async = make_async(self._work, executor=executor)
        self._async_tokenizer_decode = make_async(self._work, executor=executor)
        self.places = FairPlaces(1, DEFAULT_TIERS)
        turns.stand_before(self, self.places)

    def _work(self, what, **_):
        text = what["prompt"] if isinstance(what, dict) else what
        self.begun.release()
        assert self._go_on.acquire(timeout=10)
        if text == "wrong":
            raise ValueError(text)
        self.done.append(text)
        return len(text)

    def ask(self, text, context=None):
        """A task of a prompt's, which has been added to those that wait when this returns after a moment."""

        async def asks():
            with nullcontext() if context is None else rendering_for(context):
                return await self._tokenize_prompt_async({"prompt": text})

        return asyncio.create_task(asks())

    async def has_begun(self):
        assert await asyncio.to_thread(self.begun.acquire, timeout=10)

    def go_on(self, many=1):
        self._go_on.release(many)


@pytest.fixture
def renderer():
    made = Renderer()
    yield made
    assert (made.places._free, len(made.places._turns)) == (1, 0)


LONG = "long" * 1000


async def test_a_short_prompt_of_a_higher_tier_waits_for_one_other_at_most(renderer):
    long = [renderer.ask(LONG, request("many", BACKGROUND)) for _ in range(4)]
    await renderer.has_begun()
    short = renderer.ask("short", request("one"))
    await asyncio.sleep(0)
    renderer.go_on(2)
    assert await short == 5
    assert renderer.done == [LONG, "short"]
    renderer.go_on(3)
    assert await asyncio.gather(*long) == [len(LONG)] * 4


async def test_within_a_tier_a_tenants_prompts_wait_for_one_of_each_other(renderer):
    long = [renderer.ask(LONG, request("many")) for _ in range(4)]
    await renderer.has_begun()
    short = [renderer.ask("short", request("few")) for _ in range(3)]
    await asyncio.sleep(0)
    renderer.go_on(7)
    await asyncio.gather(*long, *short)
    assert renderer.done == [LONG, "short", "short", "short", LONG, LONG, LONG], "by their work"


async def test_the_prompts_of_a_request_take_turns_as_those_of_several_do(renderer):
    async def several():
        with rendering_for(request("many")):
            return await asyncio.gather(
                *(renderer._tokenize_prompt_async({"prompt": LONG}) for _ in range(3))
            )

    long = asyncio.create_task(several())
    await renderer.has_begun()
    short = renderer.ask("short", request("one"))
    await asyncio.sleep(0)
    renderer.go_on(4)
    await asyncio.gather(long, short)
    assert renderer.done == [LONG, "short", LONG, LONG]


async def test_a_chat_has_a_turn_for_its_template_and_one_for_its_tokens(renderer):
    async def chat():
        with rendering_for(request("one")):
            await renderer._apply_chat_template_async("template", tools=[{"name": "call"}])
            return await renderer._tokenize_prompt_async({"prompt": "chat"})

    renderer.go_on(2)
    assert await chat() == 4
    assert renderer.done == ["template", "chat"]


async def test_what_is_nobodys_goes_last(renderer):
    first, own = renderer.ask("first"), renderer.ask("own")
    await renderer.has_begun()
    low = renderer.ask("low", request("one", BACKGROUND))
    high = renderer.ask("high", request("one"))
    await asyncio.sleep(0)
    renderer.go_on(4)
    await asyncio.gather(first, own, low, high)
    assert renderer.done[:2] == ["first", "high"]


async def test_who_leaves_while_it_waits_leaves_nothing_behind(renderer):
    first = renderer.ask("first", request("a"))
    await renderer.has_begun()
    leaves, stays = renderer.ask("leaves", request("b")), renderer.ask("stays", request("c"))
    await asyncio.sleep(0)
    leaves.cancel()
    renderer.go_on(2)
    assert await stays == 5
    assert (await first, leaves.cancelled(), renderer.done) == (5, True, ["first", "stays"])


async def test_who_leaves_as_it_is_given_its_turn_gives_it_on(renderer):
    first = renderer.ask("first", request("a"))
    await renderer.has_begun()
    leaves, stays = renderer.ask("leaves", request("b")), renderer.ask("stays", request("c"))
    first.add_done_callback(lambda _: leaves.cancel())
    renderer.go_on(3)
    assert await stays == 5
    assert await first == 5
    await asyncio.wait([leaves])


async def test_what_the_thread_has_begun_keeps_its_turn_when_nobody_wants_it_any_more(renderer):
    """Whoever comes next would wait behind it in the thread, in no order."""
    leaves = renderer.ask("leaves", request("a"))
    await renderer.has_begun()
    leaves.cancel()
    await asyncio.wait([leaves])
    low = renderer.ask("low", request("b", BACKGROUND))
    await asyncio.sleep(0)
    high = renderer.ask("high", request("b"))
    await asyncio.sleep(0)
    assert not renderer.begun.acquire(blocking=False)
    renderer.go_on(3)
    assert await asyncio.gather(low, high) == [3, 4]
    assert renderer.done == ["leaves", "high", "low"]


async def test_what_fails_gives_its_turn_on(renderer):
    wrong, right = renderer.ask("wrong", request("a")), renderer.ask("right", request("a"))
    renderer.go_on(2)
    with pytest.raises(ValueError, match="wrong"):
        await wrong
    assert await right == 5


async def test_what_fails_for_somebody_who_has_left_is_nothing_to_complain_of(renderer, caplog):
    wrong = renderer.ask("wrong", request("a"))
    await renderer.has_begun()
    wrong.cancel()
    await asyncio.wait([wrong])
    right = renderer.ask("right", request("a"))
    renderer.go_on(2)
    assert await right == 5
    del wrong
    gc.collect()
    assert not caplog.records


async def test_what_is_nested_too_deep_to_be_counted_has_no_turn(renderer):
    nested = []
    for _ in range(2_000):
        nested = [nested]
    with pytest.raises(RecursionError):
        await renderer._apply_chat_template_async(nested)


def test_each_call_that_a_renderer_of_vllms_has_its_thread_do_takes_a_turn():
    """But for embeddings, which no client may send."""
    source = "".join(path.read_text() for path in Path(*vllm.renderers.__path__).glob("*.py"))
    made = re.findall(r"self\.(\w+) = make_async\(\s*[\w.]+,\s*executor=self\._executor", source)
    assert set(made) == {*turns._CALLS, "_safe_load_prompt_embeds_async"}
