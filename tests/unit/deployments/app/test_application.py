"""The application builder, as far as it goes without a cluster."""

from pathlib import Path

import pytest
from ray.serve.deployment import deployment_to_schema

import deployments
from deployments.config.settings import load, parse
from slo.tiers import PREMIUM

CONFIGS = sorted((Path(deployments.__file__).parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_that_come_along_are_valid(path):
    assert load(path).tiers.tier_set()[PREMIUM].sheddable is False


@pytest.mark.slow
def test_serve_gives_the_builder_typed_arguments(build):
    """Serve turns a mapping into the builder's annotated model only if the annotation is a class."""
    import inspect

    from deployments.config.settings import SlackServeConfig

    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is SlackServeConfig


@pytest.mark.slow
def test_each_tier_is_told_when_its_engine_has_failed(options, tiny):
    options({"model": tiny, "accelerator": "cuda", "decode": {"hung_after_s": 90}})
    assert {tier: node.hung_after_s for tier, node in options.nodes.items()} == {"prefill": 30, "decode": 90}


@pytest.mark.slow
def test_decode_is_told_how_many_log_probabilities_a_request_may_ask_for(options, tiny):
    options({"model": tiny, "limits": {"max_logprobs": 5}})
    assert options.nodes["decode"].max_logprobs == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "most_per_node", "surge_percent"),
    [
        ({}, None, 100),
        ({"ingress_replicas": 2}, None, 100),
        ({"node_labels": {"pool": "a"}}, None, 100),
        ({"node_labels": {"pool": "a"}, "ingress_replicas": 2}, 1, 0),
    ],
    ids=str,
)
def test_several_ingresses_on_labelled_nodes_have_a_node_each(
    build, tiny, values, most_per_node, surge_percent
):
    """One more than there are nodes would never start, so an upgrade stops one of the old first."""
    ingress = deployment_to_schema(build(parse({"model": tiny, **values}))._bound_deployment)
    given = ingress.model_dump(exclude_unset=True)
    assert given.get("max_replicas_per_node") == most_per_node
    assert given.get("max_surge_percent", 0) == surge_percent


@pytest.mark.slow
def test_proxies_forget_what_model_a_client_names_to_serve(build, tiny):
    ingress = build(parse({"model": tiny}))._bound_deployment
    chosen = ingress._deployment_config.request_router_config.request_router_class
    assert "AnyIngress" in str(chosen)
