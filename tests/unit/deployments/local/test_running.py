"""Whom the commands that talk to a running deployment ask."""

import logging
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from deployments.local import running
from deployments.local.running import NotRunningError
from deployments.names import DECODE_PREFIX, PREFILL_PREFIX, ROUTER_NAME
from telemetry.reporting import monitor_names


class Handle(NamedTuple):
    """Of a deployment, as far as it is asked for; it does not say which models there are."""

    deployment: str
    application: str
    is_initialized = True


def of_models(*models):
    """The status of an application of ours."""
    return SimpleNamespace(deployments=[ROUTER_NAME, *(PREFILL_PREFIX + model for model in models)])


def test_the_monitor_is_found_also_after_the_files_of_the_command_have_changed(monkeypatch):
    serving = "slo-monitor-app-of0older0code"
    listed = [{"name": serving, "namespace": monitor_names.NAMESPACE}]

    def get_actor(name, namespace):
        if (name, namespace) != (serving, monitor_names.NAMESPACE):
            raise ValueError(name)
        return name

    context = SimpleNamespace(gcs_address="127.0.0.1:6379")
    monkeypatch.setattr(
        monitor_names,
        "ray",
        SimpleNamespace(
            get_actor=get_actor, util=SimpleNamespace(list_named_actors=lambda all_namespaces: listed)
        ),
    )
    monkeypatch.setattr(running, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(running, "serve", SimpleNamespace(get_deployment_handle=Handle))
    found = running._deployment({"app": of_models("tiny")})
    assert found.model == "tiny"
    assert list(found.find_monitors()) == [serving]


def test_handles_answer_without_an_event_loop_where_those_of_replicas_share_theirs(monkeypatch):
    """As in a shell with the environment of a cluster: `RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0`."""
    defaults = InitHandleOptions.__init__.__defaults__
    monkeypatch.setattr(InitHandleOptions.__init__, "__defaults__", (*defaults[:-1], False))
    assert not InitHandleOptions()._run_router_in_separate_loop
    started, handles = {}, {}

    def create_router(handle_id, deployment_id, handle_options):
        assert deployment_id.name not in started
        started[deployment_id.name] = handle_options._run_router_in_separate_loop
        return SimpleNamespace()

    def get_deployment_handle(deployment, application):  # the same one to whoever asks again, as Serve does
        new = DeploymentHandle(deployment, application, _create_router=create_router)
        return handles.setdefault(deployment, new)

    context = SimpleNamespace(gcs_address="127.0.0.1:6379")
    monkeypatch.setattr(running, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(running, "serve", SimpleNamespace(get_deployment_handle=get_deployment_handle))
    for _ in range(2):
        found = running._deployment({"app": of_models("tiny")})
        found.prefill.measurable, found.decode.measure_handoff, found.router.fleet  # noqa: B018 - starts them
    assert started == {ROUTER_NAME: True, f"{PREFILL_PREFIX}tiny": True, f"{DECODE_PREFIX}tiny": True}


@pytest.fixture
def two(monkeypatch):
    """What runs: two applications with one model, and one of which each has another; and another one's."""
    monkeypatch.setattr(
        running, "ray", SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(gcs_address="here:1"))
    )
    monkeypatch.setattr(running, "serve", SimpleNamespace(get_deployment_handle=Handle))
    models = {"old": ["tiny", "small"], "new": ["tiny", "large"]}
    ours = {name: of_models(*has) for name, has in models.items()}
    monkeypatch.setattr(running, "_models", lambda router: models[router[1]])
    return {"dashboard": SimpleNamespace(deployments=["Charts"]), **ours}


@pytest.mark.parametrize("model", ["tiny", None])
def test_where_several_applications_fit_they_are_named_and_none_is_asked(two, model):
    with pytest.raises(NotRunningError, match="old, new; name one with --application"):
        running._deployment(two, model)


@pytest.mark.parametrize(
    ("model", "application", "asked"),
    [
        ("tiny", "new", ("tiny", "new")),
        (None, "new", ("tiny", "new")),
        ("large", None, ("large", "new")),
        ("small", None, ("small", "old")),
    ],
)
def test_the_application_is_that_which_is_named_or_alone_has_the_model(two, model, application, asked):
    found = running._deployment(two, model, application)
    assert found is not None
    assert (found.model, found.prefill[1]) == asked


@pytest.mark.parametrize(
    ("model", "application", "message"),
    [
        ("large", "old", "no model 'large' here; give one of tiny, small"),
        ("tiny", "dashboard", "no application 'dashboard' here; give one of old, new"),
        ("tiny", "newer", "no application 'newer' here; give one of old, new"),
    ],
)
def test_an_application_that_does_not_fit_is_refused_with_those_that_do(two, model, application, message):
    with pytest.raises(NotRunningError, match=message):
        running._deployment(two, model, application)


def test_the_stock_prefill_decode_application_is_none_of_ours(two):
    stock = SimpleNamespace(deployments=["OpenAiIngress", f"{DECODE_PREFIX}tiny", f"{PREFILL_PREFIX}tiny"])
    assert running._deployment({"stock": stock}) is None
    assert running._deployment({"stock": stock, "old": two["old"]}, "tiny").prefill.application == "old"
    with pytest.raises(NotRunningError, match="no application 'stock' here; give one of old"):
        running._deployment({"stock": stock, "old": two["old"]}, None, "stock")


@pytest.mark.parametrize("gone", [ROUTER_NAME, f"{PREFILL_PREFIX}tiny", f"{DECODE_PREFIX}tiny"])
def test_an_application_that_loses_deployments_meanwhile_is_being_deployed_or_deleted(two, monkeypatch, gone):
    def get_deployment_handle(deployment, application):
        if deployment == gone:
            raise KeyError(f"Deployment(name={deployment!r}, app={application!r}) does not exist.")
        return Handle(deployment, application)

    monkeypatch.setattr(running, "serve", SimpleNamespace(get_deployment_handle=get_deployment_handle))
    with pytest.raises(NotRunningError, match="application old is being deployed or deleted here; try again"):
        running._deployment({"old": two["old"]})


def test_where_nothing_of_ours_runs_no_application_is_missed(two):
    assert running._deployment({"dashboard": two["dashboard"]}, None, "new") is None


@pytest.mark.parametrize("application", [None, "next"])
def test_an_application_that_is_being_built_is_not_one_that_nobody_has_deployed(two, application):
    building = SimpleNamespace(status=ApplicationStatus.DEPLOYING, deployments=[])
    here = {"dashboard": two["dashboard"], "next": building}
    with pytest.raises(NotRunningError, match="being deployed here: next; try again"):
        running._deployment(here, None, application)
    with pytest.raises(NotRunningError, match="being deployed here: next; try again"):
        running._deployment(here | two, None, "next")
    assert running._deployment(here | {"old": two["old"]}).prefill.application == "old"
    failed = SimpleNamespace(status=ApplicationStatus.DEPLOY_FAILED, deployments=[])
    assert running._deployment(here | {"next": failed}, None, application) is None


@pytest.fixture
def clusters(monkeypatch):
    """What runs on which cluster of this machine, or why that cannot be joined; `auto` is `here:1`."""
    at, asked, joined = {}, [], None

    def applications(address):
        nonlocal joined
        asked.append(address)
        found = at["here:1" if address == "auto" else address]
        if isinstance(found, NotRunningError):
            raise found
        joined = address
        return found

    def shutdown():
        nonlocal joined
        joined = None

    def get_runtime_context():
        assert joined is not None
        return SimpleNamespace(gcs_address="here:1" if joined == "auto" else joined)

    fake = SimpleNamespace(
        shutdown=shutdown, is_initialized=lambda: joined is not None, get_runtime_context=get_runtime_context
    )
    monkeypatch.setattr(running, "ray", fake)
    monkeypatch.setattr(running, "_applications", applications)
    monkeypatch.setattr(running, "find_gcs_addresses", lambda: frozenset(at))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return SimpleNamespace(at=at, asked=asked)


@pytest.mark.parametrize(("with_two", "asked"), [("here:1", ["auto"]), ("there:1", ["auto", "there:1"])])
def test_where_several_fit_on_one_cluster_no_other_is_asked(two, clusters, with_two, asked):
    one = {"old": two["old"]}
    clusters.at.update({"here:1": {}, "there:1": one, "zone:1": one} | {with_two: two})
    with pytest.raises(NotRunningError, match="several"):
        running.connect("tiny")
    assert clusters.asked == asked


NOT_OURS = NotRunningError("the Ray cluster here cannot be used: its token is another one")


def test_a_cluster_that_cannot_be_joined_hides_none_that_can(two, clusters):
    clusters.at.update({"here:1": NOT_OURS, "there:1": {"dashboard": two["dashboard"]}, "zone:1": two})
    found = running.connect("large")
    assert (found.address, found.prefill.application) == ("zone:1", "new")


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (["closed"], "its token is another one"),
        (["closed", "empty"], "its token is another one"),
        (["empty", "closed"], "its token is another one"),
        (["closed", "two"], "serves no model 'huge' here; give one of"),
        (["two", "closed"], "serves no model 'huge' here; give one of"),
        (["empty", "empty"], "runs no slackserve application"),
    ],
    ids=str,
)
def test_what_could_not_be_joined_is_told_where_nothing_of_ours_was_found(two, clusters, at, message):
    found = {"closed": NOT_OURS, "empty": {}, "two": two}
    clusters.at.update(zip(("here:1", "there:1"), (found[each] for each in at), strict=False))
    with pytest.raises(NotRunningError, match=message):
        running.connect("huge")


def test_the_only_cluster_is_asked_once(clusters):
    clusters.at["here:1"] = NOT_OURS
    with pytest.raises(NotRunningError):
        running.connect()
    assert clusters.asked == ["auto"]


def test_of_the_cluster_that_is_named_the_refusal_is_told_and_no_other_is_asked(two, clusters, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "here:1")
    clusters.at.update({"here:1": NOT_OURS, "there:1": two})
    with pytest.raises(NotRunningError, match="its token is another one"):
        running.connect("large")
    assert clusters.asked == ["auto"]


def test_whoever_asks_sees_no_line_for_each_handle_that_has_started(clusters, monkeypatch, caplog):
    def applications(_):
        logging.getLogger("ray.serve").info("Started <a router>.")
        return {}

    monkeypatch.setattr(running, "_applications", applications)
    caplog.set_level(logging.INFO, "ray.serve")
    with pytest.raises(running.NotRunningError):
        running.connect()
    assert caplog.messages == []
