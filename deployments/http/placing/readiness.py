"""Whether the models of an ingress are ready, by what the router knows of their fleets.

Owns what `/ready` answers, and how often the router is asked for it. What the fleets are is its word.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeAlias

from starlette.responses import JSONResponse, Response

KEPT_S: Final = 0.25
"""What the router has said of its fleets is not asked again for so long."""
Fleets: TypeAlias = "list[dict[str, Any] | None]"


class RecentFleets:
    """What the router says of its fleets, asked once for all who want to know within `KEPT_S`.

    Nobody needs a key for `/ready`, and placements wait behind each question at the router.

    Args:
        ask: Asks the router; raises nothing.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Fleets]]) -> None:
        self._ask = ask
        self._answer: asyncio.Task[Fleets] | None = None
        self._answered_s = 0.0

    async def get(self) -> Fleets:
        """The fleets as they were `KEPT_S` ago at most, when the router answers."""
        answer = self._answer
        if answer is None or (answer.done() and time.monotonic() - self._answered_s > KEPT_S):
            # Not in the context of who happens to ask first: Serve cancels its calls with it.
            answer = asyncio.get_running_loop().create_task(self._asked(), context=contextvars.Context())
            self._answer = answer
        return await asyncio.shield(answer)

    async def _asked(self) -> Fleets:
        fleets = await self._ask()
        self._answered_s = time.monotonic()
        return fleets


class Readiness:
    """What an ingress answers of its models, from one look at their fleets to the next."""

    def __init__(self) -> None:
        self._served: dict[str, bool] = {}
        """Of each model, whether its requests are answered, by the last router that knew."""

    def answer(
        self, fleets: Sequence[dict[str, Any] | None], *, of_all: bool, degraded: bool, tells: bool
    ) -> Response:
        """200 once both tiers of a model are warm, 503 before.

        One model that is not ready takes no request from another.

        Args:
            fleets: What the router says of each model's; None where it does not answer.
            of_all: Whether all models have to be ready, and not one of them.
            degraded: Whether it suffices that requests are answered: by decode alone, since prefill has been
                lost, or placed without the router, since it has or is too new to have heard of replicas.
            tells: Whether the answer has the fleets in it.
        """
        heard = {fleet["model"]: fleet for fleet in fleets if fleet is not None}
        if len(heard) < len(fleets):
            serves = degraded and any(self._served.values())
            body = {"status": "degraded" if serves else "not ready", "reason": "the router does not answer"}
            return JSONResponse(body, 200 if serves else 503)
        self._served = {model: self._serves(model, fleet) for model, fleet in heard.items()}
        serving = self._served.values()
        waiting = {model: _missing(fleet) for model, fleet in heard.items() if not fleet["ready"]}
        known: dict[str, Any] = {}
        if tells:
            known = {"fleet": fleets[0]} if len(fleets) == 1 else {"fleets": heard}
        if waiting and len(heard) > 1:
            known["waiting"] = waiting
        if not waiting or not (of_all or len(waiting) == len(heard)):
            return JSONResponse({"status": "ready", **known})
        reason = ", ".join(waiting.values() if len(heard) == 1 else map(": ".join, waiting.items()))
        if degraded and (all(serving) if of_all else any(serving)):
            return JSONResponse({"status": "degraded", "reason": reason, **known})
        return JSONResponse({"status": "not ready", "reason": reason, **known}, 503)

    def _serves(self, model: str, fleet: dict[str, Any]) -> bool:
        """Whether a model's requests are answered; by a router that is new, if they were before it."""
        return bool(fleet["serves"]) or (not fleet.get("settled", True) and self._served.get(model, False))


def _missing(fleet: dict[str, Any]) -> str:
    """What a model waits for that is not ready."""
    missing = [tier for tier in ("prefill", "decode") if not fleet[tier]]
    return f"no warm replica in: {', '.join(missing) or 'any tier, all reports are old'}"
