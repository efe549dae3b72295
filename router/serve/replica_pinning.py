"""Sends each call of a deployment handle to the replica that the router chose for it.

Runs inside Serve's handles, in the calling process. Owns nothing but the lookup; a call without a pin, or
whose replica is gone, goes to the least busy one, if possible to none that failed it before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ray.serve.request_router import RequestRouter

from slo.request import ReplicaId, RequestContext

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


_ROUTING_TASKS = 4096


class _PinnedRequestRouter(RequestRouter):  # type: ignore[misc] # Ray ships no types for it
    """Honours a placement; `_field` says where it stands in the request's context."""

    _field: ClassVar[str]

    @property
    def max_num_routing_tasks(self) -> int:
        """Enough that requests waiting for one full replica do not hold up those for another."""
        return _ROUTING_TASKS

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The pinned replica first, then all, least busy first; see Ray's `RequestRouter`."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        pin, failed = (None, ()) if pending_request is None else self._target(pending_request)
        pinned = [replica for replica in candidate_replicas if replica.replica_id.unique_id == pin]
        others = [replica for replica in candidate_replicas if replica.replica_id.unique_id not in failed]
        return [pinned or sorted(others or candidate_replicas, key=self._known_queue_len)]

    def _target(self, pending_request: PendingRequest) -> tuple[ReplicaId | None, tuple[ReplicaId, ...]]:
        """The replica that a call is pinned to, and those that failed it before."""
        if (pin := pending_request.kwargs.get("pin")) is not None:
            return pin, ()
        for argument in pending_request.args:
            if (headers := getattr(argument, "headers", None)) is not None:
                context = RequestContext.from_headers(headers)
                return (
                    (None, ())
                    if context is None
                    else (getattr(context, self._field), context.failed_replicas)
                )
        return None, ()

    def _known_queue_len(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


class PinnedPrefill(_PinnedRequestRouter):
    """For handles to the prefill tier."""

    _field = "prefill_replica"


class PinnedDecode(_PinnedRequestRouter):
    """For handles to the decode tier."""

    _field = "decode_replica"
