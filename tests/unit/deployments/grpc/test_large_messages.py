"""What a message may cost before anybody knows whose it is, and after."""

import gc
import time

import pytest
from grpc_context import Context
from starlette.requests import Request
from starlette.responses import JSONResponse

from deployments.config.limits import LimitsConfig
from deployments.grpc import inference_pb2 as pb
from deployments.grpc.messages import refuse_large, request_body
from deployments.grpc.methods import InferenceIngress
from deployments.http.errors import HTTPError
from deployments.http.gatekeeper import Gatekeeper
from slo.admission.tenants import ApiKey, KeyRing, Tenant, digest

LIMITS = LimitsConfig()
PROMISED_S = 0.2
"""For so long at most a body of HTTP's holds the streams of its process."""


class Keys:
    """As `KeyWatch`, of one key."""

    ring = KeyRing([ApiKey(digest("k"), Tenant("a"))])


async def served(scope, receive, send):
    body = await Request(scope, receive).body()
    await JSONResponse({"id": str(len(body))})(scope, receive, send)


@pytest.fixture
def ingress():
    class Gated(InferenceIngress):
        def __init__(self):
            self._limits = LIMITS
            self.app = Gatekeeper(served, Keys(), LIMITS)

    return Gated()


def struct(values):
    request = pb.CompleteRequest(model="m")
    request.extra["a"] = values
    return request


def messages(count, **fields):
    return pb.ChatRequest(model="m", messages=[pb.Message(**fields)] * count)


LARGE = {
    "empty messages": (messages(1_000_000), "lists and objects; limits.max_json_containers allows 10000"),
    "lists in a Struct": (struct([[]] * 20_000), "lists and objects; limits.max_json_containers"),
    "numbers in a Struct": (struct([0.0] * 300_001), "values; limits.max_json_values allows 300000"),
    "names in a Struct": (
        struct({str(name): 0.0 for name in range(300_001)}),
        "values; limits.max_json_values",
    ),
    "token ids": (
        pb.CompleteRequest(model="m", prompt_token_ids=pb.TokenIds(ids=[0] * 300_001)),
        "values; limits.max_json_values",
    ),
    "stop strings": (pb.ChatRequest(model="m", stop=[""] * 300_001), "values; limits.max_json_values"),
    "biases": (
        pb.ChatRequest(model="m", logit_bias={str(token): 0.0 for token in range(50_001)}),
        "names; limits.max_json_names",
    ),
    "text": (messages(1, content="a" * (6 * LIMITS.max_body_bytes)), "max_body_bytes"),
}


@pytest.fixture
def no_collection():
    """A collection of what other tests have left behind takes longer than what is timed."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("request_", "told"), LARGE.values(), ids=LARGE)
async def test_what_is_more_than_a_body_may_be_is_refused_before_it_is_made_one(ingress, request_, told):
    context, began_s = Context(), time.thread_time()
    method = ingress.Chat if isinstance(request_, pb.ChatRequest) else ingress.Complete
    await method(request_, context)
    assert time.thread_time() - began_s < PROMISED_S
    assert told in context.details
    assert context.code.name == ("RESOURCE_EXHAUSTED" if told == "max_body_bytes" else "INVALID_ARGUMENT")


async def test_of_a_message_without_a_key_no_body_is_made(ingress, monkeypatch):
    context = Context()
    monkeypatch.setattr(context, "invocation_metadata", list)
    monkeypatch.setattr("deployments.grpc.methods.request_body", lambda *_, **__: pytest.fail("it was"))
    await ingress.Chat(messages(100, content="hi"), context)
    assert context.code.name == "UNAUTHENTICATED"


async def test_what_a_body_may_be_is_served(ingress):
    request = pb.CompleteRequest(model="m", prompt_token_ids=pb.TokenIds(ids=[7] * 200_000))
    context = Context()
    answer = await ingress.Complete(request, context)
    assert context.code is None
    assert answer.id == str(len(request_body(request, stream=False)))


def test_text_of_other_alphabets_is_as_long_as_over_http():
    text = "\N{GREEK SMALL LETTER ALPHA}" * 1000
    assert len(request_body(messages(1, content=text), stream=False)) < 2 * 1000 + 100


def test_no_message_is_larger_than_its_json_by_more_than_the_bound():
    """Otherwise one would be refused for its bytes whose JSON is short enough."""
    for request in (
        struct([1.0] * 1000),
        struct([None] * 1000),
        struct({str(name): 1.0 for name in range(1000)}),
        struct([[[]]] * 1000),
        pb.ChatRequest(logit_bias={str(token): 1.0 for token in range(1000)}),
        pb.CompleteRequest(prompt_token_ids=pb.TokenIds(ids=[2**31 - 1] * 1000)),
        messages(1000, role="u", name="n"),
    ):
        refuse_large(
            request, LimitsConfig(max_body_bytes=max(1024, len(request_body(request, stream=False))))
        )
        with pytest.raises(HTTPError):
            refuse_large(request, LimitsConfig(max_json_values=64))
