"""Asks every prefill replica of a running deployment for its last minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

from deployments.local.running import NotRunningError, RunningDeployment
from deployments.timeline.page import Heard

_TIMEOUT_S = 10.0


async def pasts(
    running: RunningDeployment, last_s: float
) -> tuple[Sequence[str], Mapping[str, Heard | None]]:
    """The tiers, the most valuable first; and what each replica says, None for one that does not answer.

    Raises:
        NotRunningError: when the router does not say which there are.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            fleet = await running.router.fleet.remote()
    except Exception as error:  # noqa: BLE001 - whatever ails it
        raise NotRunningError(f"the router does not answer: {error!r:.200}") from None
    replicas = [state["replica"] for state in fleet["prefill"]]
    answers = await asyncio.gather(*[_past(running, replica, last_s) for replica in replicas])
    return fleet["tiers"], dict(zip(replicas, answers, strict=True))


async def _past(running: RunningDeployment, replica: str, last_s: float) -> Heard | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            past = await running.ask_prefill("past", replica, last_s)
    except Exception:  # noqa: BLE001 - not answering is the answer
        return None
    return None if past is None else Heard(past, datetime.now().astimezone())
