"""Seeded sampling that a request can take up in the middle, and that a chunk of a prompt does not disturb.

vLLM draws once for each token from a request's own generator. It draws for a prompt's chunks too, whose
tokens it throws away, and takes those draws back by moving the generator's offset, which PyTorch's generators
on CPU do not have.
"""

from __future__ import annotations

from typing import Any

import torch


class RewindableGenerator(torch.Generator):  # type: ignore[misc] # mypy does not follow PyTorch
    """A generator on CPU whose last draw vLLM can take back.

    A token that is thrown away follows `keep` or another such token, never one that counts: vLLM throws
    tokens away while it computes a prompt, and takes a request that lost its memory into the batch again
    before it computes the prompt again.
    """

    _kept: torch.Tensor

    def keep(self) -> None:
        """Remember the state: draws are taken back to here."""
        self._kept = self.get_state()

    def get_offset(self) -> int:
        """What vLLM subtracts from; generators on CPU count nothing."""
        return 0

    def set_offset(self, offset: int) -> None:  # noqa: ARG002 - PyTorch's interface
        """Take back what was drawn since `keep`."""
        self.set_state(self._kept)


def take_up(state: Any, carried: int, vocabulary: int, device: torch.device) -> None:
    """Prepare a request's generator for its next token; called whenever vLLM's batch takes the request in.

    Args:
        state: vLLM's `CachedRequestState`; nobody has drawn from its generator when `carried` is given.
        carried: Tokens that another engine has drawn with the same seed since the last call.
        vocabulary: Width of one draw.
        device: Where vLLM samples.
    """
    if state.generator is None:
        return
    if device.type == "cpu" and not isinstance(state.generator, RewindableGenerator):
        state.generator = RewindableGenerator(device)
        state.generator.manual_seed(state.sampling_params.seed)
    for _ in range(carried):
        torch.empty(vocabulary, dtype=torch.float32, device=device).exponential_(generator=state.generator)
    if isinstance(state.generator, RewindableGenerator):
        state.generator.keep()
