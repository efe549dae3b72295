"""Whom the commands that talk to a running deployment ask."""

from types import SimpleNamespace

from deployments.local import running
from deployments.local.launcher import PREFILL_PREFIX
from telemetry.reporting import monitor_client


def test_the_monitor_is_found_also_after_the_files_of_the_command_have_changed(monkeypatch):
    serving = "slo-monitor-app-of0older0code"
    listed = [{"name": serving, "namespace": monitor_client.NAMESPACE}]

    def get_actor(name, namespace):
        if (name, namespace) != (serving, monitor_client.NAMESPACE):
            raise ValueError(name)
        return name

    def get_deployment_handle(*name):
        return name  # which does not say which models there are

    context = SimpleNamespace(gcs_address="127.0.0.1:6379")
    monkeypatch.setattr(
        monitor_client,
        "ray",
        SimpleNamespace(
            get_actor=get_actor, util=SimpleNamespace(list_named_actors=lambda all_namespaces: listed)
        ),
    )
    monkeypatch.setattr(running, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(running, "serve", SimpleNamespace(get_deployment_handle=get_deployment_handle))
    found = running._deployment({"app": SimpleNamespace(deployments=[f"{PREFILL_PREFIX}tiny"])}, None)
    assert found.model == "tiny"
    assert found.find_monitor() == serving
