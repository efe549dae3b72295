"""Until when decode may read the KV blocks of a prefill.

Prefill frees a finished prefill's blocks when their lease ends, and vLLM's decode engine learns nothing of
it: one that reads them later, because it was stopped or its host was, gets another prompt's KV. So the end of
the lease travels with the address of the blocks, and a pull that was not done by then has failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

_MARGIN_S: Final = 0.2
"""How far off the estimate of the other host's clock may be."""


class Pull(NamedTuple):
    """KV blocks that are being read.

    Attributes:
        engine: Which prefill engine has them.
        lease: What it calls the request.
        ends_s: When the lease ended as it was given, on that engine's clock.
        blocks: Where the KV goes.
    """

    engine: str
    lease: str
    ends_s: float
    blocks: frozenset[int]


class PullDeadlines:
    """Knows which leases have been lengthened.

    Args:
        extension_s: For how long prefill lengthens a lease when it is asked to.
    """

    def __init__(self, extension_s: float) -> None:
        self._extension_s = extension_s
        self._asked: dict[str, tuple[float, ...]] = {}

    def lengthened(self, leases: Iterable[str], now_s: float) -> None:
        """Prefill has been asked to lengthen these, which are all that are waited for."""
        self._asked = {lease: (*self._asked.get(lease, ()), now_s) for lease in leases}

    def is_late(self, pull: Pull, offset_s: float, now_s: float) -> bool:
        """Whether the blocks may have been another prefill's before the pull was done, which it is now.

        What prefill is asked after the end of a lease does not bring it back.

        Args:
            pull: What has been read.
            offset_s: By how much the prefill engine's clock is ahead of this process's.
            now_s: On this process's clock.
        """
        ends_s = pull.ends_s - offset_s - _MARGIN_S
        for asked_s in self._asked.get(pull.lease, ()):
            if asked_s < ends_s:
                ends_s = max(ends_s, asked_s + self._extension_s - _MARGIN_S)
        return now_s > ends_s
