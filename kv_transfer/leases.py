"""Until when decode may use what it reads of a prefill's KV blocks.

Prefill frees a finished prefill's blocks when their lease ends, and vLLM's decode engine learns nothing of
it: one that reads them later, because it was stopped or its host was, gets another prompt's KV. So the end of
the lease travels with the address of the blocks. A pull that was done well before it, by both hosts' clocks,
is used at once. Of any other, prefill is asked whether the lease has ended: it may have been lengthened by a
heartbeat, or decode may be wrong about prefill's clock, which stands still while its host is suspended. Its
answer tells the clock anew, so one is asked for from time to time in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

MARGIN_S: Final = 2.5
"""How far off the estimate of the other host's clock may be: half of what a handshake may take."""
TRUSTED_S: Final = 3600.0
"""For so long the other host's clock is known: two that nobody sets drift apart by tenths of a second."""
AGAIN_S: Final = 1.0
"""After so long prefill is asked again about a pull that goes on past the end of its lease."""
MOST_BYTES: Final = 3000
"""Of names of leases that are asked about at once, unless one alone has more."""
_SLEPT_S: Final = 0.1
_KEPT: Final = 10_000


class Pull(NamedTuple):
    """KV blocks that are being read.

    Attributes:
        engine: Which prefill engine has them.
        address: Host and port of its side channel.
        lease: What it calls the request.
        ends_s: When the lease ended as it was given, on that engine's clock.
        blocks: Where the KV goes.
    """

    engine: str
    address: tuple[str, int]
    lease: str
    ends_s: float
    blocks: frozenset[int]


class Leases(NamedTuple):
    """What prefill says of leases.

    Attributes:
        ended: Those of the ones it was asked about whose blocks it has given to others, or may have.
        offset_s: By how much its clock is ahead of this process's.
    """

    ended: frozenset[str]
    offset_s: float


class Settled(NamedTuple):
    """What has become of pulls.

    Attributes:
        done: Requests of which nothing is being read any more.
        unusable: Blocks whose content is not the request's.
        failed: How many pulls these are of.
    """

    done: set[str]
    unusable: frozenset[int]
    failed: int


Ask = Callable[[Pull, Sequence[str]], Future[Leases]]
"""Asks the engine of a pull about leases of its; fails if there is no answer."""


@dataclass(slots=True)
class _Open:
    """A pull: whether nothing of it is being read any more, whether it is known if it can be used."""

    pull: Pull
    asked_s: float
    is_read: bool = False
    is_decided: bool = False


@dataclass(slots=True)
class _Question:
    """About these pulls, each with whether it was done when it was asked; some may end before the answer."""

    about: tuple[tuple[_Open, bool], ...]
    answer: Future[Leases] = field(repr=False)


