"""What a request asks for: its tier and objectives, read from headers and body, validated, capped.

Owns the accepted spellings and the valid ranges. There is no silent default: a value that is malformed,
out of range, given twice or contradictory raises `FieldError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from slo.errors import FieldError
from slo.tiers import DEFAULT_ALIASES, ObjectiveName, Tier, TierSet

MAX_OBJECTIVE_MS: Final = 3_600_000.0
MIN_OBJECTIVE_MS: Final = 0.001
VALID_OBJECTIVE: Final = (
    f"give a decimal number of milliseconds from {MIN_OBJECTIVE_MS:g} to {MAX_OBJECTIVE_MS:.0f}"
)

TIER_HEADER: Final = "x-slo-tier"
TTFT_HEADER: Final = "x-slo-ttft-ms"
TPOT_HEADER: Final = "x-slo-tpot-ms"
E2E_HEADER: Final = "x-slo-e2e-ms"
TTFT_HEADERS: Final = (TTFT_HEADER, "x-llm-d-slo-ttft-ms", "x-flowprefill-slo-ms")
TPOT_HEADERS: Final = (TPOT_HEADER, "x-llm-d-slo-tpot-ms")
OBJECTIVE_HEADERS: Final = frozenset((*TTFT_HEADERS, *TPOT_HEADERS, E2E_HEADER, TIER_HEADER))
"""Every header that sets an objective; any other header of these families is a misspelling."""
OBJECTIVE_HEADER_PREFIXES: Final = ("x-slo-", "x-llm-d-slo-", "x-flowprefill-slo-")

SERVICE_TIER_FIELD: Final = "service_tier"
_AUTO: Final = DEFAULT_ALIASES[0]
"""The value of `service_tier` that leaves the choice to the server, and so contradicts no header."""
_FIRST_OF_E2E: Final = 0.1
"""The least part of the budget for an answer that its first token may take."""
_DECIMAL: Final = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Alone(NamedTuple):
    """What a request is predicted to take that has the fleet to itself, seconds; 0 for what nobody knows.

    Attributes:
        prefill_s: Of all its prompt.
        ttft_s: From arrival, with what is cached of the prompt.
        tpot_s: Per output token after the first.
        e2e_s: From arrival to its end.
    """

    prefill_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Objective:
    """The objectives that hold for one request.

    Attributes:
        tier: The tier that the request is served in.
        ttft_s: Budget for the first token, seconds from arrival; None for no deadline.
        ttft_scale: Instead of `ttft_s`, a multiple of the request's own predicted prefill time.
        tpot_s: Budget per output token after the first, seconds; None for none.
        clamped_from: The tier that was asked for, when the tenant's cap lowered it.
        e2e_s: Budget for the whole answer, seconds from arrival; None for none.
    """

    tier: Tier
    ttft_s: float | None
    tpot_s: float | None
    ttft_scale: float | None = None
    clamped_from: Tier | None = None
    e2e_s: float | None = None

    @property
    def promises_ttft(self) -> bool:
        """Whether it says when the first token is due."""
        return self.ttft_s is not None or self.ttft_scale is not None

    def judged_ttft_s(self, worked_out_s: float | None) -> float | None:
        """The promise that a request's first token is judged by, seconds.

        None for no promise, infinite for a multiple of its prefill time that nobody has worked out: no token
        is held against that, but who is refused has missed it.

        Args:
            worked_out_s: With which the router reckoned; None when it did not.
        """
        if not self.promises_ttft:
            return None
        if worked_out_s is not None:
            return worked_out_s
        return math.inf if self.ttft_s is None else self.ttft_s

    @property
    def known_ttft_budget_s(self) -> float | None:
        """As much of the budget for the first token as is known without predictions; None for no deadline."""
        return _smaller(self.ttft_s, self.e2e_s)

    def promised_ttft_s(self, predicted_prefill_s: float) -> float | None:
        """What is promised for the first token in seconds, None for nothing.

        Args:
            predicted_prefill_s: The request's own prefill time on an idle replica, seconds.
        """
        if self.ttft_scale is not None:
            return self.ttft_scale * predicted_prefill_s
        return self.ttft_s

    def ttft_budget_s(self, predicted_prefill_s: float, predicted_rest_s: float = 0.0) -> float | None:
        """The budget for the first token in seconds, None for no deadline.

        It is what is promised for it, or less where the rest of the answer would else come after the end of
        the budget for the whole. How long the rest takes is a guess: the first token keeps a tenth of that
        budget whatever the guess.

        Args:
            predicted_prefill_s: The request's own prefill time on an idle replica, seconds.
            predicted_rest_s: From the first token to the last, seconds.
        """
        promised_s = self.promised_ttft_s(predicted_prefill_s)
        if self.e2e_s is None:
            return promised_s
        return _smaller(promised_s, max(_FIRST_OF_E2E * self.e2e_s, self.e2e_s - predicted_rest_s))

    def out_of_reach(self, alone: Alone) -> tuple[ObjectiveName, ...]:
        """Which of them a request would miss that takes as long as `alone`."""
        takes_s = (
            (ObjectiveName.TTFT, self.promised_ttft_s(alone.prefill_s), alone.ttft_s),
            (ObjectiveName.TPOT, self.tpot_s, alone.tpot_s),
            (ObjectiveName.E2E, self.e2e_s, alone.e2e_s),
        )
        return tuple(name for name, budget_s, took_s in takes_s if budget_s is not None and budget_s < took_s)

    def budget_header(self, budget_s: float) -> str:
        """The header that would lengthen a budget for the first token of `budget_s`.

        Of a multiple of the prefill time, which the router alone has worked out, it is the first token's; of
        the whole answer's budget, all of it, that one's.
        """
        is_of_ttft = self.ttft_scale is not None or (self.ttft_s is not None and self.ttft_s <= budget_s)
        if self.e2e_s is None or (is_of_ttft and budget_s != self.e2e_s):
            return TTFT_HEADER
        return E2E_HEADER


def resolve(
    headers: Iterable[tuple[str, str]],
    service_tier: str | None,
    tiers: TierSet,
    highest_tier: Tier | None = None,
) -> Objective:
    """Work out a request's objectives.

    Args:
        headers: All request headers as (lower-case name, value), repetitions included.
        service_tier: The OpenAI body field, None when absent.
        tiers: The deployment's tiers.
        highest_tier: The tenant's cap, None for none. A request above it is served at the cap, and told so.

    Raises:
        FieldError: when a field is unknown, malformed, out of range, repeated or contradictory.
    """
    given = _objective_headers(headers)
    asked = _tier(given.get(TIER_HEADER), service_tier, tiers)
    tier = asked
    if highest_tier is not None and tiers.rank(asked) > tiers.rank(highest_tier):
        tier = highest_tier
    policy = tiers[tier]
    ttft_s = _one_of(given, TTFT_HEADERS)
    tpot_s = _one_of(given, TPOT_HEADERS)
    e2e_s = _one_of(given, (E2E_HEADER,))
    return Objective(
        tier=tier,
        ttft_s=policy.ttft_s if ttft_s is None else ttft_s,
        ttft_scale=policy.ttft_scale if ttft_s is None else None,
        tpot_s=policy.tpot_s if tpot_s is None else tpot_s,
        clamped_from=asked if tier != asked else None,
        e2e_s=policy.e2e_s if e2e_s is None else e2e_s,
    )


def parse_objective_ms(field: str, text: str) -> float:
    """Read a number of milliseconds and return seconds.

    Raises:
        FieldError: when it is not a plain decimal number, or is outside the valid range.
    """
    text = text.strip()
    if not _DECIMAL.fullmatch(text):
        raise FieldError(field, _why_not_a_number(text), VALID_OBJECTIVE)
    value_ms = float(text)
    if math.isinf(value_ms):
        raise FieldError(field, f"{_shown(text)} overflows", VALID_OBJECTIVE)
    if value_ms == 0:
        raise FieldError(field, "an objective of zero cannot be met", VALID_OBJECTIVE)
    if not MIN_OBJECTIVE_MS <= value_ms <= MAX_OBJECTIVE_MS:
        raise FieldError(field, f"{_shown(text)} is out of range", VALID_OBJECTIVE)
    return value_ms / 1000.0


def _smaller(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _objective_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in headers:
        if name not in OBJECTIVE_HEADERS:
            if name.startswith(OBJECTIVE_HEADER_PREFIXES):
                raise FieldError(
                    name,
                    "is not a known objective header",
                    f"known are {', '.join(sorted(OBJECTIVE_HEADERS))}",
                )
            continue
        if name in given:
            raise FieldError(name, "is given more than once", "give it once")
        given[name] = value
    return given


def _one_of(given: Mapping[str, str], names: Sequence[str]) -> float | None:
    present = [name for name in names if name in given]
    if len(present) > 1:
        raise FieldError(
            present[1], f"contradicts {present[0]}, which sets the same objective", "give one of them"
        )
    return parse_objective_ms(present[0], given[present[0]]) if present else None


def _tier(header: str | None, service_tier: str | None, tiers: TierSet) -> Tier:
    from_header = None if header is None else _tier_from_header(header, tiers)
    from_body = None if service_tier is None else _tier_from_body(service_tier, tiers)
    if from_header is None:
        return from_body or tiers.default
    if from_body is not None and service_tier != _AUTO and from_body != from_header:
        raise FieldError(
            TIER_HEADER,
            f"{from_header!r} contradicts {SERVICE_TIER_FIELD}={service_tier!r}",
            "give one of them, or the same tier in both",
        )
    return from_header


def _tier_from_header(text: str, tiers: TierSet) -> Tier:
    name = text.strip().lower()
    if name not in tiers.names:
        valid = f"give one of {', '.join(tiers.names)}"
        raise FieldError(TIER_HEADER, f"{_shown(text)} is not a tier", valid)
    return Tier(name)


def _tier_from_body(text: str, tiers: TierSet) -> Tier:
    known = tiers.service_tiers()
    if text not in known:
        valid = f"give one of {', '.join(known)}"
        raise FieldError(SERVICE_TIER_FIELD, f"{_shown(text)} is not a service tier", valid)
    return known[text]


def _why_not_a_number(text: str) -> str:
    lowered = text.lower().lstrip("+-")
    if lowered == "nan":
        return "NaN is not an objective"
    if lowered in {"inf", "infinity"}:
        return "an infinite objective is no objective"
    if text.startswith("-") and _DECIMAL.fullmatch(text[1:]):
        return f"{_shown(text)} is negative"
    return f"{_shown(text)} is not a number" if text else "is empty"


def _shown(text: str, limit: int = 40) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")
