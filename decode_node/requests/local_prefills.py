"""Prompts that the decode engine computes itself, among the tokens of its streams.

Each one is computed in chunks, which bounds by how much one step of the engine is longer. Owns how many are
computed at once, which bounds it for all of them, and how many may wait. That the others wait in turn is
`decode_node.fair_places`'s, who may still come `slo.admission.parts`'s.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from decode_node.carrying import PRESSURE_SCHEDULER
from decode_node.fair_places import FairPlaces
from slo.admission.parts import prompts_excess
from slo.request import Party

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MEAN_OVER: Final = 16
"""How long a prompt takes is the mean over about so many."""
_FIRST_GUESS_S: Final = 1.0


class TooManyPromptsError(Exception):
    """There are too many prompts to compute for one more.

    Attributes:
        retry_s: When to try again, seconds from now.
    """

    def __init__(self, retry_s: float) -> None:
        super().__init__(f"too many prompts to compute; there may be room in {retry_s:.1f} s")
        self.retry_s = retry_s


@dataclass(slots=True)
class Claim:
    """Prompts of one request that are to be computed here.

    Attributes:
        party: Whose they are.
        remaining: So many have not been computed yet.
        unasked: For so many nobody waits or has waited.
        wait_s: Longest wait while none of them has had its turn; infinite for any.
        has_begun: Whether one of them has.
    """

    party: Party
    remaining: int
    unasked: int
    wait_s: float = math.inf
    has_begun: bool = False


@dataclass(slots=True, eq=False)
class Turn:
    """One of those prompts that is computed now."""

    _local: LocalPrefills
    _claim: Claim
    _place: _Place
    _began_s: float
    _has_ended: bool = False

    def computed(self) -> None:
        """It has been computed; later calls do nothing."""
        if not self._has_ended:
            self._local.took(self._began_s)
            self._end()

    def leave(self) -> None:
        """It has been computed, or is not wanted any more; later calls do nothing."""
        if not self._has_ended:
            self._local.given_up()
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._local.turn_ended(self._claim, self._place)


class _Place(NamedTuple):
    """One where a prompt is computed, among those that take turns with each other."""

    among: FairPlaces
    told: asyncio.Future[None]


def turns_by_tier(config: VllmConfig) -> bool:
    """Whether each tier has turns of its own before an engine.

    A turn is held while the engine has no memory for the request. Where the engine orders them by tier, those
    of another tier do not wait for that.
    """
    return bool(config.scheduler_config.scheduler_cls == PRESSURE_SCHEDULER)


class LocalPrefills:
    """Those of one replica.

    Args:
        at_once: How many of those that take turns with each other are computed at once.
        most: How many there may be; then only those of whom has less than their part, up to twice as many.
        clock: Says what time it is, in seconds.
        steps: Says how many steps of the engine have ended.
        by_tier: Whether each tier has turns of its own.

    Attributes:
        computing: How many are computed now, whoever asked for them.
        given_up_after: How many steps had ended when one was last given up that had not been computed. The
            engine hears of that only between two passes.
        outstanding: How many wait their turn or have it, by whose they are.
    """

    def __init__(
        self,
        at_once: int,
        most: int = 64,
        clock: Callable[[], float] = time.monotonic,
        steps: Callable[[], int] = lambda: 0,
        *,
        by_tier: bool = False,
    ) -> None:
        self.computing = 0
        self.given_up_after = -math.inf
        self.outstanding = Counter[Party]()
        self._most = most
        self._weights = dict[str, float]()
        self._by_tier = by_tier
        self._at_once = at_once
        self._places = defaultdict[str, FairPlaces](lambda: FairPlaces(at_once))
        self._clock = clock
        self._steps = steps
        self._takes_s = _FIRST_GUESS_S

    @property
    def prompt_s(self) -> float:
        """Recent seconds from the end of one of them to the end of the next."""
        return self._takes_s / self._at_once

    @asynccontextmanager
    async def claimed(
        self, party: Party, prompts: int = 1, wait_s: float | None = None, weight: float = 1.0
    ) -> AsyncIterator[Claim]:
        """Count prompts until each has been computed, or all have been given up.

        Args:
            party: Whose they are.
            prompts: How many of one request.
            wait_s: Longest wait for the first turn; None for a request that is not refused any more.
            weight: The tenant's part, relative to others'.

        Raises:
            TooManyPromptsError: There are too many for one of the party's.
        """
        self._weights[party.tenant] = weight
        if wait_s is not None:
            self.check(party, weight)
        claim = Claim(party, prompts, prompts, math.inf if wait_s is None else wait_s)
        self.outstanding[party] += prompts
        try:
            yield claim
        finally:
            self._settle(claim, claim.remaining)

    def check(self, party: Party, weight: float = 1.0) -> None:
        """Whether there may be one more; see `claimed`.

        Raises:
            TooManyPromptsError: There are too many for one of the party's.
        """
        self._weights[party.tenant] = weight
        over = prompts_excess(self.outstanding, party, self._most, lambda tenant: self._weights[tenant])
        if over > 0:
            raise TooManyPromptsError(over * self.prompt_s)

    async def wait(self, claim: Claim, tokens: int) -> Turn:
        """Wait until one of a request's prompts may be computed, which has so many tokens.

        Raises:
            TooManyPromptsError: It was too long.
        """
        claim.unasked -= 1
        places = self._places[claim.party.tier if self._by_tier else ""]
        told = places.join(claim.party, tokens, self._weights[claim.party.tenant])
        deadline_s = self._clock() + claim.wait_s
        try:
            while not told.done():
                left_s = math.inf if claim.has_begun else deadline_s - self._clock()
                if left_s <= 0:
                    break
                await asyncio.wait([told], timeout=None if left_s == math.inf else left_s)
        except BaseException:
            places.leave(claim.party, told)
            raise
        if not told.done():
            places.leave(claim.party, told)
            raise TooManyPromptsError(self.prompt_s * self.outstanding.total())
        claim.has_begun = True
        self.computing += 1
        return Turn(self, claim, _Place(places, told), self._clock())

    @asynccontextmanager
    async def turn(self, claim: Claim, tokens: int) -> AsyncIterator[Callable[[], None]]:
        """Have a turn, as with `wait`; what is yielded says that the prompt has been computed."""
        turn = await self.wait(claim, tokens)
        try:
            yield turn.computed
        finally:
            turn.leave()

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[Callable[[], None]]:
        """Count one that is computed at once; what is yielded says that it has been."""
        is_computing = True

        def computed() -> None:
            nonlocal is_computing
            self.computing -= is_computing
            is_computing = False

        self.computing += 1
        try:
            yield computed
        finally:
            if is_computing:
                self.given_up()
            computed()

    def took(self, began_s: float) -> None:
        """A prompt has been computed since `began_s`."""
        self._takes_s += (self._clock() - began_s - self._takes_s) / _MEAN_OVER

    def given_up(self) -> None:
        """Nobody wants a prompt any more that has not been computed."""
        self.given_up_after = self._steps()

    def turn_ended(self, claim: Claim, place: _Place) -> None:
        """A request has no turn any more that it had."""
        self.computing -= 1
        self._settle(claim, 1)
        place.among.leave(claim.party, place.told)

    def _settle(self, claim: Claim, prompts: int) -> None:
        prompts = min(prompts, claim.remaining)
        claim.remaining -= prompts
        self.outstanding[claim.party] -= prompts
        if self.outstanding[claim.party] <= 0:
            del self.outstanding[claim.party]
