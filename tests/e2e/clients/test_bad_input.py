"""Each thing that a client can get wrong: status, field and message."""

import gzip
import json

import httpx
import pytest
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e

VOCABULARY = 258
"""As many tokens the tiny model knows, so that their last id is one less."""
RANGE = "give a decimal number of milliseconds from 0.001 to 3600000"


def post(deployment, body=None, headers=(), path="/v1/completions", key="key-of-acme", **options):
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1} if body is None else body
    sent = [*headers, *([("authorization", f"Bearer {key}")] if key else [])]
    if "content" not in options:
        options["json"] = body
    elif "content-type" not in dict(sent):
        sent.append(("content-type", "application/json"))
    return httpx.post(f"{deployment.url}{path}", headers=sent, timeout=30, **options)


def error(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


@pytest.mark.parametrize(
    ("headers", "param", "message"),
    [
        ([("x-slo-ttft-ms", "soon")], "x-slo-ttft-ms", f"'soon' is not a number; {RANGE}"),
        ([("x-slo-ttft-ms", "-1")], "x-slo-ttft-ms", f"'-1' is negative; {RANGE}"),
        ([("x-slo-ttft-ms", "0")], "x-slo-ttft-ms", f"an objective of zero cannot be met; {RANGE}"),
        ([("x-slo-tpot-ms", "nan")], "x-slo-tpot-ms", f"NaN is not an objective; {RANGE}"),
        ([("x-slo-ttft-ms", "inf")], "x-slo-ttft-ms", f"an infinite objective is no objective; {RANGE}"),
        ([("x-flowprefill-slo-ms", "1e999")], "x-flowprefill-slo-ms", f"'1e999' overflows; {RANGE}"),
        ([("x-llm-d-slo-ttft-ms", "4e6")], "x-llm-d-slo-ttft-ms", f"'4e6' is out of range; {RANGE}"),
        (
            [("x-slo-ttft-ms", "5"), ("x-slo-ttft-ms", "5")],
            "x-slo-ttft-ms",
            "is given more than once; give it once",
        ),
        (
            [("x-slo-ttft-ms", "5"), ("x-llm-d-slo-ttft-ms", "6")],
            "x-llm-d-slo-ttft-ms",
            "contradicts x-slo-ttft-ms, which sets the same objective; give one of them",
        ),
        (
            [("x-slo-tier", "gold")],
            "x-slo-tier",
            "'gold' is not a tier; give one of premium, standard, background",
        ),
        ([("x-slo-tft-ms", "5")], "x-slo-tft-ms", "is not a known objective header"),
        ([("x_slo_ttft_ms", "0")], "x-slo-ttft-ms", "an objective of zero cannot be met"),
        (
            [("x-slackserve-context", "{}")],
            "x-slackserve-context",
            "is set by the server itself; leave it out",
        ),
        ([("x-request-id", "a b")], "x-request-id", "is not usable as an id"),
        ([("x-request-timeout-seconds", "0")], "x-request-timeout-seconds", "is set by the server itself"),
        (
            [("x-request-disconnect-disabled", "?1")],
            "x-request-disconnect-disabled",
            "is set by the server itself",
        ),
    ],
)
def test_a_wrong_header_is_refused_by_name(deployment, headers, param, message):
    found = error(post(deployment, headers=headers), 400)
    assert found["param"] == param
    assert found["message"].startswith(f"{param}: {message}")
    assert (found["type"], found["code"]) == ("invalid_request_error", "invalid_value")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"vllm_xargs": {"slackserve_deadline_s": 1.0}}, "vllm_xargs.slackserve_deadline_s"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"priority": 5}, "priority"),
        ({"n": 17}, "n"),
        ({"n": 2, "prompt": ["x"] * 9}, "n"),
        ({"prompt": ["x"] * 1024}, "prompt"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"temprature": 0}, "temprature"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"service_tier": 7}, "service_tier"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": {"text": "hi"}}, "prompt"),
        ({"prompt": [VOCABULARY]}, None),
        ({"prompt": [5_000_000_000]}, None),
        ({"prompt": [5_000_000_000], "echo": True}, None),
        ({"stream_options": {"include_usage": True}}, "stream"),
        ({"structured_outputs": "abc"}, None),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": 1000, "stream": True}, "logprobs"),
        ({"logit_bias": {"999999": 1}, "stream": True}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
        ({"bad_words": [f"{number:017}" for number in range(64)]}, "bad_words"),
        ({"bad_words": [f"{number:017}" for number in range(64)], "stream": True}, "bad_words"),
        ({"routed_experts_prompt_start": 5000}, "routed_experts_prompt_start"),
        ({"repetition_detection": {"max_pattern_size": 21, "min_count": 2}}, "repetition_detection"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_field_of_a_body_is_refused(deployment, extra, param):
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 1, **extra}).encode()
    found = error(post(deployment, content=body), 400)
    if param is not None:
        assert param in (found["param"] or found["message"]), found
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, None),
        ({"messages": []}, None),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"author": {"role": "user"}, "content": [{"type": "text", "text": "x"}]}]}, None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "hi"}], "tool_choice": "auto"}, "tool"),
        (
            {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 1000, "logprobs": True},
            "top_logprobs",
        ),
    ],
)
def test_a_wrong_field_of_a_chat_is_refused(deployment, body, param):
    content = json.dumps({"model": "tiny", "max_tokens": 1, **body}).encode()
    found = error(post(deployment, path="/v1/chat/completions", content=content), 400)
    if param is not None:
        assert param in (found["param"] or "") + found["message"], found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{nope", "the body is not JSON"),
        (b'"text"', "the body is not a JSON object"),
        (b'{"model": "tiny", "prompt": "\xff"}', "the body is not JSON"),
        (
            b'{"prompt": ' + b"[" * 5_000 + b"}",
            "the body has 5001 lists and objects inside each other",
        ),
        (b"[" + b"[]," * 40_000 + b"[]]", "the body has 40002 lists and objects; limits.max_json_containers"),
        (b'{"model": "tiny", "prompt": "hi", "temperature": NaN}', "the body is not JSON: NaN"),
        (b'{"service_tier": "flex", "service_tier": "priority"}', "service_tier: is given more than once"),
    ],
)
def test_bodies_that_are_not_what_they_should_be(deployment, content, message):
    assert error(post(deployment, content=content), 400)["message"].startswith(message)


