"""Which prompt prefixes the requests of each decode replica hold, from their placement to their end.

A decode engine shares blocks that somebody holds: it pulls none of them, and none is taken for them. Those of
requests that have ended may still be in its cache, but lie in free memory, which whoever comes takes. Owns an
account of the requests that live, bounded by the replica's KV memory, the oldest forgotten first. Hashes are
as in `router.fleet.prefix_index`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.fleet.block_holders import BlockHolders
from router.fleet.prefix_index import DEFAULT_CAPACITY_TOKENS
from slo.request import JobId, ReplicaId


@dataclass(slots=True)
class _Account:
    """One replica's.

    Attributes:
        tokens: Of all blocks, each counted once.
        requests: Their blocks, the oldest first.
        held: How many of them hold a block, and its tokens.
    """

    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS
    tokens: float = 0.0
    requests: dict[JobId, Sequence[int]] = field(default_factory=dict)
    held: dict[int, tuple[int, float]] = field(default_factory=dict)


class HeldPrefixes:
    """Blocks by request and replica, and replicas by block."""

    def __init__(self) -> None:
        self._accounts: defaultdict[ReplicaId, _Account] = defaultdict(_Account)
        self._where: dict[JobId, ReplicaId] = {}
        self._holders = BlockHolders()

    def __len__(self) -> int:
        """Blocks that are known of, each counted once for every replica where it is held."""
        return sum(len(account.held) for account in self._accounts.values())

    def tokens_of(self, replica_id: ReplicaId) -> float:
        """Tokens of the blocks that are held on a replica; never more than its capacity."""
        account = self._accounts.get(replica_id)
        return 0.0 if account is None else account.tokens

    def held_blocks(self, hashes: Sequence[int]) -> dict[ReplicaId, int]:
        """How many leading blocks of a prompt are held on each replica; those with none are left out."""
        return self._holders.leading(hashes)

    def placed(
        self, replica_id: ReplicaId, job_id: JobId, hashes: Sequence[int], block_tokens: float
    ) -> None:
        """A request will hold its prompt on a replica; one that is there already keeps what it holds."""
        if self._where.get(job_id) == replica_id:
            return
        self.ended(job_id)
        if not hashes:
            return
        account = self._accounts[replica_id]
        self._where[job_id] = replica_id
        account.requests[job_id] = hashes
        for block in hashes:
            holders, tokens = account.held.get(block, (0, block_tokens))
            account.held[block] = holders + 1, tokens
            if not holders:
                account.tokens += tokens
                self._holders.add(replica_id, block)
        self._trim(account)

    def ended(self, job_id: JobId) -> None:
        """A request holds nothing any more."""
        if (replica_id := self._where.pop(job_id, None)) is None:
            return
        account = self._accounts[replica_id]
        for block in account.requests.pop(job_id):
            holders, tokens = account.held.pop(block)
            if holders > 1:
                account.held[block] = holders - 1, tokens
            else:
                account.tokens -= tokens
                self._holders.remove(replica_id, block)
        if not account.held:
            account.tokens = 0.0

    def resize(self, replica_id: ReplicaId, capacity_tokens: int) -> None:
        """A replica says how much its KV memory holds."""
        account = self._accounts[replica_id]
        account.capacity_tokens = capacity_tokens
        self._trim(account)

    def forget(self, replica_id: ReplicaId) -> None:
        """A replica is gone, and all that was held there."""
        if (account := self._accounts.get(replica_id)) is not None:
            for job_id in [*account.requests]:
                self.ended(job_id)
            del self._accounts[replica_id]
            self._holders.forget(replica_id)

    def _trim(self, account: _Account) -> None:
        while account.tokens > account.capacity_tokens and account.requests:
            self.ended(next(iter(account.requests)))
