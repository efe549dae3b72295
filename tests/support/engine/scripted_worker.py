"""A prefill worker that stops where a test says, and shows its KV cache."""

from __future__ import annotations

import hashlib
import time

import torch

from prefill_node.worker.cpu import PreemptibleCPUWorker


class Scripted:
    """Stands between the forward pass and the board: orders stops itself, on the first rank only."""

    def __init__(self, board, rank):
        self._board = board
        self._rank = rank
        self.stops = []
        self.trace = []
        self.on_reach = None
        self._target = 0

    def reach(self, rank, step_id, boundary):
        self._board.reach(rank, step_id, boundary)
        self.trace.append((step_id, boundary))
        if self.on_reach is not None:
            self.on_reach(self._rank, boundary)
        if self._rank == 0 and self.stops and self.stops[0] == boundary:
            self.stops.pop(0)
            self._target = step_id

    def is_target(self, step_id):
        return self._target == step_id

    def __getattr__(self, name):
        return getattr(self._board, name)


class ScriptedCPUWorker(PreemptibleCPUWorker):
    """What the engine tests give vLLM as `worker_cls`."""

    def load_model(self, **kwargs):
        super().load_model(**kwargs)
        self.script = None
        if self._preemption is not None:
            forward = self._preemption.forward
            forward.signal = self.script = Scripted(forward.signal, forward.rank)

    def runner(self):
        """The module of vLLM's model runner that runs here."""
        return type(self.model_runner).__module__

    def stop_at(self, boundaries):
        """Stop the forward pass that reaches the first of these next, then the second, and so on."""
        self.script.stops = list(boundaries)
        self.script.trace.clear()

    def stops_left(self):
        return len(self.script.stops)

    def trace(self):
        """(step, boundary) of each boundary that was reached since the last script."""
        return list(self.script.trace)

    def fail_at(self, boundary):
        """Have a layer raise, as a bug in a model would."""

        def fail(_, reached):
            if reached == boundary:
                raise ValueError("a layer failed")

        self.script.on_reach = fail

    def stay_away(self, rank, boundary, seconds):
        """Have one rank come late to a vote."""

        def stall(own, reached):
            if own == rank and reached == boundary:
                time.sleep(seconds)

        self.script.on_reach = stall

    def clear_kv(self):
        """Zero all KV blocks, so that what a request has not written is the same in every run."""
        for cache in self._caches():
            cache.zero_()

    def kv_digest(self, blocks):
        """SHA-256 of some KV blocks, in their order, over all layers."""
        digest = hashlib.sha256()
        for cache in self._caches():
            digest.update(cache[blocks].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _caches(self):
        """A tensor for each layer; a layer with a recurrent state has several."""
        for cache in self.model_runner.kv_caches:
            yield from [cache] if isinstance(cache, torch.Tensor) else cache
