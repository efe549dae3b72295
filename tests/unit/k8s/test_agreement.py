"""What the manifests say twice, they say alike: in pods, in the configuration of Serve, and in the lock."""

import re
from unittest.mock import patch

import pytest
import yaml
from manifests import (
    K8S,
    ROOT,
    compose,
    container_of,
    groups,
    in_prefill,
    in_serve_config,
    labelled,
    overlay,
    pod_templates,
    ray_service,
    ray_templates,
    serve_config,
)
from ray._private import utils
from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
from ray.serve._private.constants import PROXY_MIN_DRAINING_PERIOD_S
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from deployments.cli import app as cli
from deployments.config.settings import SlackServeConfig, parse
from deployments.grpc import SERVICERS
from deployments.http.proxy import IMPORT_PATH
from deployments.local import leaving

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
ANSWER_TOKENS = 4096
"""An answer that is not unusually long."""
_DRAINED_S = PROXY_MIN_DRAINING_PERIOD_S / 2
"""Within this the service shall have left a proxy that drains; kube-proxy and clients need some time, too."""
LOCK = (ROOT / "requirements" / "cpu.lock").read_text()


def application(objects):
    """The application as Serve reads it, and its arguments as SlackServe does."""
    schema = ServeDeploySchema.model_validate(serve_config(objects))
    (app,) = schema.applications
    assert app.import_path == "deployments.app:build"
    return schema, parse(app.args)


def of_kind(objects, kind):
    return [each for each in objects if each["kind"] == kind]


def disagreements(objects):
    """What does not fit together in an overlay."""
    serve, config = application(objects)
    return [
        *_capacity("prefill", groups(objects)["prefill"], config.prefill, config.accelerator),
        *_capacity("decode", groups(objects)["decode"], config.decode, config.accelerator),
        *_object_stores(objects),
        *_ingress(groups(objects)["ingress"], config),
        *_budgets(objects),
        *_ports(objects, serve, config),
        *_policies(objects),
        *_monitors(objects, config),
        *_times(objects, config),
        *_versions(objects),
    ]


def _capacity(tier, group, pool, accelerator):
    if pool.node_labels != group["labels"]:
        yield f"{tier}: the labels of its nodes are {group['labels']}"
    limits = container_of(group["template"])["resources"]["limits"]
    workers, gpus = pool.replicas * pool.tensor_parallel_size, int(limits.get("nvidia.com/gpu", 0))
    if accelerator == "cuda":
        if gpus * group["replicas"] < workers * pool.gpus_per_worker:
            yield f"{tier}: {gpus * group['replicas']} GPUs for {workers} workers"
        if gpus < pool.tensor_parallel_size * pool.gpus_per_worker:
            yield f"{tier}: a replica does not fit into one pod"
    needed = pool.replicas + (workers if accelerator == "cpu" else 0)
    if int(limits["cpu"]) * group["replicas"] < needed:
        yield f"{tier}: less than {needed} CPUs"
    if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
        yield f"{tier}: replicas are not between their limits"


