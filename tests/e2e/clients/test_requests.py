"""What clients see: streaming and not, chat and text, headers, models, readiness."""

import asyncio
import time

import httpx
import pytest
from vllm.benchmarks.serve import get_first_model_from_server
from waiting import assert_soon

from slo.predict.prefill_time import PrefillPredictor

pytestmark = pytest.mark.e2e


def test_completion_and_its_headers(deployment):
    raw = deployment.client().completions.with_raw_response.create(
        model="tiny",
        prompt="hello " * 20,
        max_tokens=5,
        extra_headers={"x-slo-tier": "premium"},
        extra_body={"ignore_eos": True},
    )
    answer = raw.parse()
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == 120
    assert raw.headers["x-slo-tier"] == "premium"
    assert float(raw.headers["x-slo-ttft-budget-ms"]) == 2000
    assert float(raw.headers["x-slo-predicted-ttft-ms"]) > 0
    assert raw.headers["x-request-id"]


def test_streaming_chat_gives_the_same_text_as_not_streaming(deployment):
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello " * 20}],
        "max_tokens": 12,
        "temperature": 0,
    }
    client = deployment.client()
    whole = client.chat.completions.create(**ask).choices[0].message.content
    pieces = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole
    assert pieces[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.2, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 1},
        {"temperature": 0, "max_tokens": 1},
        {"temperature": 1, "seed": 6, "stop": ["a", "e", "1", " "]},
    ],
)
def test_the_first_token_of_prefill_begins_the_answer_that_one_engine_gives(deployment, sampling):
    client = deployment.client()
    before = deployment.metric("slackserve_first_tokens_resampled_total")
    ask = {"model": "tiny", "prompt": "hello " * 40, "max_tokens": 12, **sampling}
    # Whoever asks for the prompt's log-probabilities is served by the decode engine alone.
    alone = client.completions.create(**ask, extra_body={"prompt_logprobs": 0}).choices[0]
    whole = client.completions.create(**ask).choices[0]
    assert (whole.text, whole.finish_reason) == (alone.text, alone.finish_reason)
    pieces = [piece.choices[0] for piece in client.completions.create(**ask, stream=True) if piece.choices]
    assert "".join(piece.text for piece in pieces) == alone.text
    assert pieces[-1].finish_reason == alone.finish_reason
    if alone.logprobs is not None:
        assert whole.logprobs.tokens == alone.logprobs.tokens
        assert whole.logprobs.token_logprobs == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
        assert [token for piece in pieces for token in piece.logprobs.tokens] == alone.logprobs.tokens
    assert deployment.metric("slackserve_first_tokens_resampled_total") == before


def test_what_prefill_cannot_sample_is_sampled_by_decode(deployment):
    before = deployment.metric("slackserve_first_tokens_resampled_total", reason="grammar")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    grammar = {"structured_outputs": {"regex": "[ab]{4}"}}
    answer = deployment.client().chat.completions.create(**chat, extra_body=grammar)
    assert set(answer.choices[0].message.content) <= set("ab")
    assert_soon(
        lambda: deployment.metric("slackserve_first_tokens_resampled_total", reason="grammar") == before + 1,
        10,
    )


def test_a_prompt_of_tokens_and_content_parts(deployment):
    client = deployment.client()
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7] * 30, max_tokens=2)
    assert answer.usage.prompt_tokens == 90
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts}],
        max_tokens=2,
        extra_body={"ignore_eos": True},
    )
    assert chat.usage.completion_tokens == 2


def test_what_prefill_cannot_take_is_still_answered(deployment):
    client = deployment.client()
    before = deployment.metric("slackserve_local_prefills_total")
    assert len(client.completions.create(model="tiny", prompt="abc", max_tokens=3, n=3).choices) == 3
    assert len(client.completions.create(model="tiny", prompt=["abc", "de"], max_tokens=3).choices) == 2
    assert_soon(lambda: deployment.metric("slackserve_local_prefills_total") == before + 2, 30)


@pytest.mark.parametrize(
    ("service_tier", "tier"), [("priority", "premium"), ("default", "standard"), ("flex", "background")]
)
def test_service_tier_chooses_the_tier(deployment, service_tier, tier):
    raw = deployment.client().chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        service_tier=service_tier,
    )
    assert raw.headers["x-slo-tier"] == tier
    assert (raw.headers["x-slo-ttft-budget-ms"] == "none") == (tier == "background")


def test_objective_headers_pass_serves_own_proxy(deployment):
    for name in ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-flowprefill-slo-ms"):
        raw = deployment.client().completions.with_raw_response.create(
            model="tiny", prompt="hi", max_tokens=1, extra_headers={name: "2345.5", "x-slo-tpot-ms": "90"}
        )
        assert float(raw.headers["x-slo-ttft-budget-ms"]) == 2345.5


def test_the_clients_request_id_comes_back_once_and_in_the_answer(deployment):
    raw = deployment.client().completions.with_raw_response.create(
        model="tiny", prompt="hi", max_tokens=1, extra_headers={"x-request-id": "my-id.1"}
    )
    assert raw.headers.get_list("x-request-id") == ["my-id.1"]
    assert raw.parse().id == "cmpl-my-id.1"


