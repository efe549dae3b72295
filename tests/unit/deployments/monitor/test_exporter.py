"""What the monitor exports is what the catalogue says, and what `slackserve top` gets."""

import logging
import socket
import threading
import time
import urllib.request
from dataclasses import replace
from urllib.request import urlopen

import pytest
from ports import free_port

from deployments.monitor.actor import shown
from deployments.monitor.exporter import MOST_CONNECTIONS, Exporter, samples
from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand
from slo.monitor.core import SETTLE_S, MonitorCore
from slo.monitor.directives import DirectiveReason, ReplicaSeen, StepSeen, WaiterSeen
from slo.monitor.latency_sketch import LatencySketch
from slo.monitor.messages import IngressSeen, MonitorReport, PrefillSeen, Role, RouterSeen
from slo.monitor.settings import MonitorSettings
from slo.monitor.shedding import SteeringRules
from slo.outcomes import Outcome, RequestEnded
from slo.predict.prediction_error import PassMeasured
from slo.preemption.types import KeepReason
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, ObjectiveName
from telemetry import catalogue
from telemetry.catalogue import MetricKind

R = ReplicaId("r")
BUSY = FleetDemand(PrefillDemand(1.8, 0.0, capacity=2.0, replicas=3), DecodeDemand(0.5, 3, replicas=2))
LATE = RequestEnded(
    "m",
    PREMIUM,
    'a "quoted" tenant',
    Outcome.FINISHED,
    e2e_s=1.0,
    ttft_s=0.3,
    ttft_budget_s=0.2,
    predicted_ttft_s=0.15,
    tpot_s=0.01,
    tpot_budget_s=0.02,
)


@pytest.fixture
def core():
    """A monitor of which every part has something to show."""
    core = MonitorCore(MonitorSettings(rules=SteeringRules(tighten_every_s=1.0), models=("m",)), 0.0)
    ended = (LATE,) * 10, (replace(LATE, tier=STANDARD, ttft_s=0.1, predicted_ttft_s=0.05),) * 10
    for dropped, requests in enumerate(ended, 1):
        core.heard(MonitorReport("i", Role.INGRESS, 0, IngressSeen(requests), dropped=dropped), SETTLE_S)
    step = StepSeen(7, (BACKGROUND,), 2.0, 0.1, KeepReason.WAITERS_IN_TIME)
    work = ReplicaSeen(R, step, (WaiterSeen(JobId("urgent"), PREMIUM, 1.0),))
    measured = (PassMeasured(0.1, 0.1, 0.2),) * 20
    core.heard(MonitorReport(R, Role.PREFILL, 0, PrefillSeen(work, measured)), SETTLE_S)
    placed, refused = {(PREMIUM, "only_replica"): 3}, {(BACKGROUND, "shed_by_policy"): 2}
    core.heard(MonitorReport("router", Role.ROUTER, 0, RouterSeen(placed, refused, BUSY)), SETTLE_S)
    core.look(SETTLE_S)
    return core


def exported(core):
    return {(metric.name, labels): value for metric, labels, value in samples("m", core, SETTLE_S)}


def test_everything_in_the_catalogue_is_exported_with_its_labels(core):
    found = list(samples("m", core, SETTLE_S))
    assert {metric.name for metric, _, _ in found} == {metric.name for metric in catalogue.MONITOR}
    assert all(len(labels) == len(metric.labels) for metric, labels, _ in found)
    assert len(exported(core)) == len(found), "a series twice"


def test_the_values_are_the_monitors(core):
    found = exported(core)
    assert found["slackserve_slo_attainment_ratio", ("m", "premium", "short")] == 0.0
    assert found["slackserve_slo_attainment_ratio", ("m", "standard", "long")] == 1.0
    assert ("slackserve_slo_attainment_ratio", ("m", "background", "long")) not in found, "nothing came"
    judged = {labels: value for (name, labels), value in found.items() if name == "slackserve_slo_judged"}
    assert judged["m", "m", "premium", "ttft", "no"] == judged["m", "m", "premium", "all", "no"] == 10
    assert judged["m", "m", "premium", "tpot", "yes"] == 10
    assert judged["m", "m", "background", "all", "no"] == 0, "so that a rate sees the first one"
    assert found["slackserve_slo_burn_rate", ("m", "premium", "long")] == pytest.approx(100.0)
    assert found["slackserve_slo_headroom_ratio", ("m", "standard", "long")] == pytest.approx(0.5, abs=0.01)
    assert found["slackserve_policy_shed_ratio", ("m", "background")] == 0.25
    assert found["slackserve_policy_changes", ("m", "top_tier_at_risk")] == 1
    assert found["slackserve_prediction_correction_ratio", (R,)] == pytest.approx(2.0)
    assert found["slackserve_monitor_directives", ("m", DirectiveReason.OUT_OF_TIME.value)] == 1
    assert found["slackserve_monitor_placements", ("m", "premium", "placed")] == 3
    assert found["slackserve_monitor_placements", ("m", "background", "refused")] == 2
    assert found["slackserve_monitor_subscribers_behind", ("m",)] == 3
    assert found["slackserve_monitor_subscribers", ("m", "prefill")] == 1
    assert found["slackserve_monitor_subscribers", ("m", "decode")] == 0, "which is not absent"
    assert found["slackserve_monitor_dropped", ("m",)] == 2


