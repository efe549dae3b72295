"""The work of the operators of a decoder layer: multiplications per token on this rank.

Reads sizes, not weights: vLLM repacks those for some devices and leaves them empty. Norms, rotations and
activations are left out, they are small beside the matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

REFERENCE_TOKENS: Final = 4096
"""The prompt length at which attention, whose work per token grows with it, is weighed."""
_SIZES: Final = (
    ("input_size_per_partition", "output_size_per_partition"),
    ("input_size", "output_size"),
    ("in_features", "out_features"),
)


def work(module: nn.Module) -> float:
    """Multiplications per token of everything in `module`; 0 where nothing is known."""
    own = _own_work(module)
    return own or sum(work(part) for part in module.children())


def _own_work(module: Any) -> float:
    """Of an operator as a whole; 0 for a module that only has parts."""
    if hasattr(module, "get_kv_cache_spec"):
        # Two products of a token with half the prompt on average.
        return float(getattr(module, "num_heads", 0) * getattr(module, "head_size", 0) * REFERENCE_TOKENS)
    if (experts := getattr(module, "moe_config", None)) is not None:
        inner = experts.intermediate_size_per_partition
        return float(3 * experts.experts_per_token * experts.hidden_dim * inner)
    for rows, columns in _SIZES:
        if hasattr(module, rows) and hasattr(module, columns):
            return float(getattr(module, rows) * getattr(module, columns))
    return 0.0
