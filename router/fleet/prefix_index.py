"""Which prompt prefixes each prefill replica's KV cache is expected to hold.

Owns a bounded account per replica, the least recently used blocks forgotten first, as a prefix cache evicts
them. It is fed by placements and corrected by what replicas say: blocks that nobody has computed yet stand
apart, have nothing forgotten that was computed, and go if nobody computes them in the end. Hashes are the
caller's: each stands for all of a prompt up to the end of its block, so that equal hashes are equal prefixes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from router.fleet.block_holders import BlockHolders
from slo.queue.prefill import ROUNDED_TOKENS
from slo.request import JobId, ReplicaId

DEFAULT_CAPACITY_TOKENS: Final = 100_000
"""Of a replica that has not said how much its KV memory holds."""
_MIN_TRUST: Final = 0.25
_TRUST_SHRINKS: Final = 0.95
_TRUST_GROWS: Final = 1.01
_FEW: Final = 0.1
"""Of the tokens that were expected, so many may be missing without an eviction."""
_FEW_OF_TEXT: Final = 0.5
"""Likewise of a text, whose blocks are of so many bytes: a prefix has fewer tokens than as many bytes of its
tenant's texts have in the mean where it is of another kind, as English before code is."""
_MAX_UNDER_WAY: Final = 16_384
"""Prompts beyond this count as computed, the oldest first."""


@dataclass(slots=True)
class _Blocks:
    """Blocks and the tokens of each, the least recently used first.

    Attributes:
        tokens: Of all of them.
    """

    tokens: float = 0.0
    of_each: OrderedDict[int, float] = field(default_factory=OrderedDict)

    def add(self, block: int, tokens: float) -> None:
        """A block is used."""
        self.tokens += tokens - self.of_each.get(block, 0.0)
        self.of_each[block] = tokens
        self.of_each.move_to_end(block)

    def leading(self, hashes: Sequence[int]) -> int:
        """How many blocks of a prompt are here before the first that is not."""
        return sum(1 for _ in takewhile(self.of_each.__contains__, hashes))

    def drop(self, block: int) -> None:
        """A block that is here goes."""
        self.tokens -= self.of_each.pop(block)
        if not self.of_each:
            self.tokens = 0.0


@dataclass(slots=True)
class _Account:
    """The blocks of one replica, each of them either computed or awaited.

    Attributes:
        trust: Of its capacity, the fraction that prefixes are believed to have: running prompts take the
            rest.
        computed: Blocks that the replica has.
        awaited: Blocks that nobody has computed yet: of as many tokens at most, beside the others.
        askers: Of those, the prompts that are to compute each.
    """

    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS
    trust: float = 1.0
    computed: _Blocks = field(default_factory=_Blocks)
    awaited: _Blocks = field(default_factory=_Blocks)
    askers: dict[int, set[JobId]] = field(default_factory=dict)


@dataclass(slots=True)
class _UnderWay:
    """A prompt that was placed and is not computed yet.

    Attributes:
        hashes: Its blocks.
        block_tokens: Tokens of each.
        expected_blocks: Of them, the leading ones that were computed when it was placed, which it is to find
            cached unless they are forgotten meanwhile.
        is_text: Whether the tokens are an estimate.
        awaited: Of its blocks, those that nobody had computed by then.
        is_started: Whether its replica has said that it computes it.
    """

    replica_id: ReplicaId
    hashes: Sequence[int]
    block_tokens: float
    expected_blocks: int
    is_text: bool
    awaited: Sequence[int]
    is_started: bool = False


