"""A deployment with four tiers of its own: served, refused, measured and shown by their names.

Its decode replica may compute short prompts itself. Its model reads images, and nothing is configured of
grammars.
"""

import base64
import io
import json
import random
import urllib.request

import openai
import pytest
from PIL import Image
from ports import free_port, side_channels
from serving import deployed
from waiting import assert_soon

from benchmarks.harness.tiny_models import build_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TIERS = {
    "text": {
        "rank": 4,
        "ttft_ms": 5000,
        "tpot_ms": 2000,
        "target": 0.97,
        "sheddable": False,
        "weight": 8,
        "share": 0.4,
        "service_tiers": ["priority"],
    },
    "image": {"rank": 3, "ttft_ms": 8000, "weight": 4, "share": 0.3},
    "search": {"rank": 2, "ttft_ms": 10_000, "target": 0.95, "weight": 2, "share": 0.2, "default": True},
    "file": {"rank": 1, "ttft_scale": 1000, "weight": 1, "share": 0.1, "service_tiers": ["flex", "batch"]},
}
"""With ranks: the file of the deployment is written with its keys in alphabetical order."""
SHORT = 12
SCHEMA = {"type": "object", "patternProperties": {"^a": {"type": "string"}}}
"""Valid, and not known to what is taken for all grammars."""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    model = build_tiny(tmp_path_factory.mktemp("model"), "idefics3")
    keys = {"acme": "key-of-acme", "batch": "key-of-batch"}
    config = {
        "model": str(model),
        "model_name": "tiny",
        "port": free_port(),
        "kv_transfer": {**side_channels(), "local_below": SHORT},
        "monitor": {"port": free_port()},
        "max_model_len": 1024,
        "warmup_tokens": [32, 512],
        "tiers": TIERS,
        "api_keys": [
            {"tenant": "acme", "key": keys["acme"]},
            {"tenant": "batch", "key": keys["batch"], "highest_tier": "search"},
        ],
    }
    with deployed(tmp_path_factory.mktemp("own-tiers"), config, keys) as running:
        yield running


def ask(deployment, tier=None, service_tier=None, tenant="acme"):
    """The headers of an answer."""
    answer = deployment.client(tenant).completions.with_raw_response.create(
        model="tiny",
        prompt="hello " * 100,
        max_tokens=3,
        stream=True,
        extra_headers={} if tier is None else {"x-slo-tier": tier},
        extra_body={"ignore_eos": True} | ({} if service_tier is None else {"service_tier": service_tier}),
    )
    assert sum(1 for _ in answer.parse()) > 0
    return answer.headers


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def served(own):
    """The deployment, after a request of each tier."""
    for tier in TIERS:
        assert ask(own, tier)["x-slo-tier"] == tier
    return own


def test_each_tier_is_served_with_its_own_objective(served):
    assert ask(served, "text")["x-slo-ttft-budget-ms"] == "5000.0"
    assert float(ask(served, "file")["x-slo-ttft-budget-ms"]) > 0, "a multiple of the predicted prefill"


def test_service_tiers_and_the_default_are_those_of_the_file(served):
    assert ask(served)["x-slo-tier"] == "search"
    assert ask(served, service_tier="auto")["x-slo-tier"] == "search"
    assert ask(served, service_tier="priority")["x-slo-tier"] == "text"
    assert ask(served, service_tier="batch")["x-slo-tier"] == "file"


@pytest.mark.parametrize("name", ["premium", "standard", "gold", "system", "none"])
def test_an_unknown_tier_is_refused_with_the_names_of_this_deployment(served, name):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, name)
    assert "give one of text, image, search, file" in caught.value.message
    assert caught.value.status_code == 400


def test_a_service_tier_of_no_tier_is_refused_with_those_of_this_deployment(served):
    with pytest.raises(openai.BadRequestError, match="give one of auto, default, priority, flex, batch"):
        ask(served, service_tier="scale")


def test_a_tenant_is_served_up_to_its_highest_tier(served):
    headers = ask(served, "image", tenant="batch")
    assert (headers["x-slo-tier"], headers["x-slo-tier-clamped-from"]) == ("search", "image")
    assert ask(served, "file", tenant="batch")["x-slo-tier"] == "file"


