"""The monitor's actor on a real Ray: killed, ended, and scraped by a real Prometheus."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from ports import free_port
from prometheus import needs_prometheus, scraping
from waiting import assert_soon

pytestmark = pytest.mark.serial
ROOT = Path(__file__).parents[2]


class Session:
    """A `monitor_session.py` that runs."""

    def __init__(self, directory):
        self.port = free_port()
        script = ROOT / "tests" / "support" / "monitor_session.py"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(self.port), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def until(self, condition, within_s):
        """All that is said until `condition` holds."""
        said, deadline_s = [], time.monotonic() + within_s
        while not (said and condition(said[-1])):
            said.append(self._lines.get(timeout=max(0.01, deadline_s - time.monotonic())))
        return said

    def command(self, word):
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def scrape(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def session():
    with tempfile.TemporaryDirectory(prefix="slo") as directory:  # Ray's sockets need a short path
        session = Session(directory)
        yield session
        session.close()


def versions(said):
    return [line["version"] for line in said]


def test_policies_are_followed_and_go_on_growing_after_the_monitor_was_killed(session):
    before = session.until(lambda line: line["shed"] >= 0.5 and line["correction"] > 1, 60)
    assert before[-1]["correction"] == pytest.approx(2.0, rel=0.01)
    session.command("kill")
    killed = session.until(lambda line: is_younger(line, before[-1]), 20)
    after = session.until(lambda line: line["version"] > killed[-1]["version"] and not line["lost"], 20)
    assert versions(before + killed + after) == sorted(versions(before + killed + after))
    shed = [line["shed"] for line in before + killed + after]
    assert shed == sorted(shed), "what was shed stays shed while nobody says otherwise"
    assert_soon(
        lambda: f'slackserve_policy_version{{model="tiny"}} {after[-1]["version"]}.0' in session.scrape(), 10
    )


def test_another_application_of_the_cluster_is_steered_by_itself(session):
    (line,) = session.until(lambda line: line["shed"] >= 0.5, 30)[-1:]
    assert line["other_shed"] == 0.0
    assert line["other_lost"] is False


def is_younger(line, before):
    """Whether another monitor than before has answered."""
    return line["uptime_s"] is not None and line["uptime_s"] < before["uptime_s"]


@needs_prometheus
def test_a_prometheus_that_scrapes_it_has_its_metrics(session, tmp_path):
    with scraping(tmp_path, [session.port]) as prometheus:
        found = prometheus.query
        assert_soon(lambda: found('slackserve_slo_burn_rate{tier="premium",window="short"} > 50'), 30)
        (attained,) = found('slackserve_slo_attainment_ratio{tier="premium",window="long"}')
        assert float(attained["value"][1]) == 0.0
        (latency,) = found('slackserve_slo_latency_seconds{tenant="acme",latency="ttft",quantile="0.95"}')
        assert float(latency["value"][1]) == pytest.approx(0.3, rel=0.01)
        (correction,) = found('slackserve_prediction_correction_ratio{replica="slow"}')
        assert float(correction["value"][1]) == pytest.approx(2.0, rel=0.01)
        assert found("slackserve_policy_changes_total{reason='top_tier_at_risk'}")
        assert_soon(lambda: found('rate(slackserve_slo_judged_total{objective="all",met="no"}[10s]) > 0'), 30)
        judged = found('sum by (met) (slackserve_slo_judged_total{objective="all"})')
        assert {each["metric"]["met"] for each in judged} == {"no"}


def test_a_configuration_with_another_port_holds_for_the_monitor_that_runs(session):
    (line,) = session.until(lambda line: line["uptime_s"] is not None, 10)[-1:]
    former, session.port = session.port, free_port()
    session.command(f"move {session.port}")
    assert_soon(lambda: "slackserve_slo_target" in session.scrape(), 10)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{former}/metrics", timeout=5)
    assert session.until(lambda _: True, 5)[-1]["uptime_s"] > line["uptime_s"], "it is the same one"


def test_the_monitor_of_new_code_has_the_port_of_the_old_one(session):
    judged = "slackserve_slo_judged_total{"
    assert_soon(lambda: judged in session.scrape(), 10, "the old one exports")
    session.command(f"upgrade {session.port}")

    def is_another():
        scraped = session.scrape()
        return "slackserve_slo_target" in scraped and judged not in scraped

    assert_soon(is_another, 10, "the port is not that of the new one, to which nobody has reported,")
    assert session.until(lambda _: True, 5)[-1]["lost"] is False, "the old one still steers those that it has"


def test_without_the_monitor_the_last_policy_holds(session):
    session.until(lambda line: line["lost"] is False, 10)
    session.command("end")
    lost = session.until(lambda line: line["lost"], 30)[-1]
    assert lost["version"] > 0
    for _ in range(4):
        (line,) = session.until(lambda line: True, 5)
        assert {**line, "uptime_s": None} == {**lost, "uptime_s": None}
    assert session.scrape() == ""