class Pulls:
    """The pulls that a decode worker has begun, until nothing of them is being read any more.

    Args:
        ask: How prefill is asked.
        offsets_s: By how much the clocks of known prefill engines are ahead of this process's; answers
            correct them.
    """

    def __init__(self, ask: Ask, offsets_s: MutableMapping[str, float]) -> None:
        self._ask = ask
        self._offsets_s = offsets_s
        self._open: dict[str, _Open] = {}
        self._questions: dict[str, _Question] = {}
        self._told: dict[str, tuple[float, float]] = {}
        """Offsets, and when they were told."""
        self._slept_s: float | None = None
        self._unsure: set[str] = set()

    def began(self, request_id: str, pull: Pull, now_s: float) -> None:
        """One is asked for."""
        self._open[request_id] = _Open(pull, now_s)

    def failed(self, request_id: str) -> None:
        """One has failed, which the engine knows already; a thread of its own may say so."""
        if (one := self._open.get(request_id)) is not None:
            one.is_decided = True

    def settle(self, read: Iterable[str], now_s: float, slept_s: float) -> Settled:
        """What has become of them.

        Args:
            read: Requests of which nothing is being read any more, since the last call.
            now_s: On this process's clock.
            slept_s: For how long this host has been suspended since it started, or with any constant added.
        """
        self._notice_sleep(slept_s)
        done = set()
        for request_id in read:
            if (one := self._open.get(request_id)) is None:
                done.add(request_id)
            else:
                one.is_read = True
        lost = self._answers()
        self._notice_age(now_s)
        doubtful: dict[str, list[str]] = {}
        for request_id, one in list(self._open.items()):
            if one.is_decided or self._in_time(one.pull, now_s):
                if one.is_read:
                    one.is_decided = True  # for a question about it that is not answered yet
                    done.add(request_id)
                    del self._open[request_id]
            elif one.is_read or now_s >= one.asked_s + AGAIN_S:
                doubtful.setdefault(one.pull.engine, []).append(request_id)
        for engine, about in doubtful.items():
            if engine not in self._questions:
                self._questions[engine] = self._question(about, now_s)
        return Settled(done, frozenset().union(*(one.blocks for one in lost)), len(lost))

    def _notice_sleep(self, slept_s: float) -> None:
        """A host that was suspended knows no other's clock any more: its own stood still."""
        if self._slept_s is not None and slept_s > self._slept_s + _SLEPT_S:
            self._unsure |= {*self._offsets_s, *(one.pull.engine for one in self._open.values())}
        self._slept_s = slept_s

    def _notice_age(self, now_s: float) -> None:
        """Other hosts' clocks drift; vLLM tells an offset when hands are shaken, and not again."""
        before, self._told = self._told, {}
        for engine, offset_s in [*self._offsets_s.items()]:
            told = before.get(engine)
            self._told[engine] = told if told is not None and told[0] == offset_s else (offset_s, now_s)
            if now_s - self._told[engine][1] > TRUSTED_S:
                self._unsure.add(engine)

    def _in_time(self, pull: Pull, now_s: float) -> bool:
        if pull.engine in self._unsure or (offset_s := self._offsets_s.get(pull.engine)) is None:
            return False
        return now_s + offset_s <= pull.ends_s - MARGIN_S

    def _question(self, about: Sequence[str], now_s: float) -> _Question:
        """About as many of these as fit in."""
        asked: list[_Open] = []
        size = 0
        for request_id in about:
            one = self._open[request_id]
            size += len(one.pull.lease.encode()) + 5
            if asked and size > MOST_BYTES:
                break
            one.asked_s = now_s
            asked.append(one)
        answer = self._ask(asked[0].pull, tuple(one.pull.lease for one in asked))
        return _Question(tuple((one, one.is_read) for one in asked), answer)

    def _answers(self) -> list[Pull]:
        """Take in what has been answered; the pulls that are lost by it."""
        lost = []
        for engine, question in list(self._questions.items()):
            if not question.answer.done():
                continue
            del self._questions[engine]
            said = None if question.answer.exception() is not None else question.answer.result()
            if said is not None:
                self._unsure.discard(engine)
                self._told.pop(engine, None)
                self._offsets_s[engine] = said.offset_s
            for one, was_read in question.about:
                is_lost = said is None or one.pull.lease in said.ended
                if is_lost and not one.is_decided:
                    lost.append(one.pull)
                one.is_decided |= is_lost or was_read
        return lost


@dataclass(frozen=True, slots=True)
class EndedLeases(KVConnectorWorkerMetadata):  # type: ignore[misc] # vLLM ships no types for it
    """Leases that ended before a worker heard that their blocks were read, on their way to the scheduler."""

    leases: frozenset[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several workers: those that have ended at any."""
        return EndedLeases(self.leases | other.leases)


class EndedBook:
    """What a prefill engine answers when it is asked about leases; filled by one thread, asked by another.

    Args:
        engine: The engine's id: leases of others, which had its port before, are not known here.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._order: deque[str] = deque()
        self._ended: set[str] = set()

    def note(self, leases: Iterable[str]) -> None:
        """These have ended; their blocks may be given to others from now on."""
        for lease in leases:
            self._order.append(lease)
            self._ended.add(lease)
            if len(self._order) > _KEPT:
                self._ended.discard(self._order.popleft())

    def ended(self, engine: str, leases: Sequence[str]) -> list[str]:
        """Which of the leases of an engine have ended: all, if it is another."""
        return [lease for lease in leases if engine != self._engine or lease in self._ended]
