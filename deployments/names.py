"""The names of the application's deployments, by which the builder makes them and commands find them."""

from __future__ import annotations

from typing import Final

INGRESS_NAME: Final = "Ingress"
ROUTER_NAME: Final = "Router"
PREFILL_PREFIX: Final = "Prefill:"
"""The names of the prefill deployments begin with this."""
DECODE_PREFIX: Final = "Decode:"
"""The names of the decode deployments begin with this."""