class PrefixIndex:
    """Blocks by replica, and replicas by block."""

    def __init__(self) -> None:
        self._accounts: defaultdict[ReplicaId, _Account] = defaultdict(_Account)
        self._holders = BlockHolders()
        self._under_way: dict[JobId, _UnderWay] = {}
        """The oldest first."""

    def __len__(self) -> int:
        """Blocks that are known of, each counted once for every replica that has it."""
        return sum(
            len(blocks.of_each)
            for account in self._accounts.values()
            for blocks in (account.computed, account.awaited)
        )

    def tokens_of(self, replica_id: ReplicaId) -> float:
        """Tokens that a replica is expected to hold, those included that it is still to compute.

        Of either kind never more than its capacity.
        """
        account = self._accounts.get(replica_id)
        return 0.0 if account is None else account.computed.tokens + account.awaited.tokens

    def cached_blocks(self, hashes: Sequence[int]) -> dict[ReplicaId, int]:
        """How many leading blocks of a prompt each replica holds; those with none are left out."""
        return self._holders.leading(hashes)

    def placed(
        self,
        replica_id: ReplicaId,
        job_id: JobId,
        hashes: Sequence[int],
        block_tokens: float,
        *,
        is_text: bool = False,
    ) -> None:
        """A prompt will be computed on a replica, which then holds its blocks, and nowhere else any more.

        `block_tokens` is an estimate where the prompt `is_text`.
        """
        self.withdrawn(job_id)
        if not hashes:
            return
        if len(self._under_way) >= _MAX_UNDER_WAY:
            self.computed(next(iter(self._under_way)))
        account = self._accounts[replica_id]
        awaited = [one for one in hashes if one not in account.computed.of_each]
        expected_blocks = account.computed.leading(hashes)
        one = _UnderWay(replica_id, hashes, block_tokens, expected_blocks, is_text, awaited)
        self._under_way[job_id] = one
        for block in reversed(awaited):  # the first blocks are used by most, and go last
            account.askers.setdefault(block, set()).add(job_id)
            self._add(replica_id, account.awaited, block, block_tokens)
        self._trim(replica_id, account)

    def started(self, replica_id: ReplicaId, job_id: JobId, cached_tokens: int) -> None:
        """A replica computes a prompt, of which it had so many tokens cached."""
        if (one := self._under_way.get(job_id)) is not None and one.replica_id == replica_id:
            if not one.is_started:
                blocks = self._accounts[replica_id].computed.leading(one.hashes[: one.expected_blocks])
                expected_tokens = int(blocks * one.block_tokens)
                self.found(replica_id, expected_tokens, cached_tokens, is_text=one.is_text)
            one.is_started = True

    def ended(self, replica_id: ReplicaId, job_id: JobId) -> None:
        """A prompt is over on a replica, which computed it if it had started."""
        if (one := self._under_way.get(job_id)) is None or one.replica_id != replica_id:
            return
        if one.is_started:
            self.computed(job_id)
        else:
            self.withdrawn(job_id)

    def computed(self, job_id: JobId) -> None:
        """A prompt has been computed where it was placed, and the replica has used all its blocks."""
        if (one := self._under_way.pop(job_id, None)) is None:
            return
        account = self._accounts[one.replica_id]
        for block in reversed(one.hashes):
            if account.askers.pop(block, None):
                account.awaited.drop(block)
            self._add(one.replica_id, account.computed, block, one.block_tokens)
        self._trim(one.replica_id, account)

    def withdrawn(self, job_id: JobId) -> None:
        """A prompt, if it is not computed yet, will not be; its blocks go that nobody else is to compute."""
        if (one := self._under_way.pop(job_id, None)) is None:
            return
        account = self._accounts[one.replica_id]
        for block in one.awaited:
            if job_id in (askers := account.askers.get(block, set())):
                askers.remove(job_id)
                if not askers:
                    self._drop(one.replica_id, account, account.awaited, block)

    def found(
        self, replica_id: ReplicaId, expected_tokens: int, cached_tokens: int, *, is_text: bool = False
    ) -> None:
        """A prefill has found so many tokens cached where so many were expected.

        A replica that has clearly less than was expected evicts sooner than its account: it is then held to a
        smaller part of its capacity, which grows back slowly. Of a text only less than half is: how its
        beginning tokenises nobody has told, and what is learned here counts for all tenants. Where hardly
        anything was expected, nothing is learned.
        """
        if expected_tokens <= ROUNDED_TOKENS:
            return
        account = self._accounts[replica_id]
        few = (_FEW_OF_TEXT if is_text else _FEW) * expected_tokens
        if expected_tokens - cached_tokens > max(ROUNDED_TOKENS, few):
            account.trust = max(_MIN_TRUST, account.trust * _TRUST_SHRINKS)
            self._trim(replica_id, account)
        else:
            account.trust = min(1.0, account.trust * _TRUST_GROWS)

    def resize(self, replica_id: ReplicaId, capacity_tokens: int) -> None:
        """A replica says how much its KV memory holds."""
        account = self._accounts[replica_id]
        if account.capacity_tokens != capacity_tokens:
            account.capacity_tokens = capacity_tokens
            self._trim(replica_id, account)

    def forget(self, replica_id: ReplicaId) -> None:
        """A replica is gone, and its cache with it."""
        account = self._accounts.pop(replica_id, None)
        if account is not None:
            for blocks in (account.computed, account.awaited):
                for block in [*blocks.of_each]:
                    self._drop(replica_id, account, blocks, block)
            self._holders.forget(replica_id)
        for job_id in [job_id for job_id, one in self._under_way.items() if one.replica_id == replica_id]:
            del self._under_way[job_id]

    def _trim(self, replica_id: ReplicaId, account: _Account) -> None:
        limit = account.capacity_tokens * account.trust
        for blocks in (account.computed, account.awaited):
            while blocks.tokens > limit and blocks.of_each:
                self._drop(replica_id, account, blocks, next(iter(blocks.of_each)))

    def _add(self, replica_id: ReplicaId, blocks: _Blocks, block: int, tokens: float) -> None:
        blocks.add(block, tokens)
        self._holders.add(replica_id, block)

    def _drop(self, replica_id: ReplicaId, account: _Account, blocks: _Blocks, block: int) -> None:
        blocks.drop(block)
        account.askers.pop(block, None)
        self._holders.remove(replica_id, block)
