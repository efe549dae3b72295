"""Who reaches whom under the network-policy component: its policies are evaluated, pair by pair."""

import ipaddress

import pytest
from manifests import compose, labelled, overlay, pod_templates, ray_service

OURS = "slackserve"
NAMESPACES = {
    OURS: {},
    "kuberay-operator": {},
    "monitoring": {},
    "kube-system": {},
    "shop": {"slackserve.io/clients": "true"},
    "stranger": {},
}
OTHERS = {
    "operator": ("kuberay-operator", {"app.kubernetes.io/name": "kuberay-operator"}),
    "neighbour-of-the-operator": ("kuberay-operator", {"app.kubernetes.io/name": "other"}),
    "prometheus": ("monitoring", {"app.kubernetes.io/name": "prometheus"}),
    "collector": ("monitoring", {"app.kubernetes.io/name": "opentelemetry-collector"}),
    "dns": ("kube-system", {"k8s-app": "kube-dns"}),
    "web": ("shop", {"app": "web"}),
    "stranger": ("stranger", {"app.kubernetes.io/part-of": "slackserve"}),
    "lodger": (OURS, {"app": "lodger"}),
}
ADDRESSES = {
    "hub": "18.164.174.23",
    "metadata": "169.254.169.254",
    "private": "10.20.0.9",
    "dns-of-the-node": "169.254.20.10",
    "external-redis": "192.0.2.10",
}


@pytest.fixture(scope="module")
def policies():
    return [each for each in overlay("production") if each["kind"] == "NetworkPolicy"]


@pytest.fixture(scope="module")
def pods():
    ours = {
        name.removeprefix("slackserve-"): (OURS, template["metadata"]["labels"])
        for name, template in pod_templates(overlay("production")).items()
    }
    cleanup = labelled(pod_templates(overlay("production"))["head"], "redis-cleanup")
    return ours | OTHERS | {"cleanup": (OURS, cleanup["metadata"]["labels"])}


def matches(selector, labels):
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def is_peer(peer, end):
    """Whether one entry of `from` or `to` means `end`: an address, or a namespace and labels."""
    if "ipBlock" in peer:
        if isinstance(end, tuple):
            return False  # rules by address say nothing certain about pods
        address, block = ipaddress.ip_address(end), peer["ipBlock"]
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(part) for part in block.get("except", [])
        )
    if not isinstance(end, tuple):
        return False
    namespace, labels = end
    if "namespaceSelector" in peer:
        own = {"kubernetes.io/metadata.name": namespace} | NAMESPACES[namespace]
        if not matches(peer["namespaceSelector"], own):
            return False
    elif namespace != OURS:
        return False
    return matches(peer.get("podSelector", {}), labels)


def passes(policies, direction, pod, other, port, protocol):
    """Whether the policies of `pod` let the connection pass in their direction."""
    if not isinstance(pod, tuple) or pod[0] != OURS:
        return True
    key = "from" if direction == "Ingress" else "to"
    own = [
        each["spec"]
        for each in policies
        if direction in each["spec"]["policyTypes"] and matches(each["spec"]["podSelector"], pod[1])
    ]
    if not own:
        return True
    return any(
        (key not in rule or any(is_peer(peer, other) for peer in rule[key]))
        and ("ports" not in rule or any(_is_port(each, port, protocol) for each in rule["ports"]))
        for spec in own
        for rule in spec.get(direction.lower(), [])
    )


def _is_port(given, port, protocol):
    last = given.get("endPort", given["port"])
    return given.get("protocol", "TCP") == protocol and given["port"] <= port <= last


def reaches(policies, pods, source, target, port, protocol="TCP"):
    ends = {**pods, **ADDRESSES}
    return passes(policies, "Egress", ends[source], ends[target], port, protocol) and passes(
        policies, "Ingress", ends[target], ends[source], port, protocol
    )


