"""Speculation on a CPU: draft tokens are sampled with their requests' parameters.

vLLM's function for it (`_expand_kernel_impl` of `utils/cpu_triton_utils.py`) fills a copy of the tensor, so
that temperatures, `top_k` and `top_p` of draft tokens are whatever memory held. Greedy requests read none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.sample import rejection_sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def give_parameters() -> None:
    """Have vLLM's rejection sampler give each draft token its request's parameters.

    To be called once the model runner is there, which sets vLLM's own.
    """
    rejection_sampler.expand_kernel = _OverGrid()


class _OverGrid:
    """Called as a Triton kernel is: with a grid first."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return _expand


def _expand(
    expanded: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int,  # noqa: ARG001, N803 - vLLM's argument, for Triton's compiler
) -> None:
    """Write each request's value, or what replaces it, for each of its draft tokens.

    Args:
        expanded: To be written; one for each draft token.
        values: One for each request.
        ends: Draft tokens up to and including each request, as a running sum.
        replace_from: A value that is replaced.
        replace_to: By this one.
        MAX_NUM_TOKENS: Not needed here.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    expanded.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))
