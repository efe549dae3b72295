"""What a decode replica's memory leaves for requests of a tier, now and later.

Owns what is worked out once of the streams there, so that each newcomer is only held against it. The rule is
the scheduler's own (`slo.decode.predicted_peak`), with what has been sent there and has not reached the
engine yet; what the replica tells is `slo.decode.headroom`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import USABLE, Holding, not_below, tokens_below
from slo.decode.running_streams import RunningStreams

FAR_S: Final = 60.0
"""Nothing is predicted for later than this."""
LEAST_STEP_S: Final = 0.001
"""What a step takes at least, also while no step was measured."""
_LOOKS: Final = 64
"""Of more streams, several end between two looks at the memory."""
_TOGETHER: Final = 16
"""So many of those that wait are let in at a time, at most."""
_LIMITS: Final = 8
"""Forecasts are kept for so many limits: what a request shares with others raises its own."""


class Outlook:
    """That of the requests of one tier, which those below it yield to.

    Args:
        load: What the replica has told.
        rank: Of the tier.
        sent: Those on their way to its engine, in this order; of a change the outlook is told.
    """

    def __init__(self, load: DecodeLoad, rank: int, sent: Collection[Holding]) -> None:
        self._load = load
        self._rank = rank
        self._sent = sent
        self._lower_tokens = tokens_below(rank, load.streams.values())
        self._held: Sequence[Holding] | None = None
        self._peers = RunningStreams.of(())
        self._queues: dict[float, _Queue] = {}

    def joined(self, one: Holding) -> None:
        """One more is on its way, behind all others."""
        if one.rank >= self._rank:
            self._held = None
            for queue in self._queues.values():
                queue.join(one)

    def left(self) -> None:
        """Others than before are on their way."""
        self._held = None
        self._queues.clear()

    def limit_tokens(self, *, is_top: bool, prefix_tokens: int = 0) -> float:
        """What the peak of the tier and those above it may come to, what they share counted once.

        Args:
            is_top: Whether it is the top tier, which what is kept for it does not keep out.
            prefix_tokens: What those that are to come share with the streams.
        """
        load = self._load
        # As `predicted_peak.shared_from`, which would count the lower tiers each time.
        shared_tokens = max(0, load.shared_tokens + prefix_tokens - self._lower_tokens)
        return USABLE * load.pool_tokens - (0 if is_top else load.reserve_tokens) + shared_tokens

    def fits(self, newcomer: Holding, *, is_top: bool, prefix_tokens: int = 0) -> bool:
        """Whether there is room for a newcomer now; see `limit_tokens`."""
        limit = self.limit_tokens(is_top=is_top, prefix_tokens=prefix_tokens)
        return not self._look() or self._peers.peak_with(newcomer) <= limit

    def wait_s(self, newcomer: Holding, *, is_top: bool, age_s: float = 0.0, prefix_tokens: int = 0) -> float:
        """Seconds until there is room for a newcomer, at most `FAR_S`, if nobody else comes; see `fits`.

        What was told was so `age_s` ago: the streams have gone on meanwhile.
        """
        held = self._look()
        all_end = all(one.remaining == 0 for one in held)
        if all_end or self.fits(newcomer, is_top=is_top, prefix_tokens=prefix_tokens):
            return 0.0
        limit = self.limit_tokens(is_top=is_top, prefix_tokens=prefix_tokens)
        queue = self._queues.get(limit)
        if queue is None:
            if len(self._queues) >= _LIMITS:
                del self._queues[next(iter(self._queues))]
            queue = self._queues[limit] = _Queue(held, limit, self._load.step_s)
        wait_s = queue.wait_s(newcomer)
        return wait_s if wait_s == FAR_S else max(0.0, wait_s - age_s)

    def _look(self) -> Sequence[Holding]:
        """Those of the tier and above, with what is held against newcomers up to date."""
        if self._held is None:
            self._held = not_below(self._rank, [*self._load.streams.values(), *self._sent])
            self._peers = RunningStreams.of(self._held)
        return self._held


class _Queue:
    """Those that wait for memory, each behind the one before it, until the limit leaves room.

    While they wait, they do not come any nearer to their ends.
    """

    def __init__(self, held: Sequence[Holding], limit: float, step_s: float) -> None:
        running = RunningStreams.of([one for one in held if not one.waits])
        self._limit = limit
        self._step_s = max(LEAST_STEP_S, step_s)
        self._at_once = max(1, len(running) // _LOOKS)
        self._moments = [(0, running)]
        """The steps until then, and who runs: from when the last of the queue has its memory, as far as it
        was asked for; nobody while that is too far."""
        self._let_in([one for one in held if one.waits])

    def join(self, one: Holding) -> None:
        """One more waits."""
        moment = self._moment(one)
        self._moments = [] if moment is None else [(moment[0], moment[1].joined_by([one]))]

    def wait_s(self, newcomer: Holding) -> float:
        """Seconds until there is room for one behind them, `FAR_S` if it takes as long or longer."""
        moment = self._moment(newcomer)
        return FAR_S if moment is None else moment[0] * self._step_s

    def _let_in(self, waiting: Sequence[Holding]) -> None:
        """The same as if each of them joined, one behind the other."""
        steps, running = self._moments[0]
        while waiting and steps * self._step_s < FAR_S:
            some = waiting[:_TOGETHER]
            # Whatever it takes, the first one need not wait for nobody.
            fit = max(running.fitting(some, self._limit), 0 if len(running) else 1)
            waiting = waiting[fit:]
            if fit:
                running = running.joined_by(some[:fit])
            if fit < len(some):
                more, running = running.after(self._at_once)
                steps += more
        self._moments = [] if waiting else [(steps, running)]

    def _moment(self, newcomer: Holding) -> tuple[int, RunningStreams] | None:
        """The first moment at which there is room for one; None for too far."""
        looked = 0
        while self._moments:
            steps, running = moment = self._moments[looked]
            if steps * self._step_s >= FAR_S:
                return None
            if not len(running) or running.peak_with(newcomer) <= self._limit:
                return moment
            looked += 1
            if looked == len(self._moments):
                more, later = running.after(self._at_once)
                self._moments.append((steps + more, later))
        return None
