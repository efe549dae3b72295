"""Which CPU cores each replica computes on.

Two engines on one machine that are left alone pin themselves to the same core. Owns the split of the
machine's cores between the replicas of both tiers; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

_CORES_LEFT_FOR_OTHERS_FROM = 4


@dataclass(frozen=True, slots=True)
class CorePlan:
    """VLLM_CPU_OMP_THREADS_BIND for each replica, by its place on the node.

    One value binds all tensor-parallel ranks of a replica: "0,1|2,3" gives rank 0 the cores 0 and 1.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workers:
    """How many replicas a model has, and workers each of them: one for each of its tensor-parallel ranks."""

    prefill: int = 1
    decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1


def plan_cores(cores: Sequence[int], *models: Workers) -> list[CorePlan]:
    """Split `cores`, at least one, among the replicas of all `models`; a plan for each.

    Each worker gets one, what is left over goes to the prefill workers in turn. With four cores or more, one
    stays free for the processes around the engines as long as every worker still gets a core of its own. With
    fewer cores than workers they share, in turn.
    """
    is_prefill: list[bool] = []
    for model in models:
        is_prefill += [True] * (model.prefill * model.prefill_tp) + [False] * (model.decode * model.decode_tp)
    workers = len(is_prefill)
    usable = list(cores)
    if len(usable) >= _CORES_LEFT_FOR_OTHERS_FROM and len(usable) > workers:
        usable.pop()
    if len(usable) < workers:
        shares = [[usable[worker % len(usable)]] for worker in range(workers)]
    else:
        has = [1] * workers
        prefill_workers = [worker for worker in range(workers) if is_prefill[worker]]
        for extra in range(len(usable) - workers):
            has[prefill_workers[extra % len(prefill_workers)]] += 1
        left = iter(usable)
        shares = [list(islice(left, size)) for size in has]
    found, given = [], iter(shares)
    for model in models:
        prefill = list(islice(given, model.prefill * model.prefill_tp))
        decode = list(islice(given, model.decode * model.decode_tp))
        found.append(CorePlan(_bindings(prefill, model.prefill_tp), _bindings(decode, model.decode_tp)))
    return found


def _bindings(shares: list[list[int]], tp: int) -> tuple[str, ...]:
    texts = [",".join(str(core) for core in share) for share in shares]
    return tuple("|".join(texts[first : first + tp]) for first in range(0, len(texts), tp))