ALLOWED = [
    ("prefill", "decode", 22000),
    ("decode", "prefill", 20003),
    ("decode", "prefill", 41873),  # a port that UCX took
    ("ingress", "head", 6379),
    ("head", "prefill", 10042),
    ("operator", "head", 8265),
    ("operator", "decode", 8000),
    ("prometheus", "head", 9465),
    ("prometheus", "prefill", 8080),
    ("web", "ingress", 8000),
    ("prefill", "hub", 443),
    ("head", "redis", 6379),
    ("cleanup", "redis", 6379),  # else the cluster is never deleted
    ("head", "private", 443),  # the Kubernetes API
]
DENIED = [
    ("web", "head", 8265),
    ("web", "head", 8000),
    ("web", "prefill", 20000),
    ("web", "ingress", 8080),
    ("stranger", "ingress", 8000),
    ("stranger", "head", 6379),
    ("lodger", "head", 6379),
    ("neighbour-of-the-operator", "head", 8265),
    ("prometheus", "head", 8265),
    ("prefill", "metadata", 80),
    ("decode", "private", 443),
    ("web", "redis", 6379),
    ("prefill", "redis", 6379),
    ("redis", "hub", 443),
    ("cleanup", "private", 443),
]


@pytest.mark.parametrize(("source", "target", "port"), ALLOWED)
def test_allowed(policies, pods, source, target, port):
    assert reaches(policies, pods, source, target, port)


@pytest.mark.parametrize(("source", "target", "port"), DENIED)
def test_denied(policies, pods, source, target, port):
    assert not reaches(policies, pods, source, target, port)


def test_grpc_with_its_component_only(policies, pods, tmp_path):
    assert not reaches(policies, pods, "web", "ingress", 9000)
    opened = [each for each in compose(tmp_path, "production", ["grpc"]) if each["kind"] == "NetworkPolicy"]
    assert reaches(opened, pods, "web", "ingress", 9000)
    assert not reaches(opened, pods, "stranger", "ingress", 9000)


def test_spans_leave_with_their_component_only(policies, pods, tmp_path):
    assert not reaches(policies, pods, "decode", "collector", 4317)
    opened = [
        each for each in compose(tmp_path, "production", ["tracing"]) if each["kind"] == "NetworkPolicy"
    ]
    assert reaches(opened, pods, "decode", "collector", 4317)
    assert not reaches(opened, pods, "decode", "collector", 443)


@pytest.mark.parametrize("base", ["production", "h100"])
def test_an_external_redis_is_reached_with_its_component_only(base, policies, pods, tmp_path):
    assert not reaches(policies, pods, "head", "external-redis", 6379)
    components = {"production": ["external-redis"], "h100": ["network-policy", "external-redis"]}[base]
    objects = compose(tmp_path, base, components)
    opened = [each for each in objects if each["kind"] == "NetworkPolicy"]
    for source in ("head", "cleanup"):
        assert reaches(opened, pods, source, "external-redis", 6379)
        assert reaches(opened, pods, source, "redis", 6379)  # of a cluster from before
    for source in ("ingress", "prefill", "decode"):
        assert not reaches(opened, pods, source, "external-redis", 6379)
    assert not reaches(opened, pods, "head", "external-redis", 22)
    assert not [each for each in objects if each["kind"] in ("StatefulSet", "Service")]
    fault_tolerance = ray_service(objects)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    given = ray_service(overlay("production"))["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert fault_tolerance == given | {"redisAddress": "192.0.2.10:6379"}


@pytest.mark.parametrize("resolver", ["dns", "dns-of-the-node"])
@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
def test_names_are_looked_up(policies, pods, resolver, protocol):
    assert reaches(policies, pods, "prefill", resolver, 53, protocol)
    assert not reaches(policies, pods, "redis", resolver, 53, protocol)


def test_of_link_local_addresses_only_names_are_asked(policies, pods):
    assert not reaches(policies, pods, "prefill", "metadata", 53, "UDP")
    assert not reaches(policies, pods, "prefill", "dns-of-the-node", 443)


def test_without_policies_everybody_reaches_everybody(pods):
    assert all(reaches([], pods, source, target, port) for source, target, port in DENIED)
