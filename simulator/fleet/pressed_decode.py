"""A decode replica of a fleet whose memory is given out in blocks, and taken back when it runs short.

Owns how a pressed engine's steps and callbacks lie in the fleet's virtual time.
"""

from __future__ import annotations

from simulator.fleet.decode import Decoding
from simulator.pressure.decoding import PressedRequest, PressedStream
from simulator.pressure.engine import PressedEngine, PressedSetup, Way
from simulator.pressure.ours import Ours
from simulator.replica.loop import EventLoop
from slo.decode.headroom import DecodeLoad
from slo.tiers import TierSet


class PressedDecodeReplica:
    """As `simulator.fleet.decode.VirtualDecodeReplica`, step by step.

    Args:
        way: What it does when memory runs short.
        tiers: Their ranks, weights and TPOT objectives.

    Attributes:
        tokens: Tokens of answers that have ended.
        waited: Requests for which there was no memory in the first step after they came.
        reserved_token_s: Tokens of memory held times the seconds for which they were.
    """

    def __init__(self, loop: EventLoop, setup: PressedSetup, way: Way, tiers: TierSet) -> None:
        self.tokens = 0
        self.waited = 0
        self.reserved_token_s = 0.0
        self._loop = loop
        self._way = way
        self._tiers = tiers
        self._engine = PressedEngine(setup, way, tiers, self._pull)
        self._streams: dict[Decoding, PressedStream] = {}
        self._decodings: dict[PressedStream, Decoding] = {}
        self._have_waited: set[PressedStream] = set()
        self._is_busy = False
        self._since_s = 0.0

    @property
    def kv_tokens(self) -> int:
        """Tokens that its memory holds."""
        return self._engine.setup.blocks * self._engine.setup.block_tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds of a step of those that run; None of none."""
        return self._engine.step_s if self._engine.running else None

    @property
    def kv_usage(self) -> float:
        """Fraction of its memory that is held."""
        return 1.0 - self._engine.free_blocks / self._engine.setup.blocks

    @property
    def waiting(self) -> int:
        """Requests that wait for memory or a place."""
        return len(self._engine.waiting)

    @property
    def load(self) -> DecodeLoad | None:
        """What the router is told of its memory; only our way tells."""
        return self._way.load(self._engine) if isinstance(self._way, Ours) else None

    def admit(self, request: Decoding) -> None:
        """Queue a request; `request.admitted` is called when it has memory."""
        tpot_s = self._tiers[request.tier].tpot_s
        most = self.kv_tokens - request.prompt_tokens
        asked = PressedRequest(
            request.name,
            request.tier,
            self._loop.now_s,
            request.prompt_tokens,
            request.output_tokens,
            most,
            tpot_s=tpot_s,
        )
        stream = self._engine.arrives(asked)
        self._streams[request], self._decodings[stream] = stream, request
        self._wake()

    def withdraw(self, request: Decoding) -> None:
        """Forget a request that has not joined: its KV will not come."""
        request.gone = True
        stream = self._streams.pop(request)
        self._account()
        self._engine.withdraw(stream)
        del self._decodings[stream]
        self._wake()

    def join(self, request: Decoding) -> None:
        """The KV of an admitted request is there; it takes part from the next step on."""
        self._engine.pulled(self._streams[request])
        self._engine.added_s += request.compute_s
        self._wake()

    def _pull(self, stream: PressedStream) -> None:
        request = self._decodings[stream]
        request.holds_memory = True
        # After the step that is being composed, which it is not part of.
        self._loop.call_at(self._loop.now_s, self._admitted, request)

    def _admitted(self, request: Decoding) -> None:
        if not request.gone:
            request.admitted()

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_at(self._loop.now_s, self._turn)

    def _turn(self) -> None:
        """Between two steps: some have ended, others start."""
        engine = self._engine
        ended, engine.done = engine.done, []
        for stream in ended:
            request = self._decodings.pop(stream)
            del self._streams[request]
            request.first_token_s, request.last_token_s = stream.token_s[0], stream.token_s[-1]
            request.holds_memory = False
            self.tokens += stream.emitted
            request.ended(request)
        self._account()
        engine.now_s = self._loop.now_s
        self._is_busy = engine.step()
        for stream in engine.waiting:
            if stream.parked_s is None and stream not in self._have_waited:
                self._have_waited.add(stream)
                self.waited += 1
        if self._is_busy:
            self._loop.call_at(engine.now_s, self._turn)

    def _account(self) -> None:
        held = self._engine.setup.blocks - self._engine.free_blocks
        now_s = self._loop.now_s
        self.reserved_token_s += held * self._engine.setup.block_tokens * (now_s - self._since_s)
        self._since_s = now_s
