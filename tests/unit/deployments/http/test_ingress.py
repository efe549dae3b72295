"""What a route makes of a request before it is placed."""

import json
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from deployments.config.limits import LimitsConfig
from deployments.http.ingress import SlackServeIngress
from slo.admission.tenants import ANONYMOUS

SERVED = SimpleNamespace(config=SimpleNamespace(max_model_len=100))


class Ingress(SlackServeIngress):
    """Keeps what it would have placed and answered."""

    def __init__(self):
        self._limits = LimitsConfig()
        self._models = SimpleNamespace(named_by=lambda body: SERVED)

    async def _serve_body(self, request, body, method, arrived_s, wording=None):
        self.body, self.wording = body, wording


def posted(body):
    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    state = {"request_id": "from-header", "tenant": ANONYMOUS}
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": state}, receive)


@pytest.mark.parametrize(
    ("given", "of_chat", "of_answer"),
    [({}, None, "resp_from-header"), ({"request_id": "mine"}, "mine", "mine")],
)
async def test_the_id_of_a_response(given, of_chat, of_answer):
    ingress = Ingress()
    await ingress.responses(posted({"input": "hi", **given}))
    found = ingress.body.request_id if "request_id" in ingress.body.model_fields_set else None
    assert found == of_chat, "what the chat does with the id of its own body"
    answer = {"index": 0, "message": {"role": "assistant", "content": "Once"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    assert ingress.wording.whole({"model": "m", "choices": [answer], "usage": usage})["id"] == of_answer
