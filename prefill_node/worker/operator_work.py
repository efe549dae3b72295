"""The work of the operators of a decoder layer: multiplications on this rank, per token and per pair.

Reads sizes, not weights: vLLM repacks those for some devices and leaves them empty. Norms, rotations and
activations are left out, they are small beside the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

_SIZES: Final = (
    ("input_size_per_partition", "output_size_per_partition"),
    ("input_size", "output_size"),
    ("in_features", "out_features"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplications.

    Attributes:
        per_token: Those of the matrices, and of attention to a window, which is as large for every token.
        per_pair: Those of attention, for each pair of a query and a key.
    """

    per_token: float = 0.0
    per_pair: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Of both."""
        return Work(self.per_token + other.per_token, self.per_pair + other.per_pair)

    def __sub__(self, other: Work) -> Work:
        """Of one without the other, which is a part of it."""
        return Work(self.per_token - other.per_token, self.per_pair - other.per_pair)


def work(module: nn.Module) -> Work:
    """That of everything in `module`; none where nothing is known."""
    own = _own_work(module)
    return own if own != Work() else sum(map(work, module.children()), start=Work())


def _own_work(module: Any) -> Work:
    """Of an operator as a whole; none for a module that only has parts."""
    if hasattr(module, "get_kv_cache_spec"):
        # Two products for each pair.
        per_pair = 2.0 * getattr(module, "num_heads", 0) * getattr(module, "head_size", 0)
        window = getattr(module, "sliding_window", None)
        return Work(per_token=per_pair * window) if window else Work(per_pair=per_pair)
    if (experts := getattr(module, "moe_config", None)) is not None:
        inner = experts.intermediate_size_per_partition
        return Work(3.0 * experts.experts_per_token * experts.hidden_dim * inner)
    for rows, columns in _SIZES:
        if hasattr(module, rows) and hasattr(module, columns):
            return Work(float(getattr(module, rows) * getattr(module, columns)))
    return Work()
