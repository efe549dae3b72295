"""Calls of Serve's own whose replicas are played."""

import asyncio
from concurrent.futures import Future

from ray.serve.handle import DeploymentResponseGenerator


def call_until(accepted):
    """A call that is accepted when this future has what the replica answers with, and cancels.

    A future of threads is that of a router that has a loop of its own.
    """
    return DeploymentResponseGenerator(
        accepted, None, _is_router_running_in_separate_loop=isinstance(accepted, Future)
    )


def call_of(result):
    """A call that a replica has accepted, which answers with `result`."""
    accepted = asyncio.get_running_loop().create_future()
    accepted.set_result(result)
    return call_until(accepted)
