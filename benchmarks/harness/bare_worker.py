"""Boundaries that can be taken out of a prefill worker and put back, to measure what they cost."""

from __future__ import annotations

from typing import Any

import torch

from prefill_node.worker.boundary import decoder_layers

_Worker: Any
if torch.cuda.is_available():
    from prefill_node.worker.cuda import PreemptibleGPUWorker as _Worker
else:
    from prefill_node.worker.cpu import PreemptibleCPUWorker as _Worker


class BareableWorker(_Worker):
    """The prefill worker of this machine; runs with its boundaries, or as the same engine without them."""

    _wrapped: tuple[tuple[Any, Any], ...] = ()
    _support: Any = None

    def load_model(self, **kwargs: Any) -> None:
        """Remember what was wrapped."""
        super().load_model(**kwargs)
        self._support = self._preemption
        modules = [
            part for layer in decoder_layers(self.model_runner.get_model()) for part in layer.modules()
        ]
        self._wrapped = tuple(
            (part, part.__dict__["forward"]) for part in modules if "forward" in part.__dict__
        )

    def with_boundaries(self, on: bool) -> int:  # noqa: FBT001 - called through RPC
        """Put the wrappers in or take them out; returns how many there are."""
        for module, forward in self._wrapped:
            if on:
                module.forward = forward
            else:
                module.__dict__.pop("forward", None)
        self._preemption = self._support if on else None
        return len(self._wrapped)
