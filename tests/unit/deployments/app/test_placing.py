"""Where each tier is placed, and which part of cores and accelerators it has."""

import contextlib

import pytest

from deployments.config.settings import parse


@pytest.mark.slow
def test_each_tier_is_placed_where_it_is_told(options, tiny):
    found = options(
        {
            "model": tiny,
            "prefill": {"tensor_parallel_size": 2, "node_labels": {"pool": "a"}},
            "decode": {},
        }
    )
    _, prefill = found["prefill"]
    assert prefill["placement_group_bundles"] == [{"CPU": 2, "GPU": 0}, {"CPU": 1}]
    assert prefill["placement_group_bundle_label_selector"] == [{"pool": "a"}]
    assert prefill["placement_group_strategy"] == "STRICT_PACK"
    assert found["decode"][1]["placement_group_bundle_label_selector"] is None


@pytest.mark.slow
def test_the_cores_that_there_are_to_use_are_split(options, tiny):
    from deployments.app import application

    with contextlib.suppress(TypeError):  # the ingress is not bound to what was not built
        application(parse({"model": tiny}), [4, 7])
    assert {tier: node.cores for tier, node in options.nodes.items()} == {"prefill": ("4",), "decode": ("7",)}


def _environment_of(options):
    """Of a replica: its engine, a process of its own, has the same."""
    return options["ray_actor_options"]["runtime_env"]["env_vars"]


@pytest.mark.slow
def test_a_whole_gpu_is_what_vllm_takes_by_itself(options, tiny):
    for _, tier in options({"model": tiny, "accelerator": "cuda"}).values():
        assert "VLLM_RAY_PER_WORKER_GPUS" not in _environment_of(tier)


@pytest.mark.slow
def test_each_tier_has_an_accelerator_and_a_part_of_it(options, tiny):
    found = options(
        {
            "model": tiny,
            "accelerator": "cuda",
            "accelerator_type": "H100",
            "prefill": {"gpus_per_worker": 0.5},
            "decode": {
                "accelerator_type": "L40S",
                "across_nodes": True,
                "gpus_per_worker": 0.16666667,
                "engine_kwargs": {"gpu_memory_utilization": 0.1},
            },
        }
    )
    config, prefill = found["prefill"]
    assert prefill["placement_group_bundles"] == [{"CPU": 1, "GPU": 0.5, "accelerator_type:H100": 0.001}]
    assert prefill["placement_group_strategy"] == "STRICT_PACK"
    assert config.engine_kwargs["gpu_memory_utilization"] == 0.45
    assert _environment_of(prefill)["VLLM_RAY_PER_WORKER_GPUS"] == "0.5"
    config, decode = found["decode"]
    assert decode["placement_group_strategy"] == "PACK"
    assert [bundle["GPU"] for bundle in decode["placement_group_bundles"]] == [0.16666667]
    assert _environment_of(decode)["VLLM_RAY_PER_WORKER_GPUS"] == "0.16666667", (
        "not rounded up beyond its bundle"
    )
    assert all(bundle["accelerator_type:L40S"] for bundle in decode["placement_group_bundles"])
    assert config.engine_kwargs["gpu_memory_utilization"] == 0.1


@pytest.mark.slow
def test_a_whole_gpu_has_its_memory_as_the_engine_likes(options, tiny):
    config, _ = options({"model": tiny, "accelerator": "cuda"})["decode"]
    assert "gpu_memory_utilization" not in config.engine_kwargs
