"""What KubeRay 1.7 refuses beyond its CRD's schema: the rules of its `validation.go` that can concern us."""

import re

LONGEST_NAME = 47
TOKENS_SINCE = (2, 52, 0)


def refusals(service):
    """Each rule of the operator that a RayService breaks."""
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    return [
        *_name(service["metadata"]),
        *_head(cluster),
        *(problem for group in cluster.get("workerGroupSpecs", []) for problem in _group(group, cluster)),
        *_fault_tolerance(cluster, service["metadata"].get("annotations", {})),
        *_autoscaling(cluster),
        *_authentication(cluster),
        *_upgrade(spec, cluster),
    ]


def _name(metadata):
    if len(metadata["name"]) > LONGEST_NAME:
        yield f"the name has more than {LONGEST_NAME} characters"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", metadata["name"]):
        yield "the name is no DNS label"


def _head(cluster):
    head = cluster["headGroupSpec"]
    if not head["template"]["spec"].get("containers"):
        yield "the head has no container"
    if head.get("headService", {}).get("metadata", {}).get("name"):
        yield "headService has a name"
    yield from _resources_and_labels("head", head)


def _group(group, cluster):
    name, least, most = group["groupName"], group.get("minReplicas"), group.get("maxReplicas")
    if not group["template"]["spec"].get("containers"):
        yield f"{name} has no container"
    if not cluster.get("enableInTreeAutoscaling") and (least is None or most is None):
        yield f"{name} needs minReplicas and maxReplicas"
    if least is not None and most is not None and least > most:
        yield f"{name} has minReplicas above maxReplicas"
    if min(least or 0, most or 0) < 0:
        yield f"{name} has negative replicas"
    if group.get("idleTimeoutSeconds") is not None and not _autoscaler_v2(cluster):
        yield f"{name} has idleTimeoutSeconds without autoscaler v2"
    if group.get("priority") and not _autoscaler_v2(cluster):
        yield f"{name} has a priority without autoscaler v2"
    if group.get("suspend"):
        yield f"{name} is suspended"
    yield from _resources_and_labels(name, group)


def _resources_and_labels(name, group):
    params = group.get("rayStartParams", {})
    if group.get("resources") and params.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield f"{name} has resources in two places"
    if "labels" in params:
        yield f"{name} has labels in rayStartParams"
    for key, value in group.get("labels", {}).items():
        if not re.fullmatch(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", key):
            yield f"{name} has the label {key!r}, which is none"
        if not re.fullmatch(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", value):
            yield f"{name} has the label value {value!r}, which is none"


def _fault_tolerance(cluster, annotations):
    options = cluster.get("gcsFaultToleranceOptions")
    head = cluster["headGroupSpec"]
    environment = {each["name"] for each in head["template"]["spec"]["containers"][0].get("env", [])}
    params = head.get("rayStartParams", {})
    if options is None and "RAY_REDIS_ADDRESS" in environment:
        yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
    if options is not None:
        if annotations.get("ray.io/ft-enabled"):
            yield "the annotation ft-enabled beside gcsFaultToleranceOptions"
        if environment & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} or params.get("redis-password"):
            yield "Redis in the head's environment beside gcsFaultToleranceOptions"
        if options.get("backend", "redis") == "redis" and "storage" in options:
            yield "storage with the Redis backend"
    if params.get("redis-username") or "REDIS_USERNAME" in environment:
        yield "a Redis user outside gcsFaultToleranceOptions"


def _autoscaling(cluster):
    options = cluster.get("autoscalerOptions", {})
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds is negative"
    if any(each["name"] == "KUBERAY_GEN_AUTOSCALER_START_CMD" for each in options.get("env", [])):
        yield "autoscalerOptions.env has what the operator sets"
    if cluster.get("enableInTreeAutoscaling") and _autoscaler_v2(cluster):
        templates = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
        if any(each["template"]["spec"].get("restartPolicy", "Never") != "Never" for each in templates):
            yield "autoscaler v2 restarts no pod"


def _autoscaler_v2(cluster):
    return cluster.get("autoscalerOptions", {}).get("version") == "v2"


def _authentication(cluster):
    options = cluster.get("authOptions", {})
    if options.get("enableK8sTokenAuth"):
        yield "a RayService does not take Kubernetes' tokens"
    if options.get("mode") == "token":
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", cluster.get("rayVersion", ""))
        if version is None:
            yield "token authentication without rayVersion"
        elif tuple(map(int, version.groups())) < TOKENS_SINCE:
            yield "token authentication before Ray 2.52"


def _upgrade(spec, cluster):
    if cluster.get("upgradeStrategy", {}).get("type"):
        yield "upgradeStrategy is the service's, not the cluster's"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is negative"
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in ("None", "NewCluster", "NewClusterWithIncrementalUpgrade"):
        yield f"there is no upgrade strategy {kind}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    if not cluster.get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs the autoscaler"
    if (options := strategy.get("clusterUpgradeOptions")) is None:
        yield "an incremental upgrade needs clusterUpgradeOptions"
        return
    step, surge = options.get("stepSizePercent", -1), options.get("maxSurgePercent", 100)
    if not 0 <= step <= surge <= 100:
        yield "stepSizePercent and maxSurgePercent do not go together"
    if options.get("intervalSeconds", 0) <= 0:
        yield "intervalSeconds is not positive"
    if not options.get("gatewayClassName"):
        yield "an incremental upgrade needs a gatewayClassName"
