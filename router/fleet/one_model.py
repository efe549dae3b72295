"""Which replicas can work on one request while two models of one name are served, as during an upgrade."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from router.fleet.decode_replica import DecodeView
from router.fleet.prefill_replica import PrefillView
from slo.model_digest import UNTOLD, ModelDigest, is_same_model

_Replica = TypeVar("_Replica", PrefillView, DecodeView)


def of_model(replicas: Iterable[_Replica], digest: ModelDigest) -> list[_Replica]:
    """Those that serve a model."""
    return [one for one in replicas if is_same_model(one.digest, digest)]


def with_partner(
    replicas: list[_Replica], others: Iterable[PrefillView] | Iterable[DecodeView]
) -> list[_Replica]:
    """Those of one tier that serve the model of one of the other's."""
    served = {one.digest for one in others}
    if UNTOLD in served:
        return replicas
    return [one for one in replicas if served and (one.digest in served or one.digest == UNTOLD)]