def _object_stores(objects):
    """Ray's store of objects lies in /dev/shm only if it fits there, as Ray itself reckons."""
    spec = ray_service(objects)["spec"]["rayClusterConfig"]
    for name, group in {"head": spec["headGroupSpec"], **groups(objects)}.items():
        container = container_of(group["template"])
        (mount,) = [each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
        (volume,) = [each for each in group["template"]["spec"]["volumes"] if each["name"] == mount]
        shm = _bytes(volume["emptyDir"]["sizeLimit"])
        given = group["rayStartParams"].get("object-store-memory")
        with patch.object(utils, "get_shared_memory_bytes", return_value=shm):
            store = utils.resolve_object_store_memory(
                _bytes(container["resources"]["limits"]["memory"]), given and int(given)
            )
        if store > shm:
            yield f"{name}: Ray's object store of {store} bytes does not fit into /dev/shm, {shm}"


def _bytes(quantity):
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi")) * 2**30


def _ingress(group, config: SlackServeConfig):
    if config.node_labels != group["labels"]:
        yield f"ingress: the labels of its nodes are {group['labels']}"
    if config.ingress_replicas != group["replicas"]:
        yield f"ingress: {config.ingress_replicas} replicas, a pod each, for {group['replicas']} pods"


def _budgets(objects):
    for budget in of_kind(objects, "PodDisruptionBudget"):
        tier = budget["spec"]["selector"]["matchLabels"]["slackserve.io/tier"]
        replicas = 1 if tier == "head" else groups(objects)[tier]["replicas"]
        if budget["spec"]["minAvailable"] > replicas:
            yield f"{tier}: the budget wants more pods than there are"


def _ports_of(objects):
    return {
        tier: {each["name"]: each["containerPort"] for each in container_of(template)["ports"]}
        for tier, template in ray_templates(objects).items()
    }


def _ports(objects, serve, config: SlackServeConfig):
    expected = {
        ("head", "slo-monitor"): config.monitor.port,
        ("prefill", "nixl"): config.kv_transfer.prefill_port,
        ("decode", "nixl"): config.kv_transfer.decode_port,
    }
    ports = _ports_of(objects)
    expected |= {(tier, "serve"): serve.http_options.port for tier in ports}
    if "grpc" in ports["ingress"]:
        expected["ingress", "grpc"] = serve.grpc_options.port
    for (tier, name), port in expected.items():
        if ports[tier].get(name) != port:
            yield f"{tier}: port {name} is {ports[tier].get(name)} and should be {port}"
    scheme = "HTTPS" if serve.http_options.ssl_certfile else "HTTP"
    for tier, group in groups(objects).items():
        probe = container_of(group["template"])["readinessProbe"]["httpGet"]
        if probe["port"] != serve.http_options.port:
            yield f"{tier}: the probe asks another port"
        if probe.get("scheme", "HTTP") != scheme:
            yield f"{tier}: the probe does not ask over {scheme}"


def _policies(objects):
    known = {port for each in _ports_of(objects).values() for port in each.values()}
    for policy in of_kind(objects, "NetworkPolicy"):
        if policy["metadata"]["name"] != "slackserve-redis":
            rules = policy["spec"].get("ingress", [])
            if strange := {port["port"] for rule in rules for port in rule.get("ports", [])} - known:
                yield f"{policy['metadata']['name']}: no pod listens on {strange}"


def _monitors(objects, config: SlackServeConfig):
    ports = _ports_of(objects)
    for each in of_kind(objects, "PodMonitor"):
        selector = each["spec"]["selector"]
        tier = selector["matchLabels"].get("slackserve.io/tier")
        chosen = [tier] if tier else selector["matchExpressions"][0]["values"]
        for name in (endpoint["port"] for endpoint in each["spec"]["podMetricsEndpoints"]):
            if any(name not in ports[tier] for tier in chosen):
                yield f"{each['metadata']['name']}: there is no port {name}"
            if name == "slo-monitor" and config.monitor.host != "0.0.0.0":
                yield "the SLO monitor exports its metrics to its own host only"


def _times(objects, config: SlackServeConfig):
    longest = max(config.prefill.drain_s, config.decode.drain_s) + config.kv_transfer.lease_s
    graces = [each["spec"]["terminationGracePeriodSeconds"] for each in ray_templates(objects).values()]
    if min(graces) <= longest:
        yield f"a pod ends after {min(graces)} s, and what it holds may take {longest} s"
    for tier, group in groups(objects).items():
        command = container_of(group["template"])["lifecycle"]["preStop"]["exec"]["command"]
        with patch.object(leaving, "leave", return_value=[]) as leave:
            CliRunner().invoke(cli, command[1:])
        if command[0] != "slackserve" or not leave.called:
            yield f"{tier}: {' '.join(command)} fails, and nothing is waited for"
            continue
        within, _ = leave.call_args.args
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        probe = container_of(group["template"])["readinessProbe"]
        if probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"] > _DRAINED_S:
            yield f"{tier}: clients are sent to a proxy that has ended"
        if not longest <= within < grace - RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:
            yield f"a pod of {tier} takes {within:g} s to leave, of {grace}, with what may take {longest} s"
    stays_s = ray_service(objects)["spec"]["rayClusterDeletionDelaySeconds"]
    if stays_s <= max(graces):
        yield "the old cluster is deleted before its pods may end"
    if config.decode.replicas > 1:  # an only one answers nobody anew while it ends
        paces_ms = [tier.tpot_ms for tier in config.tiers.root.values() if tier.tpot_ms is not None]
        answer_s = ANSWER_TOKENS * max(paces_ms) / 1e3
        if min(config.decode.drain_s, stays_s) < answer_s:
            yield f"an upgrade cuts answers of {ANSWER_TOKENS} tokens, which take {answer_s:g} s"


def _versions(objects):
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)$", LOCK, re.MULTILINE))
    if ray_service(objects)["spec"]["rayClusterConfig"]["rayVersion"] != locked["ray"]:
        yield f"rayVersion is not the lock's {locked['ray']}"
    images = re.findall(r"rayproject/[\w-]+:([\d.]+)-", (K8S / "image" / "Dockerfile").read_text())
    if len(images) != 2 or set(images) != {locked["ray"]}:
        yield f"the images are of Ray {images}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_everything_agrees(name):
    objects = overlay(name)
    assert not disagreements(objects)
    grpc_options = application(objects)[0].grpc_options
    assert tuple(grpc_options.grpc_servicer_functions) == SERVICERS
    assert not grpc_options.enable_reflection
    spec = ray_service(objects)["spec"]
    assert spec["excludeHeadPodFromServeSvc"]
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    for template in pod_templates(objects).values():
        for mount in container_of(template)["volumeMounts"]:
            if mount["mountPath"] == "/dev/shm":
                (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == mount["name"]]
                assert volume["emptyDir"]["medium"] == "Memory"
    for group in groups(objects).values():
        probe = container_of(group["template"])["readinessProbe"]
        assert (probe["httpGet"]["path"], probe["periodSeconds"]) == ("/ready?degraded", 1)
        (spread,) = group["template"]["spec"]["topologySpreadConstraints"]
        labels = group["template"]["metadata"]["labels"]
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", OVERLAYS)
def test_with_grpc_everything_agrees_too(name, tmp_path):
    objects = compose(tmp_path, name, ["grpc"])
    assert not disagreements(objects)
    (service,) = [each for each in objects if each["metadata"]["name"] == "slackserve-grpc"]
    (port,) = service["spec"]["ports"]
    pods = [
        tier
        for tier, template in ray_templates(objects).items()
        if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ]
    assert pods == ["ingress"]
    assert (port["port"], port["targetPort"]) == (9000, "grpc")
    changed = in_serve_config("port: 9000", "port: 9001")
    changed(objects)
    assert any("port grpc" in each for each in disagreements(objects))


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_the_environment_that_serve_is_started_with_elsewhere(name):
    from deployments.cli import SERVE_ENVIRONMENT

    for template in ray_templates(overlay(name)).values():
        environment = {each["name"]: each.get("value") for each in container_of(template)["env"]}
        assert SERVE_ENVIRONMENT.items() <= environment.items()
        assert environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == IMPORT_PATH