def test_metrics_monitor_and_top_show_these_tiers_and_no_others(served):
    def shown():
        return json.loads(served.top("--json").stdout)

    for tier in TIERS:
        assert_soon(lambda tier=tier: served.metric("slackserve_requests_total", tier=tier) >= 1, 30)
    assert served.metric("slackserve_requests_total", tier="premium") == 0
    assert_soon(lambda: all(each["judged"] for each in shown()["monitor"]["tiers"].values()), 30)
    frame = shown()
    assert frame["tiers"] == list(TIERS)
    state = frame["monitor"]
    assert list(state["tiers"]) == list(TIERS)
    assert [each["target"] for each in state["tiers"].values()] == [0.97, 0.9, 0.95, 0.9]
    text = scraped(state["metrics_port"])
    assert 'slackserve_slo_target_ratio{model="tiny",tier="text"} 0.97' in text
    assert 'slackserve_policy_shed_ratio{model="tiny",tier="file"} 0.0' in text
    assert 'slackserve_monitor_placements_total{decision="placed",model="tiny",tier="image"}' in text
    assert "premium" not in text
    rows = [
        line.split()[0]
        for line in served.top("--once").stdout.splitlines()
        if "%" in line and line.split()[0] in TIERS
    ]
    assert rows[-4:] == list(TIERS)


def complete(deployment, prompt, max_tokens):
    """The token ids of a greedy answer, and who computed its prompt."""
    answer = deployment.client().completions.with_raw_response.create(
        model="tiny",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.parse().choices
    return choice.token_ids, answer.headers.get("x-slo-prefilled-by", "prefill")


def test_a_short_prompt_is_computed_by_decode_and_answered_alike(served):
    def counted(metric):
        return served.metric(metric, reason="cheaper_on_decode")

    prefills, placements = "slackserve_local_prefills_total", "slackserve_placements_total"
    before = counted(prefills)
    prompt = random.Random(1).choices(range(200), k=SHORT)
    first, by = complete(served, prompt, 9)
    assert by == "decode"
    assert_soon(lambda: counted(prefills) == before + 1, 30)
    assert_soon(lambda: counted(placements) >= 1, 30)
    for known in (1, 8):
        rest, by = complete(served, prompt + first[:known], 9 - known)
        assert (rest, by) == (first[known:], "prefill")


def picture(colour):
    written = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def look(served, colour, **more):
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": picture(colour)}},
    ]
    return served.client("acme").chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts}],
        max_tokens=6,
        logprobs=True,
        extra_body={"ignore_eos": True},
        **{"temperature": 0, **more},
    )


def numbers(choice):
    return [token.logprob for token in choice.logprobs.content]


def test_an_image_is_looked_at_and_again_from_the_cache(served):
    red, blue, again = look(served, "red"), look(served, "blue"), look(served, "red")
    assert red.usage.prompt_tokens > len("user: What is it?assistant: ")
    assert numbers(red.choices[0]) == pytest.approx(numbers(again.choices[0]), abs=1e-4)
    assert numbers(red.choices[0]) != pytest.approx(numbers(blue.choices[0]), abs=1e-6)
    assert_soon(lambda: served.metric("slackserve_local_prefills_total", reason="not_text") >= 3, 10)


def test_several_answers_to_an_image_and_a_stream(served):
    both = look(served, "red", n=2, temperature=1, seed=7).choices
    assert [len(numbers(choice)) for choice in both] == [6, 6]
    red = look(served, "red").choices[0]
    streamed = [chunk.choices[0].delta.content or "" for chunk in look(served, "red", stream=True)]
    assert "".join(streamed) == red.message.content


def test_what_one_asks_for_decides_for_nobody_else(served):
    client = served.client("acme")
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    odd = {"type": "json_schema", "json_schema": {"name": "odd", "schema": SCHEMA}}
    with pytest.raises(openai.BadRequestError, match="not supported by xgrammar"):
        client.chat.completions.create(**ask, response_format=odd)
    answer = client.chat.completions.create(**ask, extra_body={"structured_outputs": {"choice": ["warm"]}})
    assert answer.choices[0].message.content == "warm"
    assert client.chat.completions.create(**ask, response_format={"type": "json_object"}).choices
