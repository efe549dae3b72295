"""What arrives: mixes of request kinds and recorded traces, at any rate, reproducibly.

Owns lengths, arrival times, and the rules that give each request its objective and tier. The same streams
drive the simulator and `slackserve bench`.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, TypeAlias

from slo.tiers import DEFAULT_TIERS, Tier

MOONCAKE_BLOCK_TOKENS: Final = 512
"""Prompt tokens that one of the trace's block hashes stands for."""


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file, the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it reaches the system.

    Attributes:
        kind: The class that results are reported by.
        ttft_s: Objective for the first token, seconds; None for none.
        blocks: Hashes of the prompt's leading blocks; equal hashes are equal text up to there.
        block_tokens: Prompt tokens per hash.
    """

    number: int
    at_s: float
    kind: str
    tokens: int
    output_tokens: int
    ttft_s: float | None
    tier: Tier
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


Record: TypeAlias = tuple[float, int, int, tuple[int, ...]]
"""Time in seconds, prompt tokens, output tokens and block hashes of a recorded request."""

PrefillTime: TypeAlias = Callable[[int], float]
"""Seconds that a prompt of so many tokens takes alone."""

Fit: TypeAlias = Callable[[Arrival], Arrival]
"""What is made of a request's lengths before an objective follows from them."""


def unchanged(arrival: Arrival) -> Arrival:
    """The lengths that were drawn, or recorded."""
    return arrival


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of requests in a mix; prompt lengths are log-normal, or log-uniform with a `range_tokens`.

    Attributes:
        share: Of the requests; shares are normalised.
        sigma: Standard deviation of the logarithm of the length.
        output_tokens: Mean number of tokens to generate, at least 1.
        range_tokens: Shortest and longest prompt; log-normal lengths are held to it.
        is_uniform: Draw lengths log-uniformly from `range_tokens` instead.
        ttft_scale: Instead of `ttft_s`: bounds of a factor on the prompt's own prefill time, drawn uniformly.
    """

    share: float
    mean_tokens: float
    ttft_s: float | None
    tier: Tier = DEFAULT_TIERS.default
    sigma: float = 0.6
    output_tokens: float = 200.0
    range_tokens: tuple[int, int] = (16, 32_000)
    is_uniform: bool = False
    ttft_scale: tuple[float, float] | None = None

    def draw_tokens(self, rng: random.Random) -> int:
        """A prompt length."""
        low, high = self.range_tokens
        if self.is_uniform:
            return round(math.exp(rng.uniform(math.log(low), math.log(high))))
        mu = math.log(self.mean_tokens) - self.sigma**2 / 2
        return min(max(round(rng.lognormvariate(mu, self.sigma)), low), high)

    def draw_output(self, rng: random.Random) -> int:
        """A number of tokens to generate, geometric; as many random numbers whatever their mean."""
        drawn = rng.expovariate(1.0)
        if self.output_tokens <= 1:
            return 1
        return max(1, math.ceil(drawn / -math.log1p(-1 / self.output_tokens)))


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of requests as a Poisson process, one by one or in bursts.

    Attributes:
        burst: Mean number of requests that arrive at once; sizes are geometric.
        prefill_s: Needed for kinds whose objective is a multiple of their own prefill time.
        fit: Makes the lengths that are offered of those that are drawn.
    """

    kinds: Mapping[str, Kind]
    burst: float = 1.0
    prefill_s: PrefillTime | None = None
    fit: Fit = unchanged

    def stream(self, rate_rps: float, count: int, seed: int) -> list[Arrival]:
        """The first `count` arrivals at a mean rate, in order of arrival; the same for the same seed."""
        rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        names = [*self.kinds]
        cumulative = [*accumulate(kind.share for kind in self.kinds.values())]
        arrivals, at_s = [], 0.0
        for number in range(count):
            if self.burst <= 1 or rng.random() < 1 / self.burst:
                at_s += rng.expovariate(rate_rps / self.burst)
            (name,) = rng.choices(names, cum_weights=cumulative)
            arrivals.append(self._arrival(number, at_s, name, rng))
        return arrivals

    def _arrival(self, number: int, at_s: float, name: str, rng: random.Random) -> Arrival:
        kind = self.kinds[name]
        tokens = kind.draw_tokens(rng)
        factor = None if kind.ttft_scale is None else rng.uniform(*kind.ttft_scale)
        arrival = self.fit(Arrival(number, at_s, name, tokens, kind.draw_output(rng), kind.ttft_s, kind.tier))
        if factor is None:
            return arrival
        if self.prefill_s is None:
            raise ValueError(f"{name}: an objective relative to the prefill time needs `prefill_s`")
        return replace(arrival, ttft_s=factor * self.prefill_s(arrival.tokens))


