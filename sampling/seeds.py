"""Seeded sampling that a request can take up in the middle, and that a chunk of a prompt does not disturb.

vLLM draws once for each token from a request's own generator. It draws for a prompt's chunks too, whose
tokens it throws away, and takes those draws back by moving the generator's offset, which PyTorch's generators
on CPU do not have. There a draw takes a millisecond and more, so that thousands of them, which another engine
has made, would stall the step: the generator is brought forward without drawing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from sampling.mersenne_twister import WORDS, ahead

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DRAWN: Final = 32
"""So many draws are made, which takes no longer than doing without them."""
_STATE: Final = np.dtype(
    [
        ("seed", "<u8"),
        ("left", "<i4"),
        ("is_seeded", "<i4"),
        ("next", "<u8"),
        ("words", "<u8", WORDS),
        ("normals", "V40"),
    ]
)
"""Of a generator on CPU, as PyTorch gives it (`CPUGeneratorImplState`)."""


class Draw(NamedTuple):
    """What vLLM's sampler draws for a token: so many numbers, of this type and there."""

    numbers: int
    dtype: torch.dtype
    device: torch.device

    def make(self, generator: torch.Generator) -> None:
        """Draw, for nothing."""
        torch.empty(self.numbers, dtype=self.dtype, device=self.device).exponential_(generator=generator)


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


def take_up(state: Any, carried: int, draw: Draw) -> None:
    """Prepare a request's generator for its next token; called whenever vLLM's batch takes the request in.

    Args:
        state: vLLM's `CachedRequestState`; nobody has drawn from its generator when `carried` is given.
        carried: Tokens that another engine has drawn with the same seed since the last call.
        draw: What the engine draws for each token.
    """
    if state.generator is None:
        return
    on_cpu = draw.device.type == "cpu"
    if on_cpu and not isinstance(state.generator, RewindableGenerator):
        state.generator = RewindableGenerator(draw.device)
        state.generator.manual_seed(state.sampling_params.seed)
    if carried <= _DRAWN or not on_cpu or not _skip(state.generator, carried, draw):
        for _ in range(carried):
            draw.make(state.generator)
    if isinstance(state.generator, RewindableGenerator):
        state.generator.keep()


def _skip(generator: torch.Generator, draws: int, draw: Draw) -> bool:
    """Bring a generator on CPU to where so many draws would; False, and nothing, where nobody knows how."""
    outputs = _outputs_of_a_draw(draw)
    if outputs is None:
        return False
    generator.set_state(torch.from_numpy(_later(generator.get_state().numpy(), draws * outputs)))
    return True


@lru_cache(maxsize=8)
def _outputs_of_a_draw(draw: Draw) -> int | None:
    """How many outputs of 32 bits a draw takes from a generator on CPU, by trying; None for another number.

    PyTorch's own kernel takes 64 bits for each entry; its kernels for one maker's CPUs take other numbers.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    before = generator.get_state().numpy()
    if before.nbytes != _STATE.itemsize:
        return None
    draw.make(generator)
    after = generator.get_state().numpy()
    tried = (2 * draw.numbers, draw.numbers, 1)
    return next((outputs for outputs in tried if np.array_equal(_later(before, outputs), after)), None)


def _later(state: NDArray[np.uint8], outputs: int) -> NDArray[np.uint8]:
    """The state of a generator on CPU after so many outputs of 32 bits, one at least."""
    later = state.copy()
    (fields,) = later.view(_STATE)
    used = int(fields["next"]) or WORDS  # one that has just been seeded makes new words first
    words, used = ahead(fields["words"].astype(np.uint32), used, outputs)
    fields["words"], fields["next"], fields["left"] = words, used, 1 + WORDS - used
    return later
