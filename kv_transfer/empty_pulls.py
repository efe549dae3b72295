"""What vLLM's NIXL worker remembers of pulls that nothing comes of.

It keeps a record of each pull until the pull is done. One without blocks, of a request that ended before it
or whose prompt is cached here, is never done, and its record, with the list of the remote blocks, stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from typing import Any, Final

KEPT_S: Final = 600.0
"""Much longer than a handshake may take, after which vLLM still reads the record."""


class EmptyPulls:
    """Pulls without blocks, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._asked: deque[tuple[float, str]] = deque()

    def asked(self, request_id: str, now_s: float) -> None:
        """One is asked for with this step."""
        self._asked.append((now_s, request_id))

    def forget(self, records: MutableMapping[str, Any], now_s: float) -> None:
        """Remove the old ones from vLLM's `records`; not of a request that has blocks to pull by now."""
        while self._asked and self._asked[0][0] < now_s - KEPT_S:
            _, request_id = self._asked.popleft()
            if (record := records.get(request_id)) is not None and not any(record.local_block_ids):
                del records[request_id]
