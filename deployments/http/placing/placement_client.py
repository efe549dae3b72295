"""The ingress's side of the router: asks for a place, and goes on without one when nobody answers."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
import uuid
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import TaskCancelledError

from router.messages import JobEnded, LiveJobs, PlacementDecision, PlacementRequested
from slo.errors import Rejected, RejectionReason
from slo.reports import ReplicaGone
from slo.request import JobId, ReplicaId
from telemetry import logs
from telemetry.catalogue import ROUTER_FALLBACKS
from telemetry.instruments import Instruments
from telemetry.reporting.answering import answer_within, is_cancelled
from telemetry.reporting.background import Background

if TYPE_CHECKING:
    from telemetry.reporting.of_model import OfModel


_PAUSE_S = 1.0
"""After a failure the router is left alone for this long, so that requests do not each wait for it."""
_TIMEOUTS = 2
"""Waits in vain, one after the other and no answer to anybody within them, that make a failure: one may be a
moment's load."""


RECONCILE_S: Final = 2.0
"""How often the router is told which requests have not ended."""
_MOST_UNTOLD: Final = 4096
"""Ends of requests that are kept for a router that does not answer."""
_MOST_AT_ONCE: Final = 512
"""Ends that it is told of in one word; it decides on nobody meanwhile."""


class PlacementClient:
    """Calls the router, and notices when it does not react.

    Args:
        router: The router, for one model.
        timeout_s: Longest wait for its answer.
        instruments: Where fallbacks are counted.
    """

    def __init__(self, router: OfModel, timeout_s: float, instruments: Instruments) -> None:
        self._router = router
        self._timeout_s = timeout_s
        self._instruments = instruments
        self._paused_until_s = 0.0
        self._timeouts = 0
        self._answered_s = -math.inf
        self._background = Background()
        self._name = uuid.uuid4().hex
        self._asked = 0
        self._live: set[JobId] = set()
        self._untold: dict[JobId, JobEnded] = {}
        self._reconciling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Tell the router from now on which requests live, even while there are none; later calls do nothing.

        What another ingress had asked for before it died ends only if somebody speaks. Needs a running loop.
        """
        if self._reconciling is None:
            # Not in the context of the request that happens to come first: Serve cancels its calls with it.
            self._reconciling = asyncio.get_running_loop().create_task(
                self._reconcile(), context=contextvars.Context()
            )

    async def place(self, request: PlacementRequested) -> PlacementDecision | None:
        """The router's decision; None when it gives none and Serve shall choose the replicas."""
        self.start()
        self._asked += 1
        request = replace(request, asker=self._name, number=self._asked)
        self._live.add(request.job_id)
        decision = await self._decision(request)
        if isinstance(decision, Rejected):
            self._live.discard(request.job_id)
        return decision

    async def _decision(self, request: PlacementRequested) -> PlacementDecision | None:
        if time.monotonic() < self._paused_until_s:
            self._fall_back("paused")
            return None
        asked_s = time.monotonic()
        try:
            asked = self._router.place.remote(request)
            decision: PlacementDecision = await answer_within(asked, self._timeout_s)
        except TaskCancelledError:  # the client is gone, nothing ails the router
            raise
        except TimeoutError:
            self._fall_back("timeout", request)
            if self._answered_s > asked_s:  # it has answered others meanwhile: it has much to do, and does it
                return None
            self._timeouts += 1
            if self._timeouts < _TIMEOUTS:
                return None
        except Exception as error:  # noqa: BLE001 - whatever ails the router, the request goes on
            self._fall_back("error", request, error)
        else:
            self._timeouts, self._answered_s = 0, time.monotonic()
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
            async with asyncio.timeout(max(self._timeout_s, 1.0)):
                fleet: dict[str, Any] = await self._router.fleet.remote()
                return fleet
        except (Exception, asyncio.CancelledError):  # not answering is the answer
            if is_cancelled():
                raise
            return None

    def job_ended(self, ended: JobEnded) -> None:
        """Tell the router that a request is over.

        What it misses it knows within twice `RECONCILE_S`, once it answers, and is told again until it does.
        """
        self._background.run("telling_router", self._tell(ended), job_id=ended.job_id)

    def lost(self, replica: ReplicaId) -> None:
        """Tell the router that a replica has died, when no other request for a place does."""
        self._background.run("telling_router", self._tell_lost(replica), replica=replica)

    async def _tell_lost(self, replica: ReplicaId) -> None:
        await self._router.report.remote(ReplicaGone(replica))

    async def _tell(self, ended: JobEnded) -> None:
        try:
            telling = asyncio.ensure_future(self._router.job_ended.remote(ended))
            # Until then it lives: a word without it might come first, and would not say what it took.
            await asyncio.wait((telling,), timeout=RECONCILE_S)
        finally:
            self._live.discard(ended.job_id)
        try:
            await telling
        except (Exception, asyncio.CancelledError):
            self._untold[ended.job_id] = ended
            if len(self._untold) > _MOST_UNTOLD:
                del self._untold[next(iter(self._untold))]
            raise

    async def _reconcile(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_S)
            untold = tuple(islice(self._untold.values(), _MOST_AT_ONCE))
            live = LiveJobs(self._name, self._asked, tuple(self._live), untold)
            try:
                async with asyncio.timeout(RECONCILE_S):
                    await self._router.reconcile.remote(live)
            except (Exception, asyncio.CancelledError):  # whoever places requests notices that it is away
                if is_cancelled():
                    raise
            else:
                for ended in untold:
                    self._untold.pop(ended.job_id, None)

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
