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
    """VLLM_CPU_OMP_THREADS_BIND for each replica, by its rank on the node.

    One value binds all tensor-parallel ranks of a replica: "0,1|2,3" gives rank 0 the cores 0 and 1.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]


def plan_cores(
    cores: Sequence[int], prefill_replicas: int, decode_replicas: int, prefill_tp: int, decode_tp: int
) -> CorePlan:
    """Split `cores`, at least one: one for each worker, what is left over to the prefill workers in turn.

    With four cores or more, one stays free for the processes around the engines as long as every worker
    still gets a core of its own. With fewer cores than workers they share, in turn. A replica has `tp`
    workers, one for each of its tensor-parallel ranks.
    """
    prefill_workers = prefill_replicas * prefill_tp
    workers = prefill_workers + decode_replicas * decode_tp
    usable = list(cores)
    if len(usable) >= _CORES_LEFT_FOR_OTHERS_FROM and len(usable) > workers:
        usable.pop()
    if len(usable) < workers:
        shares = [[usable[worker % len(usable)]] for worker in range(workers)]
    else:
        sizes = [1] * workers
        for extra in range(len(usable) - workers):
            sizes[extra % prefill_workers] += 1
        left = iter(usable)
        shares = [list(islice(left, size)) for size in sizes]
    return CorePlan(
        prefill=_bindings(shares[:prefill_workers], prefill_tp),
        decode=_bindings(shares[prefill_workers:], decode_tp),
    )


def _bindings(shares: list[list[int]], tp: int) -> tuple[str, ...]:
    texts = [",".join(str(core) for core in share) for share in shares]
    return tuple("|".join(texts[first : first + tp]) for first in range(0, len(texts), tp))
