"""What one tenant, or one of its keys, may ask for: requests, prompt and output tokens per second, at a time.

Owns the limits and their state. Keys and tenants are `slo.admission.tenants`'s; what a class or a tenant gets
of a busy fleet is decided in `slo.admission.controller`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from slo.errors import RejectionReason

_MEAN_OVER: Final = 16
"""The mean time of a tenant's requests is taken over about so many."""
_FIRST_GUESS_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """Limits of one tenant, or of one of its keys; None is no limit.

    Attributes:
        requests_per_s: Requests per second in the long run.
        burst_requests: How many may come at once after a pause; by default those of a second, at least one.
        tokens_per_s: Prompt tokens per second in the long run.
        burst_tokens: How many may come at once after a pause; by default those of ten seconds.
        output_tokens_per_s: Generated tokens per second in the long run.
        burst_output_tokens: How many may be asked for at once after a pause; by default those of ten seconds.
        max_concurrent: Requests that have been admitted and have not ended.
        weight: Part of a busy class, relative to its other tenants.

    Raises:
        ValueError: for a limit or weight that is not above 0.
    """

    requests_per_s: float | None = None
    burst_requests: float | None = None
    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    output_tokens_per_s: float | None = None
    burst_output_tokens: float | None = None
    max_concurrent: int | None = None
    weight: float = 1.0

    @property
    def counts_tokens(self) -> bool:
        """Whether what a request takes is of interest."""
        return self.tokens_per_s is not None or self.output_tokens_per_s is not None

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")


NO_LIMIT: Final = TenantLimit()


class KeyLimit(NamedTuple):
    """What holds for one key beside its tenant's limits; keys of a tenant with one name are one."""

    name: str
    limit: TenantLimit


class Usage(NamedTuple):
    """Tokens that a request takes: what it may take when it is admitted, what it took when it has ended."""

    prompt_tokens: int
    output_tokens: int = 0


NO_USAGE: Final = Usage(0, 0)


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

    def takes_over(self, other: TokenBucket) -> None:
        """What has been taken out of another one, and has not flowed in again, is missing here."""
        self._level = min(self._size, self._size - (other._size - other._level))
        self._at_s = other._at_s

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
        self._running = 0
        self._mean_s = _FIRST_GUESS_S
        self._buckets: list[tuple[TokenBucket, RejectionReason]] = []
        self._known: dict[RejectionReason, TokenBucket] = {}
        """The bucket of each limit, also of one that does not hold now: what begins takes nothing of that."""
        self.holds(limit)

    def holds(self, limit: TenantLimit) -> None:
        """Hold the tenant to `limit` from now on; what is under way, and what was taken, still counts.

        Ingresses whose files of keys differ in age ask with one limit and with another in turn, or with one
        and without.
        """
        self.limit = limit
        self._buckets = []
        if (rate := limit.requests_per_s) is not None:
            size = max(1.0, rate if limit.burst_requests is None else limit.burst_requests)
            self._buckets.append((TokenBucket(rate, size), RejectionReason.REQUEST_RATE))
        for rate, burst, reason in (
            (limit.tokens_per_s, limit.burst_tokens, RejectionReason.TOKEN_RATE),
            (limit.output_tokens_per_s, limit.burst_output_tokens, RejectionReason.OUTPUT_TOKEN_RATE),
        ):
            if rate is not None:
                self._buckets.append((TokenBucket(rate, 10 * rate if burst is None else burst), reason))
        for bucket, reason in self._buckets:
            if (known := self._known.get(reason)) is not None:
                bucket.takes_over(known)
            self._known[reason] = bucket

    def refusal(self, asked: Usage, now_s: float) -> tuple[RejectionReason, float] | None:
        """Why a request that may take `asked` must wait, and for how long; None when it need not.

        How long it takes until one of the tenant's requests ends is estimated by their mean time.
        """
        limit = self.limit.max_concurrent
        if limit is not None and self._running >= limit:
            return RejectionReason.CONCURRENCY, self._mean_s / limit
        for bucket, reason in self._buckets:
            wait_s = bucket.wait_s(_amount(reason, asked), now_s)
            if wait_s > 0:
                return reason, wait_s
        return None

    def began(self, asked: Usage, now_s: float) -> None:
        """A request of the tenant is admitted: all that it may take counts as taken."""
        self._running += 1
        for bucket, reason in self._buckets:
            bucket.take(_amount(reason, asked), now_s)

    def ended(self, lasted_s: float, asked: Usage, used: Usage | None, now_s: float) -> None:
        """A request of the tenant has ended, however it did; what it did not take is given back.

        Args:
            lasted_s: Since it was admitted.
            asked: What it was admitted with.
            used: What it took; None when nobody knows, and nothing is given back.
            now_s: Now.
        """
        self._running -= 1
        self._mean_s += (lasted_s - self._mean_s) / _MEAN_OVER
        if used is not None:
            self.corrected(asked, used, now_s)

    def corrected(self, counted: Usage, used: Usage, now_s: float) -> None:
        """What was counted as `counted` of a request was `used`: what is too much is given back.

        Also to a limit that does not hold now, and whether or not it held when the request began: who did is
        not remembered, and no bucket fills beyond its size.
        """
        for reason, bucket in self._known.items():
            if reason is not RejectionReason.REQUEST_RATE:
                bucket.take(_amount(reason, used) - _amount(reason, counted), now_s)

    def withdrawn(self, asked: Usage, now_s: float) -> None:
        """A request that was admitted is not run after all: it has taken nothing, and lasted no time."""
        self._running -= 1
        for reason, bucket in self._known.items():
            bucket.take(-_amount(reason, asked), now_s)


class TenantGates:
    """The gates of all tenants; a tenant of which no request has brought a limit has none."""

    def __init__(self) -> None:
        self._gates: dict[str, TenantGate] = {}
        self._key_gates: dict[tuple[str, str], TenantGate] = {}

    def of(self, tenant: str, limit: TenantLimit | None = None) -> TenantGate:
        """The gate of one tenant; a `limit` that differs from the last one holds from now on."""
        if (gate := self._gates.get(tenant)) is None:
            self._gates[tenant] = gate = TenantGate(NO_LIMIT if limit is None else limit)
        elif limit is not None and limit != gate.limit:
            gate.holds(limit)
        return gate

    def of_key(self, tenant: str, key: KeyLimit) -> TenantGate:
        """The gate of one of a tenant's keys; a limit that differs from the last one holds from now on."""
        if (gate := self._key_gates.get((tenant, key.name))) is None:
            self._key_gates[tenant, key.name] = gate = TenantGate(key.limit)
        elif key.limit != gate.limit:
            gate.holds(key.limit)
        return gate

    def known_key(self, tenant: str, name: str) -> TenantGate:
        """The gate of a key that has been asked for, whatever it is held to by now."""
        return self._key_gates[tenant, name]

    def weight(self, tenant: str) -> float:
        """Part of a busy class, relative to its other tenants."""
        return self.of(tenant).limit.weight


def _amount(reason: RejectionReason, usage: Usage) -> float:
    match reason:
        case RejectionReason.TOKEN_RATE:
            return float(usage.prompt_tokens)
        case RejectionReason.OUTPUT_TOKEN_RATE:
            return float(usage.output_tokens)
        case _:
            return 1.0
