"""The ingress's side of the router: asks for a place, and goes on without one when nobody answers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from ray.exceptions import TaskCancelledError

from slo.errors import Rejected, RejectionReason
from telemetry import logs
from telemetry.catalogue import ROUTER_FALLBACKS
from telemetry.reporting.background import Background

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from router.messages import PlacementDecision, PlacementRequested
    from slo.request import JobId
    from telemetry.instruments import Instruments

_PAUSE_S = 1.0
"""After a failure the router is left alone for this long, so that requests do not each wait for it."""
_TIMEOUTS = 2
"""Waits in vain, one after the other, that make a failure: one may be a moment's load."""


class PlacementClient:
    """Calls the router, and notices when it does not react.

    Args:
        router: Handle of the router deployment.
        timeout_s: Longest wait for its answer.
        instruments: Where fallbacks are counted.
    """

    def __init__(self, router: DeploymentHandle, timeout_s: float, instruments: Instruments) -> None:
        self._router = router
        self._timeout_s = timeout_s
        self._instruments = instruments
        self._paused_until_s = 0.0
        self._timeouts = 0
        self._background = Background()

    async def place(self, request: PlacementRequested) -> PlacementDecision | None:
        """The router's decision; None when it gives none and Serve shall choose the replicas."""
        if time.monotonic() < self._paused_until_s:
            self._fall_back("paused")
            return None
        try:
            decision: PlacementDecision = await asyncio.wait_for(
                self._router.place.remote(request), self._timeout_s
            )
        except TaskCancelledError:  # the client is gone, nothing ails the router
            raise
        except TimeoutError:
            self._fall_back("timeout", request)
            self._timeouts += 1
            if self._timeouts < _TIMEOUTS:
                return None
        except Exception as error:  # noqa: BLE001 - whatever ails the router, the request goes on
            self._fall_back("error", request, error)
        else:
            self._timeouts = 0
            if not (isinstance(decision, Rejected) and decision.reason is RejectionReason.NOT_SETTLED):
                return decision
            self._fall_back("not_settled", request)
            return None
        self._timeouts = 0
        self._paused_until_s = time.monotonic() + _PAUSE_S
        return None

    async def fleet(self) -> dict[str, Any] | None:
        """The router's view of the fleet, None when it does not answer."""
        try:
            return await asyncio.wait_for(self._router.fleet.remote(), max(self._timeout_s, 1.0))
        except Exception:  # noqa: BLE001 - not answering is the answer
            return None

    def job_ended(self, job_id: JobId) -> None:
        """Tell the router that a request is over; if it does not hear, the replica's next report says so."""
        self._background.run("telling_router", self._tell(job_id), job_id=job_id)

    async def _tell(self, job_id: JobId) -> None:
        await self._router.job_ended.remote(job_id)

    def _fall_back(
        self, cause: str, request: PlacementRequested | None = None, error: Exception | None = None
    ) -> None:
        self._instruments.count(ROUTER_FALLBACKS, cause=cause)
        if request is not None:
            logs.event(
                "router_fallback",
                level=logging.WARNING,
                job_id=request.job_id,
                cause=cause,
                error=None if error is None else repr(error)[:300],
            )