def test_the_pod_that_cleans_up_redis_is_no_head():
    objects = overlay("production")
    head = pod_templates(objects)["head"]
    cleanup = labelled(head, "redis-cleanup")["metadata"]["labels"]
    chosen = {
        (each["kind"], each["metadata"]["name"]): each["spec"]["selector"]["matchLabels"].items()
        for each in [*of_kind(objects, "PodDisruptionBudget"), *of_kind(objects, "PodMonitor")]
        if each["metadata"]["name"] == "slackserve-head"
    }
    assert len(chosen) == 2
    for labels in chosen.values():
        assert labels <= head["metadata"]["labels"].items()
        assert not labels <= cleanup.items()


MISTAKES = {
    "the labels of its nodes": in_serve_config("slackserve.io/tier: prefill", "slackserve.io/tier: prefil"),
    "GPUs for": in_prefill(lambda group, container: group.update(replicas=1)),
    "does not fit into one pod": in_prefill(
        lambda group, container: container["resources"]["limits"].update({"nvidia.com/gpu": "2"})
    ),
    "less than 2 CPUs": in_prefill(lambda group, container: container["resources"]["limits"].update(cpu="0")),
    "not between their limits": in_prefill(lambda group, container: group.update(maxReplicas=1)),
    "does not fit into /dev/shm": lambda objects: groups(objects)["ingress"].update(rayStartParams={}),
    "for 2 pods": in_serve_config("ingress_replicas: 2", "ingress_replicas: 1"),
    "port serve": in_serve_config("port: 8000", "port: 8001"),
    "does not ask over HTTPS": in_serve_config(
        "port: 8000,", "port: 8000, ssl_certfile: /tls/crt, ssl_keyfile: /tls/key,"
    ),
    "port slo-monitor": in_serve_config("port: 9465", "port: 9466"),
    "port nixl": in_serve_config("log_json: true", "kv_transfer: {prefill_port: 21000}"),
    "no pod listens on": lambda objects: next(
        each for each in objects if each["metadata"]["name"] == "slackserve-clients"
    )["spec"]["ingress"][0].update(ports=[{"port": 8001}]),
    "there is no port": lambda objects: next(
        each for each in objects if each["metadata"]["name"] == "slackserve-workers"
    )["spec"]["podMetricsEndpoints"][0].update(port="metric"),
    "to its own host only": in_serve_config("host: 0.0.0.0, port: 9465", "port: 9465"),
    "what it holds may take": in_serve_config("log_json: true", "kv_transfer: {lease_s: 121}"),
    "s to leave": in_prefill(
        lambda group, container: container["lifecycle"]["preStop"]["exec"].update(
            command=["slackserve", "leave", "--within", "700"]
        )
    ),
    "fails, and nothing is waited for": in_prefill(
        lambda group, container: container["lifecycle"]["preStop"]["exec"].update(
            command=["slackserve", "leave", "--within", "90000"]
        )
    ),
    "to a proxy that has ended": in_prefill(
        lambda group, container: container["readinessProbe"].update(periodSeconds=5)
    ),
    "an upgrade cuts answers": in_serve_config("drain_s: 600", "drain_s: 300"),
    "before its pods may end": lambda objects: ray_service(objects)["spec"].update(
        rayClusterDeletionDelaySeconds=60
    ),
    "rayVersion": lambda objects: ray_service(objects)["spec"]["rayClusterConfig"].update(
        rayVersion="2.59.0"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_seeded_disagreement_is_found(mistake):
    objects = overlay("production")
    MISTAKES[mistake](objects)
    assert any(mistake in each for each in disagreements(objects))


def test_monitoring_brings_every_rule_and_dashboard():
    objects = overlay("production")
    (rules,) = of_kind(objects, "PrometheusRule")
    files = sorted((ROOT / "observability" / "rules").iterdir(), reverse=True)  # recordings first
    groups_of_files = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert rules["spec"]["groups"] == groups_of_files
    (dashboards,) = of_kind(objects, "ConfigMap")
    names = {path.name for path in (ROOT / "observability" / "dashboards").iterdir()}
    assert dashboards["data"].keys() == names
