"""A decode replica that starts does not wait behind all that a prefill replica has to do."""

import time

from ray.serve.llm.deployment import PDPrefillServer
from ray.serve.llm.openai_api_models import CompletionRequest

from prefill_node.replica.server import PrefillServer
from slo.request import ARRIVED_XARG, DEADLINE_XARG, HANDSHAKE_DUE_S


async def test_a_handshake_is_due_while_the_decode_replica_waits_for_it(monkeypatch):
    asked = []

    async def prewarm(_, request):
        asked.append(request)
        return {"remote_port": 1}

    monkeypatch.setattr(PDPrefillServer, "prewarm_prefill", prewarm)
    server, request = object.__new__(PrefillServer), CompletionRequest(model="m", prompt=" x", max_tokens=1)
    before_s = time.monotonic()
    assert await server.prewarm_prefill(request) == {"remote_port": 1}
    (given,) = [one.vllm_xargs for one in asked]
    assert before_s <= given[ARRIVED_XARG] <= time.monotonic()
    assert given[DEADLINE_XARG] == given[ARRIVED_XARG] + HANDSHAKE_DUE_S
    assert request.vllm_xargs is None
