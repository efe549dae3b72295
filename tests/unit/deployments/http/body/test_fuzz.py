"""The whole gate in one process, on requests that nobody would send: no 500, and nobody else waits."""

import asyncio
import gc
import json
import time
from collections import Counter
from random import Random

import cloudpickle
import pytest
from bodies import model
from ray.llm._internal.serve.core.ingress.ingress import _sanitize_chat_completion_request
from request_fuzz import PATHS, corpus, draw

from deployments.config.limits import LimitsConfig
from deployments.http.body import asks
from deployments.http.body.prompt_size import prompt_size
from deployments.http.body.reading import read
from deployments.http.gatekeeper import Gatekeeper
from deployments.http.placing.prefix_hashes import prefix_hashes
from deployments.http.token_meter import TokenMeter
from slo.admission.tenant_limits import Usage
from slo.admission.tenants import ANONYMOUS, KeyRing
from slo.objectives import resolve
from slo.tiers import DEFAULT_TIERS

LIMITS = LimitsConfig()
MAX_S = 0.2
"""So long any request may keep all others waiting."""


class Keys:
    ring = KeyRing([])


class Counts:
    def count(self, *_, **__):
        pass


async def ingress(scope, receive, send):
    """What the ingress does with a request until it asks the router for a place."""
    body = (await receive())["body"]
    state = scope["state"]
    request = read(body, PATHS[scope["path"]], LIMITS, ANONYMOUS)
    resolve(state["headers"], asks.service_tier(request), DEFAULT_TIERS)
    prompt_size(request)
    prefix_hashes(request)
    asked = asks.output_tokens(request, model(4096))
    TokenMeter(request, Usage(1, asked))
    if "chat" in scope["path"]:
        request = _sanitize_chat_completion_request(request)
    cloudpickle.dumps(request)  # as it travels to the decode replica
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def answer(gate, request):
    """Status and body of the answer, and the seconds of computing that it took."""
    messages = [{"type": "http.request", "body": request.body, "more_body": False}]
    sent = []

    async def receive():
        return messages.pop()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": request.path, "headers": request.headers,
        "query_string": b"",
    }  # fmt: skip
    started_s = time.thread_time()
    await gate(scope, receive, send)
    return (
        sent[0]["status"],
        b"".join(part.get("body", b"") for part in sent[1:]),
        time.thread_time() - started_s,
    )


@pytest.fixture
def gate():
    gate = Gatekeeper(ingress, Keys(), LIMITS)
    gate._instruments = Counts()
    gc.collect()
    gc.freeze()  # as Serve does in a replica that has started
    yield gate
    gc.unfreeze()


@pytest.mark.parametrize(("name", "request_"), [pytest.param(*entry, id=entry[0]) for entry in corpus()])
async def test_the_corpus(gate, name, request_):
    status, body, took_s = await answer(gate, request_)
    assert 400 <= status < 500, name
    assert json.loads(body)["error"]["message"]
    assert took_s < MAX_S


@pytest.mark.parametrize(("seed", "count"), [(1, 2000), pytest.param(2, 20_000, marks=pytest.mark.long)])
async def test_no_request_is_answered_with_500_or_holds_up_others(gate, seed, count):
    rng, statuses, bad = Random(seed), Counter(), []
    for _ in range(count):
        request = draw(rng)
        status, body, took_s = await answer(gate, request)
        statuses[status] += 1
        if status >= 500 or took_s > MAX_S:
            bad.append(
                (status, round(took_s, 3), body[:200], request.path, request.headers, request.body[:500])
            )
        await asyncio.sleep(0)
    assert not bad, f"{len(bad)} of {count}: {bad[:5]}"
    assert statuses[200] > count / 20, statuses
    assert statuses[400] > count / 5, statuses
