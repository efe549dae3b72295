"""The first pulls of a decode replica: one tiny prefill of each prefill replica, so that NIXL knows them.

Owns how long a replica that starts waits for them. Prefill replicas that come later are met by their first
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from ray.serve.llm.openai_api_models import CompletionRequest

from decode_node.prefill_tier import PrefillTier
from slo.request import HANDSHAKE_DUE_S
from telemetry import logs

FIRST_S: Final = 600.0
"""A tier that loads a large model takes minutes."""
OTHERS_S: Final = 20.0
WITHOUT_PREFILL_S: Final = 30.0
_RETRY_S: Final = 1.0


class Handshakes:
    """Has an engine decode one token that each prefill replica has prefilled.

    Args:
        engine: Ray's, of this replica.
        tier: Whose replicas are asked.
        model: Its name.
        backend: Ray's, of the KV connector.
    """

    def __init__(self, engine: Any, tier: PrefillTier, model: str, backend: Any) -> None:
        self._engine = engine
        self._tier = tier
        # A token that ended the answer would leave nothing to pull.
        self._request = CompletionRequest(model=model, prompt=" x", max_tokens=1, ignore_eos=True)
        self._prefill = backend.prepare_prefill_request(request=self._request, peer=None)
        self._task: asyncio.Task[None] | None = None

    async def begin(self, expected: int, *, needed: bool) -> None:
        """Wait until that many replicas are known, or are not up in time, or hang.

        A decode replica that is replaced while a prefill replica is down must not wait for it, nor for long
        while all are, if it can answer without them: then they are met when they come.

        Args:
            expected: How many there are to be.
            needed: Whether nobody is answered without a prefill replica.
        """
        self._task = asyncio.create_task(self._meet(expected))
        done, _ = await asyncio.wait([self._task], timeout=None if needed else WITHOUT_PREFILL_S)
        for met in done:
            met.result()
        if not done:
            logs.event("handshakes_later", level=logging.WARNING, waited_s=WITHOUT_PREFILL_S)

    async def _meet(self, expected: int) -> None:
        until_s = time.monotonic() + FIRST_S
        while True:
            handovers = await self._tier.broadcast("prewarm_prefill", self._prefill, within_s=HANDSHAKE_DUE_S)
            if handovers:
                until_s = min(until_s, time.monotonic() + OTHERS_S)
            for params in handovers:
                request = self._request.model_copy(deep=True)
                request.kv_transfer_params = params
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HANDSHAKE_DUE_S):
                        async for _ in self._engine.completions(request, None):
                            pass
            if len(handovers) >= expected or time.monotonic() > until_s:
                logs.event("handshakes_done", replicas=len(handovers), expected=expected)
                return
            await asyncio.sleep(_RETRY_S)
