"""What tells a model from another one of the same name, while that replaces it.

Owns the comparison. What a digest is made of is `deployments.models.digest`'s.
"""

from __future__ import annotations

from typing import Final, NewType

ModelDigest = NewType("ModelDigest", str)
"""Replicas that have the same one have the same weights, and compute the same KV cache and tokens."""
UNTOLD: Final = ModelDigest("")
"""Where nobody says which model it is; that is no other than any."""
OTHER_MODEL: Final = "other_model"
"""Type of the error that a replica answers with which is to go on from what another model has computed, or to
compute what another one goes on from, or what the configuration of who asks allows and its own does not."""


def is_same_model(one: ModelDigest, other: ModelDigest) -> bool:
    """Whether nothing says that they are two models."""
    return one == other or UNTOLD in (one, other)
