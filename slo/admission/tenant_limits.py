"""What one tenant may ask for: requests and tokens per second, requests at a time.

Owns the limits and their state. Keys and tenants are `slo.admission.tenants`'s; what a class or a tenant gets
of a busy fleet is decided in `slo.admission.controller`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slo.errors import RejectionReason

if TYPE_CHECKING:
    from collections.abc import Mapping

_MEAN_OVER: Final = 16
"""The mean time of a tenant's requests is taken over about so many."""
_FIRST_GUESS_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """Limits of one tenant; None is no limit.

    Attributes:
        requests_per_s: Requests per second in the long run.
        burst_requests: How many may come at once after a pause; by default those of a second, at least one.
        tokens_per_s: Prompt tokens per second in the long run.
        burst_tokens: How many may come at once after a pause; by default those of ten seconds.
        max_concurrent: Requests that have been admitted and have not ended.
        weight: Part of a busy class, relative to its other tenants.

    Raises:
        ValueError: for a limit or weight that is not above 0.
    """

    requests_per_s: float | None = None
    burst_requests: float | None = None
    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    max_concurrent: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")


NO_LIMIT: Final = TenantLimit()


class TokenBucket:
    """Fills at a constant rate up to its size; what is taken out of it has been paid for.

    A demand larger than the bucket passes when it is full, and leaves a debt: it is slowed down, not shut
    out.

    Args:
        per_s: What flows in.
        size: What it holds, and holds at first.
    """

    def __init__(self, per_s: float, size: float) -> None:
        self._per_s = per_s
        self._size = size
        self._level = size
        self._at_s: float | None = None

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` can be taken; 0 for now."""
        self._fill(now_s)
        return max(0.0, min(amount, self._size) - self._level) / self._per_s

    def take(self, amount: float, now_s: float) -> None:
        """Take out `amount`."""
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None:
            self._level = min(self._size, self._level + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class TenantGate:
    """One tenant's limits and how much of them is used."""

    def __init__(self, limit: TenantLimit) -> None:
        self.limit = limit
        self._running = 0
        self._mean_s = _FIRST_GUESS_S
        self._buckets: list[tuple[TokenBucket, RejectionReason]] = []
        if (rate := limit.requests_per_s) is not None:
            size = max(1.0, rate if limit.burst_requests is None else limit.burst_requests)
            self._buckets.append((TokenBucket(rate, size), RejectionReason.REQUEST_RATE))
        if (rate := limit.tokens_per_s) is not None:
            size = 10 * rate if limit.burst_tokens is None else limit.burst_tokens
            self._buckets.append((TokenBucket(rate, size), RejectionReason.TOKEN_RATE))

    def refusal(self, tokens: int, now_s: float) -> tuple[RejectionReason, float] | None:
        """Why a request of `tokens` must wait, and for how long; None when it need not.

        How long it takes until one of the tenant's requests ends is estimated by their mean time.
        """
        limit = self.limit.max_concurrent
        if limit is not None and self._running >= limit:
            return RejectionReason.CONCURRENCY, self._mean_s / limit
        for bucket, reason in self._buckets:
            wait_s = bucket.wait_s(_amount(reason, tokens), now_s)
            if wait_s > 0:
                return reason, wait_s
        return None

    def began(self, tokens: int, now_s: float) -> None:
        """A request of the tenant is admitted."""
        self._running += 1
        for bucket, reason in self._buckets:
            bucket.take(_amount(reason, tokens), now_s)

    def ended(self, lasted_s: float) -> None:
        """A request of the tenant has ended, however it did."""
        self._running -= 1
        self._mean_s += (lasted_s - self._mean_s) / _MEAN_OVER


class TenantGates:
    """The gates of all tenants.

    Args:
        limits: By tenant.
        default: Of a tenant without an entry.
    """

    def __init__(self, limits: Mapping[str, TenantLimit], default: TenantLimit = NO_LIMIT) -> None:
        self._limits = limits
        self._default = default
        self._gates: dict[str, TenantGate] = {}

    def of(self, tenant: str) -> TenantGate:
        """The gate of one tenant."""
        if (gate := self._gates.get(tenant)) is None:
            self._gates[tenant] = gate = TenantGate(self._limits.get(tenant, self._default))
        return gate

    def weight(self, tenant: str) -> float:
        """Part of a busy class, relative to its other tenants."""
        return self.of(tenant).limit.weight


def _amount(reason: RejectionReason, tokens: int) -> float:
    return float(tokens) if reason is RejectionReason.TOKEN_RATE else 1.0