@dataclass(frozen=True, slots=True)
class LengthClass:
    """What a trace's request is taken for by its recorded length: everything up to `max_prompt_tokens`."""

    max_prompt_tokens: float
    kind: str
    ttft_s: float
    tier: Tier


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded stream, its time stretched to give the rate that is asked for.

    Attributes:
        records: Time, prompt tokens, output tokens and block hashes of each request, in order of arrival.
        classes: By length, shortest first; the last must take every length.
        stretch: An objective is at least this many times what the prompt takes alone.
        longest_tokens: Longer prompts are left out, as a server with that context length would refuse them.
        fit: Makes the lengths that are offered of those that are recorded, which say the class.

    Raises:
        TraceError: when fewer than two requests are left, or all at one time: they have no rate.
    """

    records: Sequence[Record]
    classes: Sequence[LengthClass]
    prefill_s: PrefillTime
    stretch: float = 2.0
    longest_tokens: int = 131_072
    fit: Fit = unchanged

    def __post_init__(self) -> None:  # noqa: D105 - see Raises
        offered = self._offered()
        if len({record[0] for record in offered}) < 2:  # noqa: PLR2004 - a rate needs two
            raise TraceError(
                f"at least two prompts of up to {self.longest_tokens:,} tokens, at two times, are needed; "
                f"of the trace's {len(self.records):,} prompts {len(offered):,} are no longer than that"
            )

    def stream(self, rate_rps: float, count: int, seed: int) -> list[Arrival]:
        """As `Mix.stream`; `seed` chooses where in the recording the stream begins, and it wraps around.

        In each further round the prompts are other text, and share blocks with each other only.
        """
        records = self._offered()
        renamed = _span(records) if count > len(records) else 0
        span_s = records[-1][0] - records[0][0]
        stretch = len(records) / span_s / rate_rps
        start = random.Random(seed).randrange(len(records))  # noqa: S311 - reproducible, not secret
        arrivals = []
        for number in range(count):
            lap, index = divmod(start + number, len(records))
            time_s, tokens, output, blocks = records[index]
            at_s = (lap * span_s + time_s - records[start][0]) * stretch
            if number >= len(records):
                blocks = tuple(block + number // len(records) * renamed for block in blocks)
            taken = next(item for item in self.classes if tokens <= item.max_prompt_tokens)
            arrival = self.fit(
                Arrival(number, at_s, taken.kind, tokens, output, taken.ttft_s, taken.tier, blocks)
            )
            ttft_s = max(taken.ttft_s, self.stretch * self.prefill_s(arrival.tokens))
            arrivals.append(replace(arrival, ttft_s=ttft_s))
        return arrivals

    def _offered(self) -> list[Record]:
        return [record for record in self.records if record[1] <= self.longest_tokens]


def _span(records: Sequence[Record]) -> int:
    """How many numbers lie from the lowest block hash of a recording to its highest."""
    hashes = [block for *_, blocks in records for block in blocks]
    return max(hashes, default=0) - min(hashes, default=0) + 1


Workload: TypeAlias = Mix | Trace
"""A stream of requests that can be offered at any rate."""


def varying(
    workload: Workload, rate_rps: Callable[[float], float], most_rps: float, seconds: float, seed: int
) -> list[Arrival]:
    """The requests of some seconds at a rate that changes with time and is never above `most_rps`."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    count = math.ceil(1.2 * most_rps * seconds) + 100
    offered = (arrival for arrival in workload.stream(most_rps, count, seed) if arrival.at_s < seconds)
    kept = [arrival for arrival in offered if rng.random() * most_rps < rate_rps(arrival.at_s)]
    return [replace(arrival, number=number) for number, arrival in enumerate(kept)]


def read_mooncake(path: Path) -> list[Record]:
    """Read a trace in Mooncake's format (FAST'25): JSON lines with timestamp in ms, lengths and block hashes.

    Its clock has steps of 3 s; requests of one step are spread evenly until the next.
    """
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                hashes = tuple(map(int, row.get("hash_ids", ())))
                records.append(
                    (row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), hashes)
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                wanted = "an object with timestamp (ms), input_length and output_length"
                raise TraceError(f"{path}, line {number}: {wanted} is expected ({error!r})") from None
    return _checked(path, _spread(records))


def read_azure(path: Path) -> list[Record]:
    """Read a trace in Azure's format: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

    A time without an offset is in UTC.
    """
    records: list[Record] = []
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"])
                at_s = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
                records.append((at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()))
            except (ValueError, KeyError, TypeError) as error:
                wanted = "TIMESTAMP, ContextTokens and GeneratedTokens"
                raise TraceError(f"{path}, line {number}: {wanted} are expected ({error!r})") from None
    return _checked(path, records)


def read_trace(path: Path) -> list[Record]:
    """Read a trace by its ending: `.jsonl` as Mooncake's, `.csv` as Azure's.

    Raises:
        TraceError: when it cannot be read, or is none.
    """
    readers = {".jsonl": read_mooncake, ".csv": read_azure}
    if path.suffix not in readers:
        raise TraceError(f"{path}: give a .jsonl trace (Mooncake's format) or a .csv trace (Azure's)")
    if not path.is_file():
        raise TraceError(f"{path}: there is no such file")
    try:
        return readers[path.suffix](path)
    except UnicodeDecodeError:
        raise TraceError(f"{path}: this is not a text file in UTF-8") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None


def assign_tiers(arrivals: Sequence[Arrival], shares: Mapping[Tier, float], seed: int) -> Iterator[Arrival]:
    """The same arrivals with tiers drawn by share, whatever their kind."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    drawn = rng.choices([*shares], [*shares.values()], k=len(arrivals))
    return (replace(arrival, tier=tier) for arrival, tier in zip(arrivals, drawn, strict=True))


def _spread(records: list[Record]) -> list[Record]:
    """Requests that were recorded at one time, spread evenly until the next time in the recording."""
    times = sorted({record[0] for record in records})
    following = dict(pairwise(times))
    together = Counter(record[0] for record in records)
    seen: Counter[float] = Counter()
    spread: list[Record] = []
    for at_s, tokens, output, blocks in records:
        step_s = following.get(at_s, at_s) - at_s
        spread.append((at_s + step_s * seen[at_s] / together[at_s], tokens, output, blocks))
        seen[at_s] += 1
    return spread


def _checked(path: Path, records: list[Record]) -> list[Record]:
    if len({record[0] for record in records}) < 2:  # noqa: PLR2004 - a rate needs two
        raise TraceError(f"{path}: at least two requests at different times are needed")
    return sorted(records, key=lambda record: record[0])
