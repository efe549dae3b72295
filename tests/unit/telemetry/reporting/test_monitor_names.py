"""How monitors are named, and who finds which."""

from types import SimpleNamespace

import pytest

from telemetry.reporting import monitor_names


def test_two_applications_and_two_versions_have_a_monitor_each(monkeypatch):
    names = {monitor_names.monitor_name("one"), monitor_names.monitor_name("two")}
    monkeypatch.setattr(monitor_names, "running_code", lambda: "newer")
    names.add(monitor_names.monitor_name("one"))
    assert len(names) == 3


class NamedActors:
    """Names of actors, as Ray lists and finds them; a handle is its name."""

    def __init__(self, *names, listed_only=()):
        self.there = names
        self.listed = (*listed_only, *names)
        self.util = SimpleNamespace(list_named_actors=self._list)

    def _list(self, *, all_namespaces):
        assert all_namespaces
        elsewhere = {"name": monitor_names.monitor_name("app"), "namespace": "another's"}
        return [elsewhere, *({"name": name, "namespace": monitor_names.NAMESPACE} for name in self.listed)]

    def get_actor(self, name, namespace):
        if namespace != monitor_names.NAMESPACE or name not in self.there:
            raise ValueError(name)
        return name


@pytest.mark.parametrize("codes", [("old", "own"), ("old",), ()])
def test_who_only_asks_finds_the_monitors_of_whatever_code_runs(monkeypatch, codes):
    names = [f"slo-monitor-app-{code}" for code in codes]
    others = "slo-monitor-app-two-old", "slo-monitor-other-old", "someone"
    monkeypatch.setattr(monitor_names, "ray", NamedActors(*others, *names))
    assert list(monitor_names.monitors_of("app")) == names


def test_without_a_monitor_nobody_else_is_found(monkeypatch):
    others = "slo-monitor-app-two-old", "slo-monitor-other-old"
    actors = NamedActors(*others, listed_only=("slo-monitor-app-ended",))
    monkeypatch.setattr(monitor_names, "ray", actors)
    assert list(monitor_names.monitors_of("app")) == []
