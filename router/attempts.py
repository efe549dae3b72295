"""Prefills that were lost or placed again: which of their ends counts, and which nobody will tell.

Owns these two books. A request may be placed again while its earlier attempt still runs, so the end of a
prefill may be that of an attempt that nobody waits for any more. On which replica a prefill is, is
`router.fleet.view`'s. Pure, like `router.core`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from slo.request import JobId, ReplicaId

REMEMBERED: Final = 16_384
"""Prefills that were placed again of which it is known where."""


class Attempts:
    """The prefills of which one attempt may end and another go on.

    Args:
        prefilled_at: The replicas that have the prefill of a request, or to which it is on its way.
        in_transit_s: A lost prefill that has no replica for so many seconds is not waited for any more.
    """

    def __init__(self, prefilled_at: Callable[[JobId], Collection[ReplicaId]], in_transit_s: float) -> None:
        self._prefilled_at = prefilled_at
        self._in_transit_s = in_transit_s
        self._lost: dict[JobId, float] = {}
        """Prefills whose replica was lost, or whose earlier attempt ended, and when; the oldest first."""
        self._again: dict[JobId, ReplicaId] = {}
        """Where a prefill was last placed, of those that were placed again; the oldest first."""

    def placed_again(self, job_id: JobId, where: ReplicaId) -> None:
        """A prefill was placed once more.

        The oldest is forgotten for it where there are too many: its request may have ended before.
        """
        self._again.pop(job_id, None)
        self._again[job_id] = where
        if len(self._again) > REMEMBERED:
            del self._again[next(iter(self._again))]

    def lost(self, prefills: Iterable[JobId], now_s: float) -> None:
        """The replica of these prefills is gone; each may yet ask for another place."""
        for job_id in prefills:
            self._lost.pop(job_id, None)  # of those that were lost before, this is the latest time
            self._lost[job_id] = now_s

    def ended(self, prefills: set[JobId], at: ReplicaId, now_s: float) -> set[JobId]:
        """These prefills are over on a replica.

        Returns:
            Those that are done. Of the others this was an earlier attempt, and the latest is still to come.
            As it may never come, where decode did not wait for the router's answer and went elsewhere, they
            count as lost.
        """
        earlier = {job_id for job_id in prefills if self._is_to_come(job_id, at)}
        self.lost(earlier, now_s)
        return prefills - earlier

    def given_up(self, now_s: float) -> list[JobId]:
        """Take out what was lost, or ended elsewhere, and has no replica: nobody says so any more.

        Its request streams, and would stand in the queue until it ends.
        """
        given_up = []
        while self._lost:
            job_id, lost_s = next(iter(self._lost.items()))
            if now_s - lost_s < self._in_transit_s:
                break
            del self._lost[job_id]
            if not self._prefilled_at(job_id):
                given_up.append(job_id)
        return given_up

    def forget(self, job_id: JobId) -> None:
        """A request is over, or goes on without its prefill: whichever attempt ends now, it has ended."""
        self._again.pop(job_id, None)

    def _is_to_come(self, job_id: JobId, ended_at: ReplicaId) -> bool:
        """Whether the latest attempt is on its way, to where an earlier one has ended or elsewhere."""
        if (placed := self._again.get(job_id)) is None:
            return False
        replicas = self._prefilled_at(job_id)
        return ended_at in replicas or (placed != ended_at and bool(replicas))
