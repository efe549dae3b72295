"""Keeps the tokens that one request may generate from being those of another in its batch.

vLLM 0.29 keeps `allowed_token_ids` as a mask with a row for each place in the first model runner's batch. It
leaves the row of a request that has moved to another place, and writes one row over both when two requests
change places; whoever is there next is held to tokens that it never named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def keep_masks_right(batch: Any, requests: Mapping[str, Any]) -> None:
    """Have a batch write the rows of its mask anew where vLLM leaves them wrong.

    Args:
        batch: vLLM's `InputBatch`.
        requests: Its requests' `CachedRequestState`, by their ids.
    """
    take_in, swap = batch.add_request, batch.swap_states

    def add_request(state: Any) -> int:
        index = int(take_in(state))
        _write(batch, index, state)
        return index

    def swap_states(one: int, other: int) -> None:
        swap(one, other)
        for index in (one, other):
            _write(batch, index, requests[batch.req_ids[index]])

    batch.add_request, batch.swap_states = add_request, swap_states


def _write(batch: Any, index: int, state: Any) -> None:
    mask = batch.allowed_token_ids_mask_cpu_tensor
    if mask is None:
        return
    allowed = None if state.sampling_params is None else state.sampling_params.allowed_token_ids
    mask[index] = bool(allowed)  # true is forbidden
    if allowed:
        mask[index][allowed] = False
