"""Two models of one application, and adapters: answers, objectives, metrics and overload apart."""

import asyncio
import json
import random
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from waiting import assert_soon

pytestmark = pytest.mark.e2e

NAMES = ("tiny", "small", "small-lora")
TOKENS = 12


def reference(places, name, prompt):
    """What transformers says greedily."""
    base = name.removesuffix("-lora")
    model = AutoModelForCausalLM.from_pretrained(places[base]).float().eval()
    if base != name:
        weights = load_file(places[name] / "adapter_model.safetensors")
        for key in {key.rpartition(".lora_")[0] for key in weights}:
            part = model.get_submodule(key.removeprefix("base_model.model."))
            part.weight.data += weights[f"{key}.lora_B.weight"] @ weights[f"{key}.lora_A.weight"]
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
    return ids[0, len(prompt) :].tolist()


def ask(served, name, prompt, tenant="acme", **fields):
    return served.client(tenant).completions.create(
        model=name, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True} | fields
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_answers_with_its_own_weights(served, places, name):
    prompt = random.Random(3).choices(range(200), k=300)
    answer = ask(served, name, prompt, return_token_ids=True)
    assert answer.model == name
    assert answer.choices[0].token_ids == reference(places, name, prompt)


def test_they_are_listed_with_their_lengths(served):
    listed = {card.id: card.metadata for card in served.client().models.list()}
    assert {name: listed[name]["max_request_context_length"] for name in NAMES} == {
        "tiny": 4096,
        "small": 1024,
        "small-lora": 1024,
    }
    assert listed["small-lora"]["parent"] == "small"
    with pytest.raises(openai.BadRequestError, match="1024"):
        ask(served, "small", [1] * 2000)
    assert ask(served, "tiny", [1] * 2000).usage.prompt_tokens == 2000


def test_a_request_without_a_model_goes_to_the_first(served):
    answer = httpx.post(
        f"{served.url}/v1/completions",
        json={"prompt": [1, 2, 3], "max_tokens": 1},
        headers={"authorization": f"Bearer {served.keys['acme']}"},
        timeout=60,
    )
    assert answer.json()["model"] == "tiny"


def test_each_has_replicas_of_its_own(served):
    answer = httpx.get(
        f"{served.url}/ready", headers={"authorization": f"Bearer {served.keys['acme']}"}
    ).json()
    assert {model: len(fleet["prefill"]) for model, fleet in answer["fleets"].items()} == {
        "tiny": 1,
        "small": 1,
    }
    replicas = {each["replica"] for fleet in answer["fleets"].values() for each in fleet["prefill"]}
    assert len(replicas) == 2


def test_top_shows_the_one_that_is_asked_for(served):
    with ThreadPoolExecutor(3) as commands:
        asked = [
            commands.submit(served.top, "--json", "--model", name, check=False)
            for name in ("tiny", "small", "large")
        ]
    *shown, refused = [each.result() for each in asked]
    assert [json.loads(one.stdout)["model"] for one in shown] == ["tiny", "small"]
    assert refused.returncode == 1
    assert "no model 'large' here; give one of tiny, small" in refused.stdout + refused.stderr


async def test_a_tenants_limit_is_one_for_all_models(served):
    async with served.http("metered") as client:

        async def status(model, tokens):
            body = {"model": model, "prompt": [7] * 50, "max_tokens": tokens, "ignore_eos": True}
            return (await client.post("/v1/completions", json=body)).status_code

        long = asyncio.create_task(status("tiny", 300))
        await asyncio.sleep(0.5)
        assert await status("small", 1) == 429
        assert await long == 200
        assert await status("small", 1) == 200


def judged(port, model, met):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    labels = rf'met="{met}",model="{model}",objective="all",served="{model}",tier="\w+"'
    wanted = rf"slackserve_slo_judged_total{{{labels}}} (\S+)"
    return sum(float(value) for value in re.findall(wanted, text))


async def test_the_overload_of_one_is_not_the_others(served, monitor_port):
    before = {name: judged(monitor_port, name, "no") for name in ("tiny", "small")}
    rejected = served.metric("slackserve_rejections_total", model="tiny")
    async with served.http(wait_s=120) as client:

        async def status(model, tokens, **headers):
            prompt = random.choices(range(200), k=tokens)
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
            answer = await client.post(
                "/v1/completions", json=body, headers={"x-slo-tier": "standard"} | headers
            )
            return answer.status_code

        # Due sooner than a few of them take on any machine, and few enough for a slow one to place them all.
        soon = {"x-slo-ttft-ms": "150"}
        crowd = [asyncio.create_task(status("small", 1000, **soon)) for _ in range(60)]
        # The two models share the machine's cores, so the time itself is not apart, only who is refused.
        calm = [await status("tiny", 20, **{"x-slo-ttft-ms": "60000"}) for _ in range(10)]
        refused = [await each for each in crowd].count(429)
    assert calm == [200] * 10
    assert refused > 20
    assert_soon(lambda: judged(monitor_port, "small", "no") >= before["small"] + refused, 20)
    assert judged(monitor_port, "tiny", "no") == before["tiny"]
    assert_soon(lambda: served.metric("slackserve_rejections_total", model="small") >= refused, 20)
    assert served.metric("slackserve_rejections_total", model="tiny") == rejected
    assert served.metric("slackserve_requests_total", model="small-lora", outcome="finished") >= 1


def test_one_that_is_down_takes_nothing_from_the_other(served):
    def ready(query=""):
        key = {"authorization": f"Bearer {served.keys['acme']}"}
        return httpx.get(f"{served.url}/ready{query}", headers=key, timeout=10)

    assert ready("?all").status_code == 200
    (replica,) = [
        process
        for process in psutil.Process(served.process.pid).children(recursive=True)
        if process.name().startswith("ray::ServeRepli") and "Decode:small" in "".join(process.cmdline())
    ]
    replica.kill()
    assert_soon(lambda: ready("?all").status_code == 503, 30)
    assert ready().status_code == 200
    (waiting,) = ready().json()["waiting"].items()
    assert waiting[0] == "small"
    assert waiting[1].startswith("no warm replica")
    assert ask(served, "tiny", [1] * 50).usage.completion_tokens == TOKENS
    assert_soon(lambda: ready("?all").status_code == 200, 120)
    assert ask(served, "small", [1] * 50).usage.completion_tokens == TOKENS
