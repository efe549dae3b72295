"""What the application builder makes of a configuration of a tiny model."""

import contextlib

import pytest

from benchmarks.harness.tiny_models import build_tiny_llama
from deployments.config.settings import parse


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", context=2048))


@pytest.fixture(scope="module")
def build():
    from deployments.app import build

    return build


@pytest.fixture
def options(monkeypatch):
    """Serve's options of the prefill and the decode deployment that a configuration is turned into.

    What else their replicas are told stands in `nodes` then.
    """
    from deployments import app, replicas

    found, nodes = {}, {}

    def note(llm_config, *, name_prefix, deployment_cls, bind_kwargs):
        tier = name_prefix.rstrip(":").lower()
        found[tier] = llm_config, deployment_cls.get_deployment_options(llm_config)
        nodes[tier] = bind_kwargs["node"]

    monkeypatch.setattr(replicas, "build_llm_deployment", note)

    def options_of(values):
        with contextlib.suppress(TypeError):  # the ingress is not bound to what was not built
            app.build(parse(values))
        return found

    options_of.nodes = nodes
    return options_of
