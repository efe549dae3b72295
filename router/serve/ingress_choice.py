"""Sends each call of Serve's proxies to the less busy of two ingresses, whatever model its client names.

Runs in the proxies, which may have none of the application's code: imports nothing but Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest


class AnyIngress(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc] # Ray ships no types for it
    """Serve's own choice, without the id of a multiplexed model, which any client may send in a header.

    Serve would keep every such id, and with it the whole request, in each proxy for good.
    """

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        # Before this a request is in no index, and no task has chosen for it.
        pending_request.metadata.multiplexed_model_id = ""
        super()._add_pending_request_to_indices(pending_request)