@pytest.mark.parametrize(
    ("path", "said", "named"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1}, "cmpl-job-7"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
            "chatcmpl-job-7",
        ),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}, "job-7"),
    ],
)
def test_the_bodys_request_id_names_the_answer_as_in_vllm(deployment, path, said, named):
    answers = [
        httpx.post(
            f"{deployment.url}{path}",
            json={"model": "tiny", "request_id": request_id, **said},
            headers={"authorization": "Bearer key-of-acme"},
            timeout=30,
        )
        for request_id in ("job-7", "job 7")
    ]
    assert answers[0].json()["id"] == named
    assert (answers[1].status_code, answers[1].json()["error"]["param"]) == (400, "request_id")


def test_a_web_page_may_ask_and_read_what_is_told(deployment):
    page = {"origin": "https://chat.example"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    url = f"{deployment.url}/v1/chat/completions"
    may = httpx.options(url, headers=page | asks)
    assert may.status_code == httpx.codes.OK, "a browser asks this without a key"
    assert may.headers["access-control-allow-origin"] == "*"
    assert "authorization" in may.headers["access-control-allow-headers"]
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    for key, status in (("key-of-acme", httpx.codes.OK), ("wrong", httpx.codes.UNAUTHORIZED)):
        answer = httpx.post(url, json=body, headers=page | {"authorization": f"Bearer {key}"}, timeout=30)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "x-slo-tier" in answer.headers["access-control-expose-headers"]


def test_a_body_with_a_byte_order_mark_and_a_model_without_a_name(deployment):
    """As some editors save a file, and as clients of other servers leave the model out."""
    body = b'\xef\xbb\xbf{"model": "", "prompt": "hi", "max_tokens": 1}'
    headers = {"authorization": "Bearer key-of-acme", "content-type": "application/json"}
    answer = httpx.post(f"{deployment.url}/v1/completions", content=body, headers=headers, timeout=30)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["model"] == "tiny"


def test_a_tier_above_the_tenants_is_clamped_and_told_so(deployment):
    raw = deployment.client("batch").completions.with_raw_response.create(
        model="tiny", prompt="hi", max_tokens=1, extra_headers={"x-slo-tier": "premium"}
    )
    assert raw.headers["x-slo-tier"] == "background"
    assert raw.headers["x-slo-tier-clamped-from"] == "premium"


def test_texts_become_tokens_and_texts_again(deployment):
    headers = {"authorization": "Bearer key-of-acme"}

    def ask(path, expected=200, **body):
        answer = httpx.post(f"{deployment.url}/{path}", json={"model": "tiny", **body}, headers=headers)
        assert answer.status_code == expected, answer.text
        return answer.json()

    found = ask("tokenize", prompt="hello " * 3)
    assert found["count"] == len(found["tokens"]) > 3
    assert found["max_model_len"] == 4096
    assert ask("detokenize", tokens=found["tokens"])["prompt"].endswith("hello hello hello ")
    assert ask("tokenize", 400)["error"]["param"] == "prompt"
    refused = ask("tokenize", 400, prompt="hello " * 5_000)["error"]
    assert (refused["param"], refused["code"]) == ("prompt", "invalid_value"), "longer than any prompt"
    for token in (-1, 5_000_000_000):
        refused = ask("detokenize", 400, tokens=[token])["error"]
        assert refused["param"].startswith("tokens"), refused
        assert refused["type"] == "invalid_request_error"
    assert ask("detokenize", 404, model="tinny", tokens=[1])["error"]["code"] == "model_not_found"
    without_key = httpx.post(f"{deployment.url}/tokenize", json={"model": "tiny", "prompt": "hello"})
    assert without_key.status_code == 401


def test_models_and_health(deployment):
    assert [model.id for model in deployment.client().models.list()] == ["tiny"]
    card = deployment.client().models.retrieve("tiny")
    assert card == deployment.client().models.list().data[0]
    assert (card.id, card.root, card.parent, card.max_model_len) == ("tiny", "tiny", None, 4096)
    assert abs(card.created - time.time()) < 3600
    headers = {"Authorization": f"Bearer {deployment.client().api_key}"}
    assert asyncio.run(get_first_model_from_server(deployment.url, headers)) == ("tiny", "tiny")
    assert httpx.get(f"{deployment.url}/health").json() == {"status": "ok"}
    ready = httpx.get(f"{deployment.url}/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"}), "no key, no details"
    assert_a_curve_that_grows(deployment.fleet()["prefill"][0])


def assert_a_curve_that_grows(replica):
    """In so small a model a token may cost nothing measurable beside what its attention costs."""
    curve = PrefillPredictor(replica["per_token_s"], replica["fixed_s"], per_pair_s=replica["per_pair_s"])
    assert 0 < curve.prefill_s(32) < curve.prefill_s(2048) < 30


def test_an_impossible_deadline_is_refused_and_not_to_be_tried_again(deployment):
    answer = httpx.post(
        f"{deployment.url}/v1/completions",
        json={"model": "tiny", "prompt": "x" * 3000, "max_tokens": 1},
        headers={"authorization": f"Bearer {deployment.keys['acme']}", "x-slo-ttft-ms": "1"},
    )
    assert answer.status_code == 429
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "deadline_infeasible"