def test_a_body_that_is_not_said_to_be_json(deployment):
    body = b'{"model": "tiny", "prompt": "hi", "max_tokens": 1}'
    found = error(post(deployment, None, [("content-type", "text/plain")], content=body), 400)
    assert (found["param"], found["code"]) == ("content-type", "invalid_value")


def test_a_refusal_while_streaming_holds_no_blocks(deployment):
    for n in range(3):
        body = {"model": "tiny", "prompt": [n] * 1000, "max_tokens": 1, "stream": True, "logprobs": 1000}
        error(post(deployment, body), 400)
    assert_soon(lambda: at_rest(deployment), 5)


def test_contradictory_tiers(deployment):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "service_tier": "flex",
    }
    answer = post(deployment, body, [("x-slo-tier", "premium")], "/v1/chat/completions")
    found = error(answer, 400)
    assert found["param"] == "x-slo-tier"
    assert "'premium' contradicts service_tier='flex'" in found["message"]


def test_a_prompt_longer_than_the_model_never_reaches_prefill(deployment):
    before = deployment.fleet()["prefill"][0]
    for body, path in (
        ({"model": "tiny", "prompt": "x" * 5000, "max_tokens": 1}, "/v1/completions"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}, "/v1/chat/completions"),
    ):
        found = error(post(deployment, body, path=path), 400)
        assert "4096" in found["message"]
    assert deployment.fleet()["prefill"][0]["outstanding"] == before["outstanding"]


def test_an_id_in_the_body_that_is_none(deployment):
    found = error(post(deployment, {"model": "tiny", "prompt": "hi", "request_id": "a b"}), 400)
    assert found["param"] == "request_id"


def test_a_prompt_of_tokens_that_can_never_fit_is_not_asked_to_come_again(deployment):
    """Whatever its deadline: a client that believes a 429 asks again, and never asks a larger model."""
    body = {"model": "tiny", "prompt": [1] * 5000, "max_tokens": 1}
    found = error(post(deployment, body, [("x-slo-ttft-ms", "1")]), 400)
    assert (found["param"], found["code"]) == ("prompt", "invalid_value")
    assert "maximum context length is 4096 tokens" in found["message"]


def test_a_body_that_is_too_large(deployment):
    found = error(post(deployment, {"model": "tiny", "prompt": "x" * 300_000}), 413)
    assert found["code"] == "body_too_large"
    assert "200000 bytes" in found["message"]

    def chunks():
        yield from (b"x" * 100_000 for _ in range(5))

    assert error(post(deployment, content=chunks()), 413)["code"] == "body_too_large"


def test_a_compressed_body(deployment):
    answer = post(
        deployment, None, [("content-encoding", "gzip")], content=gzip.compress(b'{"prompt": "hi"}')
    )
    found = error(answer, 415)
    assert (found["param"], found["code"]) == ("content-encoding", "content_encoding")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
@pytest.mark.parametrize("key", [None, "key-of-nobody"])
def test_who_has_no_known_key_is_refused(deployment, path, key):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    method = "POST" if path.endswith("completions") else "GET"
    answer = httpx.request(method, f"{deployment.url}{path}", headers=headers, json={})
    assert error(answer, 401)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_an_unknown_model_and_an_unknown_path(deployment):
    found = error(post(deployment, {"model": "gpt-9", "prompt": "hi"}), 404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")
    assert error(post(deployment, path="/v2/completions"), 404)["code"] == "no_such_route"
    answer = httpx.get(f"{deployment.url}/v1/models/gpt-9", headers={"authorization": "Bearer key-of-acme"})
    assert error(answer, 404)["code"] == "model_not_found"


def test_refusals_are_counted_by_reason(deployment):
    post(deployment, headers=[("x-slo-ttft-ms", "0")])
    assert_soon(lambda: deployment.metric("slackserve_rejections_total", reason="invalid_value") >= 1, 30)
