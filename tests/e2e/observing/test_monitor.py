"""The SLO monitor of a real deployment: heard by all, killed, scraped."""

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from waiting import assert_soon

from telemetry.reporting.monitor_names import find_monitor

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def connected(deployment):
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def state():
    """What the monitor tells `slackserve top`; None while it does not answer."""
    try:
        return ray.get(find_monitor("slackserve").state.remote("tiny"), timeout=5)
    except (ValueError, ray.exceptions.RayError):
        return None


def ask(client):
    stream = client.completions.create(
        model="tiny",
        prompt="hello " * 300,
        max_tokens=3,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-slo-tier": "premium"},
    )
    return sum(1 for _ in stream)


def judged(met):
    """How many answers in premium the monitor has judged by their end."""
    shown = state()
    assert shown["metrics_port"], shown
    address = f"http://127.0.0.1:{shown['metrics_port']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("slackserve_slo_judged_total{") and all(
                label in line for label in ('tier="premium"', 'objective="e2e"', f'met="{met}"')
            ):
                return float(line.rpartition(" ")[2])
    return 0.0


def goes_on(before, after):
    """Whether a policy is that of before its monitor was killed, or a newer one.

    There is a newer one only if what has been measured since changes it.
    """
    return after["version"] > before["version"] or after == before


@pytest.mark.parametrize(("e2e_ms", "met"), [(20_000, "yes"), (1, "no")])
def test_an_end_to_end_objective_makes_a_deadline_and_is_judged(deployment, e2e_ms, met):
    before = judged(met)
    answer = deployment.client().completions.with_raw_response.create(
        model="tiny",
        prompt="hello " * 20,
        max_tokens=20,
        extra_body={"ignore_eos": True},
        extra_headers={"x-slo-tier": "premium", "x-slo-e2e-ms": str(e2e_ms)},
    )
    assert answer.parse().usage.completion_tokens == 20
    budget_ms = float(answer.headers["x-slo-ttft-budget-ms"])
    assert 0.1 * e2e_ms <= budget_ms < min(e2e_ms, 2001)
    assert_soon(lambda: judged(met) == before + 1, 30)


def test_everybody_reports_follows_and_goes_on_while_the_monitor_is_killed(deployment):
    client = deployment.client()
    for _ in range(10):
        assert ask(client)
    assert_soon(lambda: set(state()["subscribers"]) == {"ingress", "router", "prefill", "decode"}, 30)
    assert_soon(lambda: state()["tiers"]["premium"]["judged"] >= 10, 30)
    assert_soon(lambda: (state()["error"] or {"samples": 0})["samples"] >= 10, 30, "no pass was measured")
    before = state()
    assert before["tiers"]["premium"]["ttft"]["p50"] > 0
    assert before["policy"]["version"] >= 1
    assert before["corrections"].keys() <= {replica["replica"] for replica in deployment.fleet()["prefill"]}
    with urllib.request.urlopen(f"http://127.0.0.1:{before['metrics_port']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'slackserve_monitor_subscribers{model="tiny",role="prefill"} 1.0' in text
    assert 'tenant="acme"' in text

    ray.kill(find_monitor("slackserve"), no_restart=False)
    with ThreadPoolExecutor(1) as waiting:
        back = waiting.submit(
            assert_soon, lambda: (state() or before)["uptime_s"] < before["uptime_s"], 30, "no monitor again"
        )
        while not back.done():
            assert ask(client), "serving goes on"
    back.result()
    assert ask(client)
    assert_soon(lambda: set(state()["subscribers"]) == {"ingress", "router", "prefill", "decode"}, 30)
    assert_soon(lambda: goes_on(before["policy"], state()["policy"]), 30, "another policy, or none")
    assert_soon(lambda: state()["behind"] == 0, 30)
    assert_soon(lambda: state()["tiers"]["premium"]["judged"] > 0, 30, "the windows do not fill again")


def test_ray_exports_the_metrics_of_the_others_where_it_is_configured(deployment, ray_metrics_port):
    assert ask(deployment.client())
    assert deployment.metrics_port() == ray_metrics_port
    assert_soon(lambda: "ray_slackserve_" in deployment.scrape(), 30)
