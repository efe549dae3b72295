"""Calls of Serve's own whose replicas are played."""

import asyncio

from ray.serve.handle import DeploymentResponseGenerator


def call_until(accepted):
    """A call that is accepted when this future has what the replica answers with, and cancels."""
    return DeploymentResponseGenerator(accepted, None, _is_router_running_in_separate_loop=False)


def call_of(result):
    """A call that a replica has accepted, which answers with `result`."""
    accepted = asyncio.get_running_loop().create_future()
    accepted.set_result(result)
    return call_until(accepted)
