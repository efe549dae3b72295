"""What the configuration takes from the pods that it runs in, they have: API keys and limits."""

import re
from pathlib import Path

import pytest
from manifests import (
    K8S,
    container_of,
    groups,
    in_prefill,
    in_serve_config,
    overlay,
    pod_templates,
    ray_templates,
    serve_config,
)

from deployments.config.limits import LimitsConfig
from deployments.config.settings import SlackServeConfig, parse
from deployments.http.proxy import LIMITS_VARIABLE

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())


def disagreements(objects):
    """What the pods that Ray runs in lack, or have otherwise."""
    (application,) = serve_config(objects)["applications"]
    config = parse(application["args"])
    return [*_variables(objects, config), *_file_of_keys(objects, config), *_limits(objects, config)]


def _variables(objects, config: SlackServeConfig):
    wanted = {key.key_env for key in config.api_keys}
    for name, template in pod_templates(objects).items():
        environment = {each["name"]: each for each in container_of(template).get("env", [])}
        if name in ray_templates(objects):
            for missing in sorted(wanted - environment.keys()):
                yield f"{name}: {missing} is not set"
        for variable, given in environment.items():
            is_secret = re.search(r"KEY|TOKEN|PASSWORD|SECRET", variable)
            if is_secret and "secretKeyRef" not in given.get("valueFrom", {}):
                yield f"{name}: {variable} does not come from a secret"


def _file_of_keys(objects, config: SlackServeConfig):
    """The application is built in any pod; what is mounted by `subPath` stays as it was at its start."""
    if (path := config.api_keys_file) is None:
        return
    for name, template in ray_templates(objects).items():
        mounts = {Path(each["mountPath"]): each for each in container_of(template)["volumeMounts"]}
        mount = mounts.get(path) or mounts.get(path.parent) or {}
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        if "secret" not in volumes.get(mount.get("name"), {}):
            yield f"{name}: {path} is in no secret that is mounted"
        elif "subPath" in mount:
            yield f"{name}: {path} does not change with its secret"


def _limits(objects, config: SlackServeConfig):
    """What Serve's proxies hold, and say that it stands in the configuration."""
    for name, template in ray_templates(objects).items():
        environment = {each["name"]: each.get("value") for each in container_of(template)["env"]}
        if (given := environment.get(LIMITS_VARIABLE)) is None:
            yield f"{name}: {LIMITS_VARIABLE} is not set"
        elif LimitsConfig.model_validate_json(given) != config.limits:
            yield f"{name}: {LIMITS_VARIABLE} is not limits of the configuration"


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_what_the_configuration_takes_from_them(name):
    assert not disagreements(overlay(name))


def test_a_key_of_production_can_be_revoked():
    """Variables would stay as they are in pods that run, and the application has the keys of its build."""
    (application,) = serve_config(overlay("production"))["applications"]
    config = parse(application["args"])
    assert config.api_keys_file is not None
    assert not config.api_keys


def test_limits_that_pods_and_configuration_have_alike_are_none():
    objects = overlay("production")
    in_serve_config("log_json: true", "limits: {max_body_bytes: 8388608}")(objects)
    for template in ray_templates(objects).values():
        container_of(template)["env"][0]["value"] = '{"max_body_bytes": 8388608}'
    assert not disagreements(objects)


def in_limits(value):
    """`SLACKSERVE_LIMITS` of the ingress, at the place where patches look for it."""

    def change(objects):
        variable = container_of(groups(objects)["ingress"]["template"])["env"][0]
        assert variable["name"] == LIMITS_VARIABLE
        variable["value"] = value

    return change


MISTAKES = {
    "head: SLACKSERVE_LIMITS is not limits": in_serve_config(
        "log_json: true", "limits: {max_body_bytes: 8388608}"
    ),
    "ingress: SLACKSERVE_LIMITS is not limits": in_limits('{"max_body_bytes": 8388608}'),
    "prefill: SLACKSERVE_LIMITS is not set": in_prefill(lambda _, container: container["env"].pop(0)),
    "OTHER_KEY is not set": in_serve_config(
        "log_json: true", "api_keys: [{tenant: acme, key_env: OTHER_KEY}]"
    ),
    "does not come from a secret": in_prefill(
        lambda _, container: container["env"].append({"name": "ACME_KEY", "value": "x"})
    ),
    "prefill: /etc/slackserve/keys.yaml is in no secret": in_prefill(
        lambda _, container: container["volumeMounts"].pop()
    ),
    "does not change with its secret": in_prefill(
        lambda _, container: container["volumeMounts"][-1].update(
            mountPath="/etc/slackserve/keys.yaml", subPath="keys.yaml"
        )
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_seeded_disagreement_is_found(mistake):
    objects = overlay("production")
    MISTAKES[mistake](objects)
    assert any(mistake in each for each in disagreements(objects))
