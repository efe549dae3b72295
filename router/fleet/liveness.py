"""Which replicas can be given work, by when they were last heard of.

A replica that was killed says no goodbye. It is noticed by its silence, and earlier by whoever calls it
(`RouterCore.replica_gone`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from slo.request import ReplicaId


class Heard(Protocol):
    """What is known of a replica's life."""

    @property
    def replica_id(self) -> ReplicaId: ...  # noqa: D102 - its name
    @property
    def reported_at_s(self) -> float: ...  # noqa: D102 - when it was last heard of
    @property
    def draining(self) -> bool: ...  # noqa: D102 - whether it is being shut down


Replica = TypeVar("Replica", bound=Heard)


def usable(
    replicas: Iterable[Replica],
    now_s: float,
    silent_after_s: float,
    stale_after_s: float,
    lost: Collection[ReplicaId] = (),
) -> list[Replica]:
    """The replicas that work can be given to.

    Those that were heard of lately; if there are none, whatever the reason, those that were heard of at all
    within the longer limit. When everybody seems silent, it is rather the listener who was held up.

    Args:
        replicas: All that are known.
        now_s: The time.
        silent_after_s: A replica reports more often than this.
        stale_after_s: One that has not reported for this long is not used.
        lost: Replicas that do not come into question.
    """
    known = [
        one
        for one in replicas
        if not one.draining and now_s - one.reported_at_s < stale_after_s and one.replica_id not in lost
    ]
    return [one for one in known if now_s - one.reported_at_s < silent_after_s] or known
