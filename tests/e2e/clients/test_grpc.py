"""The gRPC API beside the HTTP API: the same answers, accounts and refusals, and a client that goes."""

import random
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import METRICS_EVERY_S
from waiting import assert_soon, at_rest

from deployments.grpc import inference_pb2 as pb
from deployments.grpc.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def channel(deployment):
    with deployment.channel() as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return InferenceStub(channel)


def metadata(*more, key="key-of-acme"):
    return [*([("authorization", f"Bearer {key}")] if key else []), *more]


def completion(tokens, max_tokens, **fields):
    request = pb.CompleteRequest(model="tiny", max_tokens=max_tokens, temperature=0, **fields)
    request.prompt_token_ids.ids.extend(tokens)
    request.extra.update({"ignore_eos": True, "return_token_ids": True})
    return request


def over_http(deployment, path, body, headers=()):
    sent = [("authorization", "Bearer key-of-acme"), *headers]
    return httpx.post(f"{deployment.url}{path}", json=body, headers=sent, timeout=60)


def test_the_same_completion_has_the_same_tokens(deployment, stub):
    tokens = random.choices(range(200), k=300)
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    expected = over_http(deployment, "/v1/completions", body).json()
    (choice,) = expected["choices"]
    answer, call = stub.Complete.with_call(
        completion(tokens, 12, objective=pb.Objective(tier="premium")), metadata=metadata()
    )
    assert list(answer.choices[0].token_ids) == choice["token_ids"]
    assert answer.choices[0].text == choice["text"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 312
    trailers = dict(call.trailing_metadata())
    assert trailers["x-slo-tier"] == "premium"
    _, call = stub.Complete.with_call(
        completion(tokens, 2, objective=pb.Objective(tier="premium", e2e_ms=50)), metadata=metadata()
    )
    assert float(dict(call.trailing_metadata())["x-slo-ttft-budget-ms"]) < 50
    assert float(trailers["x-slo-ttft-budget-ms"]) == 2000
    streamed = completion(tokens, 12, stream_options=pb.StreamOptions(include_usage=True))
    chunks = [chunk for each in stub.CompleteStream(streamed, metadata=metadata()) for chunk in each.chunks]
    assert [token for chunk in chunks for c in chunk.choices for token in c.token_ids] == choice["token_ids"]
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == choice["text"]
    assert chunks[-1].usage.completion_tokens == 12


def test_what_the_messages_have_no_field_for_is_told_all_the_same(deployment, stub):
    tokens = random.choices(range(200), k=5)
    request = pb.CompleteRequest(
        model="tiny", prompt_token_ids=pb.TokenIds(ids=tokens), max_tokens=1, temperature=0
    )
    request.extra.update({"prompt_logprobs": 0, "return_token_ids": True})
    (choice,) = stub.Complete(request, metadata=metadata()).choices
    assert list(choice.extra["prompt_token_ids"]) == tokens
    assert len(choice.extra["prompt_logprobs"]) == len(tokens)


def test_the_same_chat_has_the_same_text(deployment, stub):
    ask = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    message = {"role": "user", "content": "hello " * 20}
    expected = over_http(deployment, "/v1/chat/completions", {**ask, "messages": [message]}).json()
    request = pb.ChatRequest(**ask, messages=[pb.Message(**message)])
    whole = stub.Chat(request, metadata=metadata())
    assert whole.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert whole.choices[0].message.role == "assistant"
    stream = stub.ChatStream(request, metadata=metadata(("x-slo-tier", "premium"), ("x-request-id", "mine")))
    chunks = [chunk for each in stream for chunk in each.chunks]
    assert "".join(c.delta.content for chunk in chunks for c in chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    trailers = dict(stream.trailing_metadata())
    assert (trailers["x-slo-tier"], trailers["x-request-id"]) == ("premium", "mine")
    assert chunks[0].id.endswith("mine")


def test_models_are_the_same(deployment, stub):
    answer = stub.ListModels(pb.ListModelsRequest(), metadata=metadata())
    assert [model.id for model in answer.data] == ["tiny"]
    assert answer.data[0].created == deployment.client().models.retrieve("tiny").created


def test_a_request_is_counted_once_and_its_first_token_measured(deployment, stub):
    def counted():
        names = (
            "slackserve_requests_total",
            "slackserve_ttft_seconds_count",
            "slackserve_tpot_seconds_count",
        )
        return [deployment.metric(name, tier="premium") for name in names]

    time.sleep(3 * METRICS_EVERY_S)  # until those of the tests before are exported
    before = counted()
    request = completion([1, 2, 3] * 30, 5, objective=pb.Objective(tier="premium"))
    list(stub.CompleteStream(request, metadata=metadata()))
    assert_soon(lambda: counted() == [value + 1 for value in before], 10)


REFUSALS = {
    "an objective that is no number": ([("x-slo-ttft-ms", "soon")], {}, {}),
    "a header twice": ([("x-slo-ttft-ms", "5"), ("x-slo-ttft-ms", "5")], {}, {}),
    "a tier that there is not": ([("x-slo-tier", "gold")], {}, {}),
    "an internal header": ([("x-slackserve-context", "{}")], {}, {}),
    "a misspelt objective": ([("x-slo-tft-ms", "5")], {}, {}),
    "another model": ([], {"model": "other"}, {}),
    "an internal field": ([], {}, {"kv_transfer_params": {"do_remote_prefill": True}}),
    "a priority": ([], {}, {"priority": 5}),
    "a temperature out of range": ([], {"temperature": -1.0}, {}),
    "a body that is too large": ([], {"prompt": "x" * 200_001}, {}),
    "a wrong key": ([("authorization", "Bearer nobody")], {}, {}),
    "no key": ([("authorization", "")], {}, {}),
    "an impossible deadline": ([("x-slo-ttft-ms", "0.001")], {"prompt": "hello " * 300}, {}),
}
CODES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND"} | dict.fromkeys(
    (413, 429), "RESOURCE_EXHAUSTED"
)


def ask(stub, method, request, sent):
    """Call a method and read all that it answers."""
    answer = getattr(stub, method)(request, metadata=sent)
    return list(answer) if method == "CompleteStream" else [answer]


@pytest.mark.parametrize("method", ["Complete", "CompleteStream"])
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_the_same(deployment, stub, case, method):
    assert_soon(lambda: at_rest(deployment), 10)
    headers, fields, more = REFUSALS[case]
    fields = {"model": "tiny", "prompt": "hi", "max_tokens": 1} | fields
    sent = headers if dict(headers).keys() & {"authorization"} else metadata(*headers)
    body = fields | more | {"stream": method == "CompleteStream"}
    url = f"{deployment.url}/v1/completions"
    over_http = httpx.post(url, json=body, headers=sent, timeout=30)
    expected = over_http.json()["error"]
    request = pb.CompleteRequest(**fields)
    request.extra.update(more)
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, method, request, sent)
    error = caught.value
    assert error.code() is grpc.StatusCode[CODES[over_http.status_code]]
    trailers = dict(error.trailing_metadata())
    assert trailers.get("error-code") == expected["code"]
    assert trailers.get("error-type") == expected["type"]
    assert trailers.get("error-param") == expected["param"]
    assert trailers.get("retry-after") == over_http.headers.get("retry-after")
    if expected["code"] != "deadline_infeasible":  # says by how many milliseconds
        assert error.details() == expected["message"]


