"""Keeps a budget of thinking from having an answer searched from its beginning at each of its tokens.

vLLM 0.29's first model runner looks for where thinking begins and ends in all that was generated since it
last ended: in Python, token by token, at each step until it has found both.
"""

from __future__ import annotations

from typing import Any, Final

_PLACEHOLDER: Final = -1
"""vLLM's, in the place of a token that is not known yet."""


class _Searched(int):
    """Where a search begins as what is before it was searched, if that is later than where vLLM begins it."""

    vllms: int


def look_at_what_is_new(holder: Any) -> None:
    """Have what was searched searched no more.

    Args:
        holder: vLLM's `ThinkingBudgetStateHolder`.
    """
    update = holder.update_state
    overlap = max(len(holder.think_start_token_ids), len(holder.think_end_token_ids)) - 1

    def update_state(*rows: Any, **options: Any) -> None:
        update(*rows, **options)
        for state in holder._state.values():  # noqa: SLF001 - each has where its search begins
            begun = state["scan_offset"]
            vllms = begun.vllms if isinstance(begun, _Searched) else begun
            # less than before where vLLM has cut tokens off, which are generated again
            searched = _known(state["output_tok_ids"]) - overlap
            state["scan_offset"] = _Searched(max(vllms, searched))
            state["scan_offset"].vllms = vllms

    holder.update_state = update_state


def _known(token_ids: list[int]) -> int:
    count = len(token_ids)
    while count and token_ids[count - 1] == _PLACEHOLDER:
        count -= 1
    return count
