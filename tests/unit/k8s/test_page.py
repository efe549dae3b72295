"""What the docs say of the manifests is so."""

import re

import pytest
from manifests import K8S, ROOT, overlay, serve_config
from ray.serve.schema import ServeDeploySchema

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
PROXIES = (ROOT / "docs/deploying.md").read_text().split("\n## Behind a proxy\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", OVERLAYS)
def test_idle_connections_are_kept_longer_than_balancers_keep_them(name):
    (longest,) = re.findall(r"at most (\d+) s", PROXIES)
    options = ServeDeploySchema.model_validate(serve_config(overlay(name))).http_options
    assert options.keep_alive_timeout_s > int(longest)