def test_a_typed_objective_is_held_to_the_same_rules(stub):
    for objective, param in (
        (pb.Objective(ttft_ms=-1), "x-slo-ttft-ms"),
        (pb.Objective(tpot_ms=float("nan")), "x-slo-tpot-ms"),
        (pb.Objective(tier="gold"), "x-slo-tier"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Complete(completion([1], 1, objective=objective), metadata=metadata())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["error-param"] == param


def test_a_clients_deadline_is_no_objective(stub):
    _, call = stub.Complete.with_call(completion([7] * 50, 1), metadata=metadata(), timeout=1.5)
    assert float(dict(call.trailing_metadata())["x-slo-ttft-budget-ms"]) == 4000  # the tier's


@pytest.mark.parametrize("seconds", [0.02, 0.15, 0.4, 1.0])
def test_a_client_that_goes_frees_what_it_held(deployment, stub, seconds):
    """It is queued, prefilling or decoding by then; the deadline of a client ends its call likewise."""
    assert_soon(lambda: at_rest(deployment), 10)
    calls = [
        stub.CompleteStream(
            completion(random.choices(range(200), k=3900), 90, objective=pb.Objective(tier="background")),
            metadata=metadata(),
            timeout=seconds if number % 2 else None,
        )
        for number in range(4)
    ]
    whole = stub.Complete.future(completion([9] * 3900, 90), metadata=metadata())
    time.sleep(seconds)
    for call in (*calls, whole):
        call.cancel()
    assert_soon(lambda: at_rest(deployment), 8, f"not everything was given back: {deployment.fleet()}")


def test_health_follows_readiness_and_needs_no_key(channel):
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "slackserve.v1.Inference"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
    assert next(watch).status == serving
    watch.cancel()


def test_nothing_is_told_of_services_and_messages(channel):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        list(
            reflection.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
            )
        )
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
