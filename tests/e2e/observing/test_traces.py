"""Traces of real requests, received as a collector does."""

import asyncio
import contextlib
import random
import secrets
import time

import pytest
from waiting import assert_soon, at_rest

from benchmarks.harness.otlp import receiving

pytestmark = pytest.mark.e2e

LONG, URGENT = 3900, 64
PATH = {
    "ingress": "",
    "place": "ingress",
    "decode_request": "ingress",
    "tokenise": "decode_request",
    "prefill_call": "decode_request",
    "prefill_request": "prefill_call",
    "queue": "prefill_request",
    "prefill_run": "prefill_request",
    "handoff": "decode_request",
    "decode": "decode_request",
}
"""The spans of ours that every request has, and whose child each is; the first is the client's."""


class Caller:
    """Sends requests that bring a sampled trace."""

    def __init__(self, deployment):
        self._http = deployment.http()

    async def ask(self, tokens, tier, flags="01", ttft_ms=None, path="completions", **fields):
        """(Id of the trace, id of the client's span, seconds)."""
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        headers = {"x-slo-tier": tier, "traceparent": f"00-{trace_id}-{span_id}-{flags}"}
        headers |= {} if ttft_ms is None else {"x-slo-ttft-ms": f"{ttft_ms:.0f}"}
        body = {"model": "tiny", "prompt": random.choices(range(200), k=tokens), "stream": True}
        body |= {"max_tokens": 4, "ignore_eos": True}
        started_s = asyncio.get_running_loop().time()
        answer = await self._http.post(f"/v1/{path}", json=body | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        return trace_id, span_id, asyncio.get_running_loop().time() - started_s


def by_name(spans):
    return {span.name: span for span in spans}


async def received(receiver, trace_id, *names):
    """The spans of a trace, once those of these names are there; processes export them every half second."""
    missing = lambda: {*names} - {*by_name(receiver.trace(trace_id))}  # noqa: E731
    with contextlib.suppress(AssertionError):
        await asyncio.to_thread(assert_soon, lambda: not missing(), 20)
    assert not missing()
    return receiver.trace(trace_id)


def is_whole(receiver, trace_id, client_id):
    """Whether no span of a trace hangs in the air."""
    spans = receiver.trace(trace_id)
    return {span.parent_id for span in spans} <= {client_id, *(span.span_id for span in spans)}


async def preempted(caller, receiver):
    """The spans of a long request that was stopped, its client's span, and the urgent one's trace."""
    _, _, long_s = await caller.ask(LONG, "background", "00")
    _, _, alone_s = await caller.ask(URGENT, "premium", "00")
    for _ in range(4):
        running = asyncio.create_task(caller.ask(LONG, "background"))
        await asyncio.sleep(long_s / 5)
        urgent, _, _ = await caller.ask(URGENT, "premium", ttft_ms=(alone_s + long_s / 2) * 1e3)
        trace_id, client_id, _ = await running
        spans = await received(receiver, trace_id, *PATH, "llm_request")
        if "suspended" in by_name(spans):
            return spans, client_id, urgent
    raise AssertionError("none of four was suspended")


async def test_a_preempted_request_is_one_trace_from_the_client_to_the_engines(deployment, otlp_port):
    await asyncio.to_thread(assert_soon, lambda: at_rest(deployment), 30)
    caller = Caller(deployment)
    await caller.ask(URGENT, "premium")  # nobody listens yet: the answer is the same
    with receiving(otlp_port) as receiver:
        spans, client_id, urgent = await preempted(caller, receiver)
        named = by_name(spans)
        ids = {span.span_id: span.name for span in spans}
        for name, parent in PATH.items():
            expected = parent or "client"
            assert ({client_id: "client"} | ids)[named[name].parent_id].startswith(expected), name
        await asyncio.to_thread(assert_soon, lambda: is_whole(receiver, spans[0].trace_id, client_id), 20)
        engines = [span for span in spans if span.name == "llm_request"]
        assert {span.role for span in engines} == {"prefill", "decode"}

        whole = named["prefill_request"]
        parts = [span for span in spans if span.parent_id == whole.span_id]
        assert {span.name for span in parts} == {"queue", "prefill_run", "suspended"}
        off_s = abs(sum(span.seconds for span in parts) - whole.seconds)
        assert off_s < max(0.005, 0.05 * whole.seconds)

        beneficiary = by_name(await received(receiver, urgent, *PATH, "prefill_run"))
        suspension, run = named["suspended"], beneficiary["prefill_run"]
        assert suspension.links == ((urgent, beneficiary["prefill_request"].span_id),)
        assert suspension.attributes["slackserve.is_kept"]
        # Both are the engine's own times; the end of a prefill is when its replica has heard of it.
        assert suspension.start_s - 0.001 < run.start_s < suspension.end_s + 0.001

        ingress = named["ingress"].attributes
        assert ingress["gen_ai.operation.name"] == "text_completion"
        assert ingress["gen_ai.request.model"] == "tiny"
        assert (ingress["gen_ai.usage.input_tokens"], ingress["gen_ai.usage.output_tokens"]) == (LONG, 4)
        assert (ingress["slackserve.tier"], ingress["slackserve.outcome"]) == ("background", "finished")
        assert named["decode_request"].attributes["gen_ai.usage.input_tokens"] == LONG
        assert "first_token" in named["ingress"].events
        assert "first_token" in named["decode_request"].events

    assert await caller.ask(URGENT, "premium"), "nobody listens any more: the answer is the same"


async def test_tokens_are_counted_and_not_the_events_that_bring_them(deployment, otlp_port):
    """A busy machine puts several into one event; a client may ask for it."""
    with receiving(otlp_port) as receiver:
        trace_id, _, _ = await Caller(deployment).ask(URGENT, "premium", max_tokens=9, stream_interval=4)
        ingress = by_name(await received(receiver, trace_id, "ingress"))["ingress"]
    assert ingress.attributes["gen_ai.usage.output_tokens"] == 9


async def test_only_requests_that_are_sampled_leave_spans(deployment, otlp_port):
    caller, prompt = Caller(deployment), "a prompt that no collector shall see"
    began_s = time.time()  # spans of earlier tests, when nobody listened, may come in parts
    with receiving(otlp_port) as receiver:
        unsampled, _, _ = await caller.ask(URGENT, "premium", "00")
        sampled, _, _ = await caller.ask(URGENT, "premium", prompt=prompt)
        spans = await received(receiver, sampled, *PATH, "llm_request")
        assert receiver.trace(unsampled) == []
        assert not [span for span in spans if prompt in repr(span)]
        ours = {span.trace_id for span in receiver.spans if span.role and span.start_s > began_s}
        assert all(any(span.name == "ingress" for span in receiver.trace(each)) for each in ours)
