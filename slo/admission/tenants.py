"""API keys, the tenants behind them and what a tenant may ask for.

Owns the comparison of keys. Does not know where keys are configured or how they travel.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from slo.errors import AuthenticationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slo.tiers import Tier


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request, and the highest tier that they may use; None for any."""

    name: str
    highest_tier: Tier | None = None


ANONYMOUS = Tenant("anonymous")
"""The tenant of every request when no keys are configured."""


class KeyRing:
    """Maps an API key to its tenant in a time that does not depend on how much of a key is right.

    Only digests are kept. With no keys at all every request is `ANONYMOUS`.
    """

    def __init__(self, keys: Iterable[tuple[str, Tenant]]) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in keys]

    def tenant(self, key: str | None) -> Tenant:
        """The tenant that owns `key`.

        Raises:
            AuthenticationError: when keys are configured and `key` is absent or unknown.
        """
        if not self._tenants:
            return ANONYMOUS
        if key is None:
            msg = "no API key given; send it as 'Authorization: Bearer <key>'"
            raise AuthenticationError(msg)
        digest = _digest(key)
        found: Tenant | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            msg = "the API key is not known"
            raise AuthenticationError(msg)
        return found


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
