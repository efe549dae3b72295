"""Every overlay, with every allowed combination of components, is what the API server and KubeRay take."""

import copy
import itertools

import pytest
import yaml
from kuberay_rules import refusals
from manifests import K8S, built, compose, overlay, pod_templates, problems, ray_service

OVERLAYS = {"cpu-kind": (), "h100": (), "production": ("monitoring", "network-policy", "gcs-ft")}
COMPONENTS = sorted(
    (path.name for path in (K8S / "components").iterdir()),
    key=lambda name: (name in {"external-redis", "grpc", "tracing"}, name),  # after what they change
)
STARTS_WITHIN_S = 1800
"""What a cluster is given from nothing to its last replica: nodes, image and model."""
EXCLUSIVE = {"grpc", "incremental-upgrade"}
"""An incremental upgrade routes HTTP only."""


def combinations(base, *, in_pairs):
    """Components that may be added to an overlay: all subsets, or of those the pairs and the largest.

    A Redis of one's own is tried where it replaces another one.
    """
    free = [name for name in COMPONENTS if name not in OVERLAYS[base]]
    for count in range(len(free) + 1):
        if in_pairs and 2 < count < len(free) - 1:
            continue
        for chosen in itertools.combinations(free, count):
            without_other = "external-redis" in chosen and "gcs-ft" not in (*chosen, *OVERLAYS[base])
            if not set(chosen) >= EXCLUSIVE and not without_other:
                yield chosen


def test_the_tables_above_are_those_of_the_directory():
    assert {path.name for path in (K8S / "overlays").iterdir()} == OVERLAYS.keys()
    for name, components in OVERLAYS.items():
        kustomization = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
        named = {path.rpartition("/")[2] for path in kustomization.get("components", [])}
        assert named == set(components)


def test_the_base_builds():
    assert {each["kind"] for each in built(K8S / "base")} == {
        "PodDisruptionBudget",
        "RayService",
        "ServiceAccount",
    }


@pytest.mark.parametrize("in_pairs", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("base", OVERLAYS)
def test_every_combination_of_components_is_valid(base, in_pairs, tmp_path):
    builds = {}
    for number, components in enumerate(combinations(base, in_pairs=in_pairs)):
        directory = tmp_path / str(number)
        directory.mkdir()
        objects = builds[components] = compose(directory, base, components)
        names = [(each["kind"], each["metadata"]["name"]) for each in objects]
        assert len(names) == len(set(names))
        assert not refusals(ray_service(objects)), components
        assert not [each for each in objects if each["kind"] == "Secret"], components
    for components, objects in builds.items():
        assert not problems(objects), components


def put(path, value):
    """A change of an object: `path` of keys and indices, the last of them set."""

    def change(each):
        *way, last = path
        for key in way:
            each = each[key]
        each[last] = value

    return change


def drop(*path):
    def change(each):
        *way, last = path
        for key in way:
            each = each[key]
        del each[last]

    return change


CLUSTER = ("spec", "rayClusterConfig")
PREFILL = (*CLUSTER, "workerGroupSpecs", 1)
CONTAINER = (*PREFILL, "template", "spec", "containers", 0)
HEAD = (*CLUSTER, "headGroupSpec")
UPGRADE = ("spec", "upgradeStrategy", "type")
SCHEMA_MISTAKES = {
    "a field that there is not": ("RayService", put((*CONTAINER, "imagePulPolicy"), "Always")),
    "a count in quotes": ("RayService", put((*PREFILL, "replicas"), "2")),
    "a group without a name": ("RayService", drop(*PREFILL, "groupName")),
    "a mode that there is not": ("RayService", put((*CLUSTER, "authOptions", "mode"), "tokens")),
    "an operator that there is not": ("RayService", put(("spec", "managedBy"), "me")),
    "an API version that there is not": ("RayService", put(("apiVersion",), "ray.io/v2")),
    "a volume of no kind": ("RayService", put((*PREFILL, "template", "spec", "volumes", 0, "memory"), {})),
    "a port that is no number": ("RayService", put((*CONTAINER, "ports", 0, "containerPort"), "8000")),
    "a policy with a stray key": ("NetworkPolicy", put(("spec", "ingres"), [])),
    "a budget in words": ("PodDisruptionBudget", put(("spec", "minAvailable"), [1])),
    "a monitor with a stray key": ("PodMonitor", put(("spec", "podMetricsEndpoints", 0, "ports"), "x")),
    "a monitor without a selector": ("PodMonitor", drop("spec", "selector")),
}


@pytest.mark.parametrize("mistake", SCHEMA_MISTAKES)
def test_a_seeded_mistake_is_found_by_the_schemas(mistake):
    kind, change = SCHEMA_MISTAKES[mistake]
    objects = overlay("production")
    change(next(each for each in objects if each["kind"] == kind))
    assert problems(objects)


OPERATOR_MISTAKES = {
    "more than 47 characters": put(("metadata", "name"), "s" * 48),
    "no DNS label": put(("metadata", "name"), "8slack"),
    "headService has a name": put((*HEAD, "headService"), {"metadata": {"name": "mine"}}),
    "needs minReplicas and maxReplicas": drop(*PREFILL, "maxReplicas"),
    "minReplicas above maxReplicas": put((*PREFILL, "minReplicas"), 9),
    "negative replicas": put((*PREFILL, "minReplicas"), -1),
    "idleTimeoutSeconds without autoscaler v2": put((*PREFILL, "idleTimeoutSeconds"), 60),
    "a priority without autoscaler v2": put((*PREFILL, "priority"), 2),
    "is suspended": put((*PREFILL, "suspend"), True),
    "resources in two places": put((*HEAD, "resources"), {"CPU": "1"}),
    "labels in rayStartParams": put((*PREFILL, "rayStartParams", "labels"), "a=b"),
    "which is none": put((*PREFILL, "labels"), {"tier": "no blanks"}),
    "Redis in the head's environment": put(
        (*HEAD, "template", "spec", "containers", 0, "env"), [{"name": "REDIS_PASSWORD", "value": "x"}]
    ),
    "storage with the Redis backend": put((*CLUSTER, "gcsFaultToleranceOptions", "storage"), {}),
    "a Redis user outside": put((*HEAD, "rayStartParams", "redis-username"), "x"),
    "does not take Kubernetes' tokens": put((*CLUSTER, "authOptions", "enableK8sTokenAuth"), True),
    "token authentication without rayVersion": drop(*CLUSTER, "rayVersion"),
    "token authentication before Ray 2.52": put((*CLUSTER, "rayVersion"), "2.51.1"),
    "is the service's, not the cluster's": put((*CLUSTER, "upgradeStrategy"), {"type": "Recreate"}),
    "rayClusterDeletionDelaySeconds is negative": put(("spec", "rayClusterDeletionDelaySeconds"), -1),
    "there is no upgrade strategy": put(UPGRADE, "Rolling"),
    "needs the autoscaler": put(UPGRADE, "NewClusterWithIncrementalUpgrade"),
    "needs clusterUpgradeOptions": put(UPGRADE, "NewClusterWithIncrementalUpgrade"),
}


@pytest.mark.parametrize("rule", OPERATOR_MISTAKES)
def test_the_operators_own_rules(rule):
    service = ray_service(overlay("production"))
    assert not refusals(service)
    OPERATOR_MISTAKES[rule](service)
    assert any(rule in refusal for refusal in refusals(service))


def test_redis_by_the_environment_alone():
    service = ray_service(overlay("h100"))
    container = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"})
    assert refusals(service) == ["RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"]


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("stepSizePercent", 101, "do not go together"),
        ("maxSurgePercent", 10, "do not go together"),
        ("intervalSeconds", 0, "intervalSeconds is not positive"),
        ("gatewayClassName", "", "needs a gatewayClassName"),
    ],
)
def test_the_operators_rules_for_incremental_upgrades(option, value, rule, tmp_path):
    service = ray_service(compose(tmp_path, "h100", ["incremental-upgrade"]))
    assert not refusals(service)
    service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"][option] = value
    assert any(rule in refusal for refusal in refusals(service))


