"""Which requests a decode engine under pressure has, and how each stands.

Owns their accounts, and the names of those in each state: who waits for memory that was taken from it, who
computes again what it lost, who has not got its first token. What is done about them is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from decode_node.engine.accounts import StreamAccount
from decode_node.engine.leavers import Leavers

if TYPE_CHECKING:
    from vllm.v1.request import Request


class StreamBook:
    """The requests of one engine, by the engine's names for them.

    Attributes:
        accounts: What is remembered of each.
        parked: Those that were preempted and wait.
        restoring: Of those that were preempted, the ones that compute again.
        untimed: Those whose first token is to come.
        paced: Those with a TPOT objective.
        droppable: Those that may be ended for good.
    """

    def __init__(self) -> None:
        self.accounts: dict[str, StreamAccount] = {}
        self.parked: set[str] = set()
        self.restoring: set[str] = set()
        self.untimed: set[str] = set()
        self.paced: set[str] = set()
        self.droppable: set[str] = set()

    def open(self, request: Request, leavers: Leavers, least_s: float, now_s: float) -> None:
        """A request has arrived; one that had left waits for its memory like those that have stayed.

        A TPOT objective of less than `least_s`, a step with the request alone on a machine that is no slower
        than usual, counts as none: it cannot be met, and others would lose memory and time for it.
        """
        name = request.request_id
        account = self.accounts[name] = StreamAccount.of(request, now_s)
        if account.tpot_s is not None and account.tpot_s < least_s:
            account.tpot_s = None
        if account.first_s is None:
            self.untimed.add(name)
        if account.tpot_s is not None:
            self.paced.add(name)
        if account.may_drop:
            self.droppable.add(name)
        if leavers.is_back(account, now_s):
            self.parked.add(name)

    def preempted(self, name: str, lost_tokens: int, now_s: float) -> None:
        """A request has lost its memory, and so many tokens' KV."""
        account = self.accounts[name]
        account.lost_tokens, account.pulls = lost_tokens, False
        if account.parked_s is None:
            account.parked_s = now_s
        self.restoring.discard(name)
        self.parked.add(name)

    def issued(self, scheduled: Mapping[str, int], requests: Mapping[str, Request]) -> int:
        """A step is issued: those that waited and are in it compute again.

        Args:
            scheduled: Tokens of each in the step.
            requests: All of the engine's.

        Returns:
            How many tokens of theirs are not in the engine any more.
        """
        missing = 0
        for name in [name for name in self.parked if name in scheduled]:
            self.parked.remove(name)
            self.restoring.add(name)
            request, account = requests[name], self.accounts[name]
            account.started_tokens = request.num_output_tokens
            cached = request.num_computed_tokens - scheduled[name]
            missing += max(0, account.lost_tokens - cached)
        return missing

    def emitted(self, requests: Mapping[str, Request], now_s: float) -> None:
        """A step is complete: some may have got their first token."""
        for name in [*self.untimed]:
            request = requests.get(name)
            if request is None or request.num_output_tokens:
                self.untimed.discard(name)
                if request is not None:
                    account = self.accounts[name]
                    account.first_s, account.first_tokens = now_s, request.num_output_tokens

    def computed_again(self, requests: Mapping[str, Request]) -> list[str]:
        """Those that have computed all that they lost; `restored` is to be said of each."""
        return [
            name
            for name in self.restoring
            if requests[name].status == RequestStatus.RUNNING and not requests[name].is_prefill_chunk
        ]

    def restored(self, name: str) -> None:
        """A request lacks nothing any more."""
        self.restoring.discard(name)
        account = self.accounts[name]
        account.pulls = False
        account.parked_s, account.lost_tokens = None, 0

    def close(self, name: str) -> StreamAccount:
        """A request has ended; its account is the caller's."""
        for names in (self.parked, self.restoring, self.untimed, self.paced, self.droppable):
            names.discard(name)
        return self.accounts.pop(name)
