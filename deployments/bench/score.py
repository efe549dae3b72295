"""The score of a run, as a whole and by tier and kind. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from deployments.bench.answer import Ended, Fate, Offered

_POINTS: Final = (50, 90, 99)
_TOO_LATE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Score:
    """Some requests of a run.

    Attributes:
        requests: How many were offered.
        met: How many were answered by their objectives. One without an objective meets it by being answered;
            one that was refused or failed misses it.
        attainment: The fraction of those.
        goodput_rps: The same per second of the run.
        ttft_ms: p50, p90 and p99 over those that got a first token; empty if none did.
        tpot_ms: The same for the time per token after the first.
        refused: Number of refusals by reason.
        failed: Number of failures by reason.
        prompt_tokens: Of the requests that were answered.
        output_tokens: Of the same.
        tokens_ps: Both together per second of the run.
        prompt_tokens_ps: Prompt tokens per second of the run.
    """

    requests: int
    met: int
    attainment: float
    goodput_rps: float
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    tokens_ps: float
    prompt_tokens_ps: float


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run.

    Attributes:
        tiers: By tier, those that occurred.
        kinds: By kind.
        wall_s: From the start until the last request was over.
        late_ms: How late requests were sent: p50, p90, p99 and p100.
        is_client_slow: Whether that is so much that the run asked something else than it says.
        unsent: Requests that were not sent any more, as too many had missed by then; they count nowhere else.
        said: By reason of those that failed, the first message of the server's.
    """

    overall: Score
    tiers: Mapping[str, Score]
    kinds: Mapping[str, Score]
    wall_s: float
    late_ms: Mapping[str, float]
    is_client_slow: bool
    unsent: int
    said: Mapping[str, str]


def score(run: Offered) -> Result:
    """Sum up a run of at least one request."""
    late_s = [ended.late_s for ended in run.ended]
    late_ms = _quantiles((max(0.0, value) * 1e3 for value in late_s), (*_POINTS, 100))
    return Result(
        overall=_score(run.ended, run.wall_s),
        tiers=_by(run, lambda ended: ended.arrival.tier),
        kinds=_by(run, lambda ended: ended.arrival.kind),
        wall_s=run.wall_s,
        late_ms=late_ms,
        is_client_slow=late_ms["p90"] > _TOO_LATE_S * 1e3,
        unsent=run.unsent,
        said=_said(run),
    )


def _said(run: Offered) -> dict[str, str]:
    said: dict[str, str] = {}
    for answer in (ended.answer for ended in run.ended):
        if answer.fate is Fate.FAILED and answer.said:
            said.setdefault(answer.reason, answer.said)
    return said


def _by(run: Offered, group: Callable[[Ended], str]) -> dict[str, Score]:
    return {
        name: _score([ended for ended in run.ended if group(ended) == name], run.wall_s)
        for name in dict.fromkeys(map(group, run.ended))
    }


def _score(ended: Sequence[Ended], wall_s: float) -> Score:
    met = sum(item.is_met for item in ended)
    answers = [item.answer for item in ended]
    answered = [item for item in ended if item.answer.fate is Fate.ANSWERED]
    prompt = sum(item.arrival.tokens for item in answered)
    output = sum(item.answer.output_tokens for item in answered)
    return Score(
        requests=len(ended),
        met=met,
        attainment=met / len(ended),
        goodput_rps=met / wall_s,
        ttft_ms=_quantiles((a.ttft_s * 1e3 for a in answers if a.ttft_s is not None), _POINTS),
        tpot_ms=_quantiles((a.tpot_s * 1e3 for a in answers if a.tpot_s is not None), _POINTS),
        refused=dict(Counter(a.reason for a in answers if a.fate is Fate.REFUSED)),
        failed=dict(Counter(a.reason for a in answers if a.fate is Fate.FAILED)),
        prompt_tokens=prompt,
        output_tokens=output,
        tokens_ps=(prompt + output) / wall_s,
        prompt_tokens_ps=prompt / wall_s,
    )


def _quantiles(values: Iterable[float], points: Sequence[int]) -> dict[str, float]:
    """Order statistics by nearest rank; empty for no values."""
    measured = list(values)
    if not measured:
        return {}
    found = np.percentile(measured, points, method="inverted_cdf")
    return {f"p{point}": float(value) for point, value in zip(points, found, strict=True)}