def test_an_incremental_upgrade_leads_nobody_to_a_cluster_that_still_starts(tmp_path):
    """KubeRay's first step waits for this alone: an application without replicas runs, in its eyes."""
    service = ray_service(compose(tmp_path, "h100", ["incremental-upgrade"]))
    assert service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]["intervalSeconds"] >= STARTS_WITHIN_S


RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"} | {
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def unrestricted(template):
    """Why Pod Security *restricted* refuses a pod template."""
    spec = template["spec"]
    pod = spec.get("securityContext", {})
    if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
        yield "the host's namespaces"
    for volume in spec.get("volumes", []):
        if set(volume) - {"name"} - RESTRICTED_VOLUMES:
            yield f"volume {volume['name']}"
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        if (pod | own).get("runAsNonRoot") is not True or (pod | own).get("runAsUser") == 0:
            yield "root"
        if (pod | own).get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccomp"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield "privileges"
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield "capabilities"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield "a host port"


@pytest.mark.parametrize("base", OVERLAYS)
def test_every_pod_is_restricted(base, tmp_path):
    left_out = {*OVERLAYS[base], "grpc"}
    objects = compose(tmp_path, base, [name for name in COMPONENTS if name not in left_out])
    for name, template in pod_templates(objects).items():
        assert not list(unrestricted(template)), name
    sidecar = ray_service(objects)["spec"]["rayClusterConfig"]["autoscalerOptions"]["securityContext"]
    pod = copy.deepcopy(pod_templates(objects)["head"])
    pod["spec"]["containers"] = [{"name": "autoscaler", "securityContext": sidecar}]
    assert not list(unrestricted(pod))


def test_rdma_adds_devices_and_no_capability(tmp_path):
    """Kubernetes gives a container that is not root no ambient capability: an added one would be lost."""
    objects = compose(tmp_path, "h100", ["rdma"])
    with_devices = set()
    for name, template in pod_templates(objects).items():
        (container,) = template["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        if "rdma/hca_shared_devices" in container["resources"]["limits"]:
            with_devices.add(name)
    assert with_devices == {"prefill", "decode"}


@pytest.mark.parametrize("change", ["runAsNonRoot", "allowPrivilegeEscalation", "hostPath"])
def test_a_pod_that_is_not_restricted_is_found(change):
    template = pod_templates(overlay("cpu-kind"))["prefill"]
    container = template["spec"]["containers"][0]
    match change:
        case "runAsNonRoot":
            template["spec"]["securityContext"]["runAsNonRoot"] = False
        case "allowPrivilegeEscalation":
            del container["securityContext"]["allowPrivilegeEscalation"]
        case "hostPath":
            template["spec"]["volumes"].append({"name": "x", "hostPath": {"path": "/"}})
    assert list(unrestricted(template))
