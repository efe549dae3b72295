"""Serve's autoscaling policy: sizes a tier of replicas by what the SLO monitor knows of the load.

Runs in Serve's controller, which asks it several times a second and must not wait for it. Owns the clock, the
question to the monitor, and what holds without an answer: as many replicas as there are. The rule is
`slo.autoscaling`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from slo.autoscaling.need import FleetDemand, Need, decode_need, prefill_need
from slo.autoscaling.scaler import Scaled, Scaler, ScalingRules
from telemetry import logs
from telemetry.reporting.monitor_names import find_monitor
from telemetry.reporting.search import Search

_ASK_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_HOLDS_S: Final = 10.0
"""An answer that is older says nothing any more."""
_FOUND_AGAIN_S: Final = 5.0
"""Within it a controller that was restarted finds those that serve; a replica takes longer to start. As
a new deployment makes a new policy, the same time passes after that."""
_WARN_AFTER_S: Final = 60.0
"""Without an answer; an application that starts has no monitor at first."""


class TierAutoscaler:
    """Sizes one tier.

    Args:
        role: Which.
        model: Whose replicas they are.
        code: `running_code` of the application's processes; Serve's controller may run older code.
        starts_with: How many replicas there shall be at first. Serve's own `initial_replicas` would hold
            again after every change of the application, under whatever load.
        rules: The fields of `ScalingRules`.
    """

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        model: str,
        code: str,
        starts_with: int = 0,
        **rules: Any,
    ) -> None:
        self._role = role
        self._model = model
        self._code = code
        self._starts_with = starts_with
        self._starts_at_s: float | None = None
        self._scaler = Scaler(ScalingRules(**rules))
        self._search: Search | None = None
        self._monitor: Any = None
        self._silent_since_s: float | None = None
        self._has_warned = False
        self._is_overdue = False
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = -_ASK_S
        self._demand: FleetDemand | None = None
        self._heard_s = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas there shall be; see Ray Serve's `AutoscalingContext`.

        Whatever goes wrong, they stay as many: an error here would end all updates of the application.
        """
        target: int = context.target_num_replicas
        try:
            return self._decide(context, target, time.monotonic()), {}
        except Exception as error:  # noqa: BLE001 - see above
            logs.event(
                "autoscaling_failed",
                level=logging.ERROR,
                tier=self._role,
                model=self._model,
                error=repr(error)[:300],
            )
            return target, {}

    def _decide(self, context: Any, target: int, now_s: float) -> int:
        if (self._asking is None or self._asking.done()) and now_s - self._asked_s >= _ASK_S:
            self._asked_s = now_s
            self._asking = asyncio.get_running_loop().create_task(self._ask(context.app_name))
        running: int = context.current_num_replicas
        if self._starts_at_s is None:
            self._starts_at_s = now_s + _FOUND_AGAIN_S
        are_found = running >= target or now_s >= self._starts_at_s
        # Those of the rules, or the part of them that an upgrade in steps leaves this cluster for now.
        fewest, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        self._scaler.bounds = fewest, most
        target = min(max(target, self._at_start(running, are_found=are_found)), most)
        need = self._need(running, target, now_s) if running > 0 and are_found else None
        scaled = self._scaler.decide(need, running, target, now_s)
        self._tell_decision(scaled, target, running)
        return scaled.target

    def _tell_decision(self, scaled: Scaled, before: int, running: int) -> None:
        """Log a change of how many there shall be, and once that those that there shall be do not come."""
        if scaled.target != before:
            logs.event(
                "tier_scaled",
                tier=self._role,
                model=self._model,
                replicas=scaled.target,
                before=before,
                running=running,
                reason=scaled.reason.value,
                demand=self._demand,
            )
        # Serve hands its controller this class itself, and `slo` is what the controller has imported before.
        is_overdue = getattr(scaled, "is_overdue", False)
        if is_overdue and not self._is_overdue:
            logs.event(
                "replicas_overdue",
                level=logging.WARNING,
                tier=self._role,
                model=self._model,
                replicas=before,
                running=running,
            )
        self._is_overdue = is_overdue

    def _at_start(self, running: int, *, are_found: bool) -> int:
        """How many there shall be at least of a tier of which no replica serves; 0 while that is not known.

        A controller that was restarted knows of none at first, whatever serves.
        """
        if running == 0 and not are_found:
            return 0
        starts_with, self._starts_with = self._starts_with, 0
        return starts_with if running == 0 else 0

    def _need(self, running: int, target: int, now_s: float) -> Any:
        """What is needed of a tier of which some serve; None when nobody knows.

        While none serves, or the router can use none, nobody predicts what a prompt takes, or sees what is in
        use: all that there is to do would count as nothing. Without decode nothing is asked of prefill.
        Without prefill decode needs what it has, and more if what it computes itself takes more.
        """
        demand = self._demand
        if demand is None or now_s - self._heard_s > _HOLDS_S:
            return None
        if demand.decode.replicas == 0 or (self._role == "prefill" and demand.prefill.replicas == 0):
            return None
        if self._role == "prefill":
            return partial(prefill_need, demand.prefill, running, start_s=self._scaler.rules.start_s)
        return partial(_of_decode, demand, target if demand.prefill.replicas == 0 else 0)

    async def _ask(self, application: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                if self._monitor is None:
                    if self._search is None:
                        self._search = Search(partial(find_monitor, application, self._code))
                    self._monitor = await self._search.found()
                self._demand = await self._monitor.demand.remote(self._model)
        except Exception as error:  # noqa: BLE001 - the edge of a task; without an answer nothing changes
            self._monitor = None
            self._tell_silence(error)
        else:
            self._heard_s = time.monotonic()
            self._silent_since_s, self._has_warned = None, False

    def _tell_silence(self, error: Exception) -> None:
        """Log why there is no answer, as a warning once it has lasted."""
        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        warns = not self._has_warned and now_s - self._silent_since_s >= _WARN_AFTER_S
        self._has_warned = self._has_warned or warns
        logs.event(
            "demand_unknown",
            level=logging.WARNING if warns else logging.DEBUG,
            tier=self._role,
            model=self._model,
            error=repr(error)[:300],
        )


def _of_decode(demand: FleetDemand, at_least: int, _: float) -> Need:
    """Decode's need does not depend on when another replica is up: what waits counts whole."""
    return replace(decode_need(demand.decode), at_least=at_least)
