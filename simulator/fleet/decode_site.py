"""A decode replica as the fleet sees it: with the link into it and its reports to the router.

A request first reserves memory, then its KV is pulled, then it joins the batch, as `docs/architecture.md`
tells it (steps 9 to 11).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from simulator.fleet.decode import Decoding, SimulatedDecode
from simulator.fleet.link import Ingest, Transfer
from simulator.fleet.reporting import VirtualReporter
from simulator.replica.loop import EventLoop
from slo.predict.handoff import Link
from slo.reports import AwaitedKv, DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import Tier


@dataclass(slots=True, eq=False)
class _Handover:
    """A request between the end of its prefill and its place in the batch."""

    decoding: Decoding
    size_bytes: int
    pulled: Callable[[], None]
    transfer: Transfer | None = None


class DecodeSite:
    """One decode replica.

    Args:
        replica: What decodes.
        link: What KV comes over.

    Attributes:
        ongoing: Requests that it has, those whose prefill still runs included.
        is_draining: Whether it takes no more, and says so.
        is_gone: Whether it has been ended.
    """

    def __init__(self, loop: EventLoop, replica_id: ReplicaId, replica: SimulatedDecode, link: Link) -> None:
        self.replica_id = replica_id
        self.replica = replica
        self._ingest = Ingest(loop, link)
        self._handovers: dict[str, _Handover] = {}
        self._awaited: dict[JobId, AwaitedKv] = {}
        self.ongoing = 0
        self.is_draining = False
        self.is_gone = False
        self.reporter = VirtualReporter(loop, self.report)

    def report(self) -> DecodeReported:
        """How full it is; requests whose prefill still runs count as its own, as on a server."""
        replica = self.replica
        return DecodeReported(
            self.replica_id,
            replica.kv_usage,
            self.ongoing,
            replica.kv_tokens,
            replica.tpot_s,
            draining=self.is_draining,
            load=replica.load,
            awaited=tuple(self._awaited.values()),
            caches_prefixes=False,
            waiting=replica.waiting,
        )

    def drain(self) -> None:
        """Take no more, and say so."""
        self.is_draining = True
        self.reporter.changed()

    def began(self, job_id: JobId, tier: Tier, prompt_tokens: int) -> None:
        """A request was placed here; its prefill comes first."""
        self.ongoing += 1
        self._awaited[job_id] = AwaitedKv(job_id, tier, prompt_tokens)
        self.reporter.changed()

    def over(self, job_id: JobId) -> None:
        """One of its requests is over, or its prefill replica has failed."""
        self.ongoing -= 1
        self._awaited.pop(job_id, None)
        self.reporter.changed()

    def take(
        self,
        request_id: str,
        tier: Tier,
        sizes: tuple[int, int, int],
        pulled: Callable[[], None],
        ended: Callable[[Decoding], None],
    ) -> None:
        """Pull a request's KV and decode it.

        Args:
            request_id: The request.
            tier: Its tier.
            sizes: Its prompt tokens, its output tokens, and the bytes of its KV.
            pulled: Called when its KV is here.
            ended: Called after its last token.
        """
        prompt_tokens, output_tokens, size_bytes = sizes
        pull = partial(self._pull, request_id)
        decoding = Decoding(prompt_tokens, output_tokens, pull, ended, name=request_id, tier=tier)
        self._handovers[request_id] = _Handover(decoding, size_bytes, pulled)
        self.replica.admit(decoding)

    def compute(
        self,
        request_id: str,
        tier: Tier,
        sizes: tuple[int, int],
        compute_s: float,
        ended: Callable[[Decoding], None],
    ) -> None:
        """Compute a request's prompt among the tokens of the batch, and decode it.

        Args:
            request_id: The request.
            tier: Its tier.
            sizes: Its prompt tokens and its output tokens.
            compute_s: What that adds to a step.
            ended: Called after its last token.
        """

        def begins() -> None:
            self._awaited.pop(JobId(request_id), None)
            self.replica.join(decoding)

        decoding = Decoding(*sizes, begins, ended, compute_s, request_id, tier)
        self.replica.admit(decoding)

    def lose(self, request_id: str) -> None:
        """The KV of a request is gone before it was pulled, if it was to be pulled at all."""
        handover = self._handovers.pop(request_id, None)
        if handover is not None:
            if handover.transfer is not None:
                self._ingest.cancel(handover.transfer)
            self.replica.withdraw(handover.decoding)

    def _pull(self, request_id: str) -> None:
        handover = self._handovers[request_id]
        handover.transfer = self._ingest.send(handover.size_bytes, partial(self._join, request_id))

    def _join(self, request_id: str) -> None:
        handover = self._handovers.pop(request_id)
        self._awaited.pop(JobId(request_id), None)
        handover.pulled()
        self.replica.join(handover.decoding)
