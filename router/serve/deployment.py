"""The Serve deployment around the routers of all models.

Off the token path: it answers a question about a request and never sees the request's text or its tokens.
Whoever calls says which model it is about, as `telemetry.reporting.of_model` does.
"""

from __future__ import annotations

from typing import Any

from router.messages import JobEnded, LiveJobs, Placed, PlacementDecision, PlacementRequested
from router.serve.model_router import METRICS, ModelRouter, RouterConfig
from slo.admission.tenant_limits import TenantGates
from slo.replacement import Replaced, ReplacementDecision, ReplacementRequested
from slo.reports import Report
from slo.request import JobId
from telemetry.instruments import Instruments
from telemetry.reporting.of_model import named


class SlackRouter:
    """Places requests, keeps the view of each model's fleet.

    A call about a model that it does not know is a `ValueError`, but for `fleet`: the caller is of another
    configuration.
    """

    def __init__(self, config: RouterConfig) -> None:
        tenants, instruments = TenantGates(), Instruments(*METRICS)
        self._tiers = list(config.tiers.names)
        self._models = {model: ModelRouter(model, config, tenants, instruments) for model in config.models}

    def _of(self, model: str) -> ModelRouter:
        if (found := named(self._models, model)) is None:
            raise ValueError(f"this router has no model {model!r}, but {', '.join(self._models)}")
        return found

    async def place(self, request: PlacementRequested, *, model: str) -> PlacementDecision:
        """Decide on one request, and place nothing any more on a replica that was lost with it.

        A replica that has not failed after all says so with its next report.
        """
        return self._of(model).place(request)

    async def replace(self, request: ReplacementRequested, *, model: str) -> ReplacementDecision:
        """Find another place for a prefill."""
        decision = self._of(model).place(PlacementRequested.again(request))
        if isinstance(decision, Placed):
            return Replaced(decision.prefill_replica, decision.handoff_s)
        return decision

    async def job_ended(self, ended: JobEnded, *, model: str) -> None:
        """Forget a request that is over."""
        self._of(model).job_ended(ended)

    async def generated(self, job_id: JobId, tokens: int, *, model: str) -> None:
        """Hear from a decode replica how many tokens a request had when its client left."""
        self._of(model).generated(job_id, tokens)

    async def not_for_prefill(self, job_id: JobId, *, model: str) -> None:
        """Hear from a decode replica that it computes a prompt itself."""
        self._of(model).not_for_prefill(job_id)

    async def held_up(self, job_id: JobId, *, model: str) -> None:
        """Hear from a decode replica that a request waits before its prefill for what others need not."""
        self._of(model).held_up(job_id)

    async def reconcile(self, live: LiveJobs, *, model: str) -> None:
        """Hear from an ingress which of its requests have not ended, and of ends that were missed."""
        self._of(model).reconcile(live)

    async def report(self, report: Report, *, model: str) -> None:
        """Hear from a replica."""
        self._of(model).report(report)

    async def models(self) -> list[str]:
        """The models that it routes, in the order of the configuration."""
        return list(self._models)

    async def fleet(self, *, model: str = "") -> dict[str, Any]:
        """The state of a model's fleet as plain data: readiness, and each replica's load.

        Without a model it is the first one's. One that it does not know has no replicas: an ingress of
        another configuration asks four times a second, and has other models to answer for.
        """
        if (found := named(self._models, model)) is None:
            nobody: dict[str, Any] = {"ready": False, "serves": False, "settled": True}
            return {"model": model, **nobody, "tiers": self._tiers, "prefill": [], "decode": []}
        return found.fleet()
