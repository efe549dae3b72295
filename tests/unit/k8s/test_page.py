"""What the docs say of the manifests and of KubeRay's status, and what they tell to type, fits these."""

import copy
import re

import pytest
import yaml
from manifests import K8S, ROOT, crd_schema, overlay, ray_service, serve_config
from ray.serve.schema import ServeDeploySchema

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
PAGE = (ROOT / "docs/kubernetes.md").read_text()
PROXIES = (ROOT / "docs/deploying.md").read_text().split("\n## Behind a proxy\n")[1].split("\n## ")[0]
COUNTS = ("replicas", "minReplicas", "maxReplicas")


def patch_of_a_running_cluster():
    """The operations that the page has for the RayCluster."""
    section = PAGE.split("\n## More or fewer pods\n")[1].split("\n## ")[0]
    (text,) = re.findall(r"kubectl patch raycluster .*--type=json --patch '\n(.*?)'", section, re.DOTALL)
    return yaml.safe_load(text)


def patched(target, operations):
    """The target after `test` and `replace` operations of a JSON patch."""
    target = copy.deepcopy(target)
    for operation in operations:
        *way, last = [int(key) if key.isdigit() else key for key in operation["path"].split("/")[1:]]
        parent = target
        for key in way:
            parent = parent[key]
        if operation["op"] == "test":
            assert parent[last] == operation["value"]
        else:
            assert operation["op"] == "replace"
            assert last in parent
            parent[last] = operation["value"]
    return target


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_patch_of_a_running_cluster_changes_the_counts_of_its_group_alone(name):
    cluster = {"spec": ray_service(overlay(name))["spec"]["rayClusterConfig"]}
    operations = patch_of_a_running_cluster()
    (group_name,) = [each["value"] for each in operations if each["op"] == "test"]
    after = patched(cluster, operations)
    changed = [
        (before, now)
        for before, now in zip(
            cluster["spec"]["workerGroupSpecs"], after["spec"]["workerGroupSpecs"], strict=True
        )
        if before != now
    ]
    ((before, now),) = changed
    assert now["groupName"] == group_name
    assert len({now.pop(count) for count in COUNTS}) == 1
    assert {key: value for key, value in before.items() if key not in COUNTS} == now
    cluster["spec"].pop("workerGroupSpecs")
    after["spec"].pop("workerGroupSpecs")
    assert cluster == after


def test_what_the_page_asks_of_the_status_is_there():
    asked = set(re.findall(r"\{\.status\.([\w.]+)", PAGE))
    assert asked == {
        "activeServiceStatus.rayClusterName",
        "conditions",
        "pendingServiceStatus.rayClusterName",
    }
    for path in asked:
        schema = crd_schema("RayService")["properties"]["status"]
        for key in path.split("."):
            schema = schema["properties"][key]


@pytest.mark.parametrize("name", OVERLAYS)
def test_idle_connections_are_kept_longer_than_balancers_keep_them(name):
    (longest,) = re.findall(r"at most (\d+) s", PROXIES)
    options = ServeDeploySchema.model_validate(serve_config(overlay(name))).http_options
    assert options.keep_alive_timeout_s > int(longest)