def test_replicas_that_the_router_uses_are_told_whatever_monitor_they_report_to(core):
    used = {role: ("slackserve_monitor_replicas", ("m", role)) for role in ("prefill", "decode")}
    found = exported(core)
    assert (found[used["prefill"]], found[used["decode"]]) == (3, 2)
    assert found["slackserve_monitor_subscribers", ("m", "decode")] == 0
    silent_s = SETTLE_S + 6.0
    later = {(metric.name, labels): value for metric, labels, value in samples("m", core, silent_s)}
    assert (later[used["prefill"]], later[used["decode"]]) == (0, 0), "the router says nothing any more"


def test_all_that_is_counted_can_be_counted_from_zero(core):
    before = exported(core)
    core.count_anew()
    assert {name for name, _ in exported(core)} >= {"slackserve_slo_judged", "slackserve_slo_burn_rate"}
    for metric, labels, value in samples("m", core, SETTLE_S):
        is_counter = metric.kind is MetricKind.COUNTER
        assert value == (0 if is_counter else before[metric.name, labels]), metric.name


def test_a_request_of_an_adapter_counts_under_its_name_and_that_of_its_model():
    core = MonitorCore(MonitorSettings(models=("m", "adapter")), 0.0)
    core.heard(MonitorReport("i", Role.INGRESS, 0, IngressSeen((replace(LATE, model="adapter"),))), SETTLE_S)
    found = exported(core)
    assert found["slackserve_slo_judged", ("adapter", "m", "premium", "all", "no")] == 1
    assert found["slackserve_slo_judged", ("m", "m", "premium", "all", "no")] == 0


def test_the_burn_rate_that_the_policy_acts_on_is_told_beside_that_of_all():
    core = MonitorCore(MonitorSettings(models=("m",)), 0.0)
    hopeless = replace(LATE, tpot_budget_s=None, unattainable=(ObjectiveName.TTFT,))
    core.heard(MonitorReport("i", Role.INGRESS, 0, IngressSeen((hopeless,) * 10)), SETTLE_S)
    found = exported(core)
    assert found["slackserve_slo_burn_rate", ("m", "premium", "short")] == pytest.approx(100.0)
    assert found["slackserve_slo_burn_rate_in_reach", ("m", "premium", "short")] == 0.0
    core.heard(MonitorReport("i", Role.INGRESS, 0, IngressSeen((LATE,) * 10)), SETTLE_S)
    assert exported(core)["slackserve_slo_burn_rate_in_reach", ("m", "premium", "short")] == pytest.approx(
        100.0
    )


def test_a_replica_with_too_few_passes_has_a_correction_and_no_error(core):
    few = PrefillSeen(ReplicaSeen(ReplicaId("new"), None, ()), (PassMeasured(0.1, 0.1, 0.2),))
    core.heard(MonitorReport("new", Role.PREFILL, 0, few), SETTLE_S)
    found = exported(core)
    assert found["slackserve_prediction_correction_ratio", ("new",)] == 1.0
    assert ("slackserve_prediction_error_ratio", ("new", "mape")) not in found
    assert ("slackserve_prediction_error_ratio", (R, "mape")) in found


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()


def test_a_scrape_sees_the_last_look(core):
    exporter = Exporter("127.0.0.1", free_port())
    exporter.open()
    assert scrape(exporter.port) == ""
    exporter.show({"m": core}, SETTLE_S)
    text = scrape(exporter.port)
    assert 'slackserve_slo_target_ratio{model="m",tier="premium"} 0.99' in text
    assert 'slackserve_policy_changes_total{model="m",reason="top_tier_at_risk"} 1.0' in text
    assert 'tenant="a \\"quoted\\" tenant"' in text


def test_models_are_told_apart(core):
    exporter = Exporter("127.0.0.1", free_port())
    exporter.open()
    exporter.show({"m": core, "other": MonitorCore(MonitorSettings(), SETTLE_S)}, SETTLE_S)
    text = scrape(exporter.port)
    assert 'slackserve_policy_shed_ratio{model="m",tier="background"} 0.25' in text
    assert 'slackserve_policy_shed_ratio{model="other",tier="background"} 0.0' in text
    assert text.count("# TYPE slackserve_policy_shed_ratio gauge") == 1


