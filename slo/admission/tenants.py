"""API keys, the tenants behind them and what a tenant may ask for.

Owns the comparison of keys. Does not know where keys are configured or how they travel.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from slo.admission.tenant_limits import NO_LIMIT, KeyLimit, TenantLimit
from slo.errors import AuthenticationError
from slo.tiers import Tier


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request.

    Attributes:
        name: Stands in metrics and logs.
        key_name: Of the key that it came with; stands in logs. None for one without.
        highest_tier: The highest that they may use; None for any.
        cache_salt: Cached prefixes are shared among those with the same; None where all share all.
        limit: What it may ask for in a time.
        key_limit: What it may ask for with this key.
    """

    name: str
    highest_tier: Tier | None = None
    cache_salt: str | None = None
    limit: TenantLimit = NO_LIMIT
    key_name: str | None = None
    key_limit: KeyLimit | None = None


ANONYMOUS = Tenant("anonymous")
"""The tenant of every request when no keys are configured."""


class ApiKey(NamedTuple):
    """A key by its digest; `expires_s` is in seconds since 1970."""

    digest: bytes
    tenant: Tenant
    expires_s: float = math.inf


class KeyRing:
    """Maps an API key to its tenant in a time that does not depend on how much of a key is right.

    Only digests are kept, and the digest of a guess has nothing in common with that of a key, however much of
    it is right. With no keys at all every request is `anonymous`.
    """

    def __init__(self, keys: Iterable[ApiKey], anonymous: Tenant = ANONYMOUS) -> None:
        self._keys = {key.digest: key for key in keys}
        self._anonymous = anonymous

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._keys)

    def tenant(self, key: str | None, now_s: float) -> Tenant:
        """The tenant that owns `key` at `now_s`, in seconds since 1970.

        Raises:
            AuthenticationError: when keys are configured and `key` is absent, unknown or expired.
        """
        if not self._keys:
            return self._anonymous
        if key is None:
            raise AuthenticationError(
                "no API key given; send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
            )
        if (found := self._keys.get(digest(key))) is None:
            raise AuthenticationError("the API key is not known")
        if now_s >= found.expires_s:
            raise AuthenticationError(f"the API key has expired; tenant {found.tenant.name} needs a new one")
        return found.tenant


def server_secret(digests: Iterable[bytes]) -> bytes:
    """A secret that nobody who lacks one of the keys can guess, and that all processes with them share."""
    return sha256(b"".join(sorted(digests))).digest()


def cache_salt(secret: bytes, group: str) -> str:
    """What a group's cached prefixes are kept apart with."""
    return hmac.new(secret, group.encode(), sha256).hexdigest()


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return sha256(key.encode()).digest()
