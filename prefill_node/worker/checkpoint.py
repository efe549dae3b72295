"""What is kept of a forward pass that was stopped: the tensors that enter its next boundary.

Owns the rows of a checkpoint and its size. Does not decide when one is taken or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import torch

Rows: TypeAlias = "tuple[tuple[str, int], ...]"
"""(request id, tokens) of each request of a step, in the order of the batch; its rows are contiguous."""


class Kept(Protocol):
    """A checkpoint, wherever it lies."""

    @property
    def boundary(self) -> int:
        """Where it goes on."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it keeps alive beside KV blocks."""

    def select(self, rows: Rows) -> Checkpoint | None:
        """See `Checkpoint.select`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A forward pass up to a boundary.

    Attributes:
        boundary: Where it goes on.
        rows: Whose hidden states the rows are.
        entering: What the decoder layer before the boundary's layer returned: any nesting of tuples of
            tensors, each of shape [tokens, …]; None at the first layer.
        replies: What the submodules of the boundary's own layer have returned so far, in order of call; all
            but the last, and then also `entering`, are `hollow`. Empty at a layer's entry.
        height: Rows of its tensors in a compiled pass, with those that only pad; 0 for an eager one.
    """

    boundary: int
    rows: Rows
    entering: Any
    replies: tuple[Any, ...] = ()
    height: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that it keeps alive; tensors that share memory count once."""
        storages = [tensor.untyped_storage() for tensor in self.tensors() if not tensor.is_meta]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def bytes_per_token(self) -> float:
        """What its tensors hold for each of its rows."""
        held_bytes = sum(tensor.nbytes for tensor in self.tensors() if not tensor.is_meta)
        return float(held_bytes / sum(tokens for _, tokens in self.rows))

    def tensors(self) -> list[torch.Tensor]:
        """Its tensors, the hollow ones too, always in the same order."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        map_tensors((self.entering, self.replies), note)
        return found

    def select(self, rows: Rows) -> Checkpoint | None:
        """The checkpoint of those `rows` only, in their order; None when it does not hold them all.

        Rows of requests that are gone are left out; their order may differ from that of the checkpoint.
        """
        if rows == self.rows:
            return self
        held = dict(self.rows)
        if any(held.get(request) != tokens for request, tokens in rows):
            return None
        ends = accumulate(tokens for _, tokens in self.rows)
        spans = {request: (end - tokens, end) for (request, tokens), end in zip(self.rows, ends, strict=True)}
        total = sum(tokens for _, tokens in self.rows)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.numel():  # holds nothing; by it a compiled pass keeps its operators in order
                return tensor
            if tensor.dim() == 0 or tensor.shape[0] != total:
                raise _NotRowsError
            return torch.cat([tensor[slice(*spans[request])] for request, _ in rows])

        try:
            return replace(
                self,
                rows=rows,
                entering=map_tensors(self.entering, pick),
                replies=map_tensors(self.replies, pick),
                height=sum(tokens for _, tokens in rows) if self.height else 0,
            )
        except _NotRowsError:
            return None


class _NotRowsError(Exception):
    """A tensor is not laid out by token."""


def hollow(value: Any) -> Any:
    """The same nesting with tensors of the same shapes that hold nothing; whoever computes with one fails."""
    return map_tensors(value, lambda tensor: torch.empty_like(tensor, device="meta"))


def map_tensors(value: Any, apply: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting of tuples and lists with `apply` on each tensor."""
    if isinstance(value, torch.Tensor):
        return apply(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(item, apply) for item in value)
    if isinstance(value, list):
        return [map_tensors(item, apply) for item in value]
    return value