def test_a_busy_port_is_told_once_and_taken_when_it_is_free(core, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        exporter = Exporter("127.0.0.1", other.getsockname()[1])
        with caplog.at_level(logging.WARNING):
            exporter.open()
            exporter.open()
        exporter.show({"m": core}, SETTLE_S)
        assert shown(core.state(SETTLE_S), exporter)["metrics_port"] == 0
        assert "in use" in shown(core.state(SETTLE_S), exporter)["metrics_refused"]
        assert len(caplog.records) == 1
        port = other.getsockname()[1]
    exporter.open()
    assert shown(core.state(SETTLE_S), exporter)["metrics_port"] == port
    assert shown(core.state(SETTLE_S), exporter)["metrics_refused"] == ""


def test_another_address_after_a_change_of_configuration(core):
    first, second = free_port(), free_port()
    exporter = Exporter("127.0.0.1", first)
    exporter.open()
    exporter.move("127.0.0.1", second)
    exporter.open()
    exporter.show({"m": core}, SETTLE_S)
    with urlopen(f"http://127.0.0.1:{second}/metrics", timeout=5) as answer:
        assert b"slackserve_slo_target" in answer.read()
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{first}/metrics", timeout=5)
    exporter.move("127.0.0.1", 0)
    exporter.open()
    assert exporter.port == 0
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{second}/metrics", timeout=5)


def test_port_0_exports_nothing(core):
    exporter = Exporter("127.0.0.1", 0)
    exporter.open()
    exporter.show({"m": core}, SETTLE_S)
    assert exporter.port == 0
    assert list(exporter.collect()) == []


def test_the_state_for_people_is_plain_and_complete(core):
    state = shown(core.state(SETTLE_S), Exporter("127.0.0.1", 0))
    assert list(state["tiers"]) == list(DEFAULT_TIERS.names)
    assert state["policy"]["version"] == core.policy.version
    assert state["policy"]["shed"] == {"background": 0.25}
    assert state["tiers"]["premium"]["at_risk"] is True
    assert state["tiers"]["premium"]["attained"] == 0.0
    assert state["tiers"]["background"]["attained"] is None
    assert state["error"]["mape"] == pytest.approx(0.5)
    assert state["ttft_error"]["mape"] == pytest.approx(0.5)
    assert state["subscribers"] == {"ingress": 1, "prefill": 1, "router": 1}
    assert state["metrics_port"] == 0


def test_what_is_shown_to_people_takes_no_longer_with_many_tenants(core, monkeypatch):
    merged, merge = [], LatencySketch.merged
    monkeypatch.setattr(LatencySketch, "merged", lambda sketches: merged.append(1) or merge(sketches))
    requests = tuple(replace(LATE, tenant=f"tenant {number}") for number in range(50))
    core.heard(MonitorReport("i", Role.INGRESS, 0, IngressSeen(requests)), SETTLE_S)
    shown(core.state(SETTLE_S), Exporter("127.0.0.1", 0))
    two_windows_of_four_sketches = 2 * 4 * len(DEFAULT_TIERS.names)
    assert len(merged) == two_windows_of_four_sketches
    assert len(core.series(SETTLE_S)) > 50


@pytest.mark.parametrize("outcome", Outcome)
def test_the_counters_ratio_is_the_attainment_whatever_happened_to_the_requests(outcome):
    core = MonitorCore(MonitorSettings(models=("m",)), 0.0)
    ended = [
        replace(LATE, ttft_s=0.1),
        LATE,
        *(replace(LATE, outcome=outcome, ttft_s=it) for it in (0.1, 0.3)),
    ]
    core.heard(MonitorReport("i", Role.INGRESS, 0, IngressSeen(tuple(ended))), SETTLE_S)
    found = exported(core)
    met, missed = (found["slackserve_slo_judged", ("m", "m", "premium", "all", it)] for it in ("yes", "no"))
    attainment = core.state(SETTLE_S).tiers[PREMIUM].long
    assert (met, met + missed) == (attainment.met, attainment.judged)


@pytest.fixture
def listening():
    exporter = Exporter("127.0.0.1", free_port())
    exporter.open()
    yield exporter
    exporter.close()


def half_asked(port):
    """A connection that has sent half of a request line."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(b"GET /metr")
    return connection


def answering():
    return sum("process_request_thread" in each.name for each in threading.enumerate())


def test_who_does_not_go_on_asking_is_left(listening, capfd):
    """Each connection has a thread, and nobody is asked for a key."""
    with half_asked(listening.port) as connection:
        assert connection.recv(1) == b""
    assert capfd.readouterr() == ("", "")


def test_who_holds_many_connections_keeps_nobody_from_reading(listening):
    held = [half_asked(listening.port) for _ in range(100)]
    with urlopen(f"http://127.0.0.1:{listening.port}/metrics", timeout=5) as answer:
        assert answer.status == 200
    until_s = time.monotonic() + 3
    while (threads := answering()) > MOST_CONNECTIONS and time.monotonic() < until_s:
        time.sleep(0.05)
    assert threads <= MOST_CONNECTIONS
    assert held[-1].send(b"i") == 1
    for connection in held:
        connection.close()
