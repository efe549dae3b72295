"""A Ray Serve application that does nothing: a deployment for each name, handles to the others, an actor.

python -m benchmarks.engines.embedded.empty_application NAME...
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from ray import serve

from benchmarks.harness.ray_application import until_stopped


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Idle:
    """Has handles of others and is asked for nothing."""

    def __init__(self, *others: Any) -> None:
        self._others = others


def main() -> None:
    """Run it until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="of a deployment; the first has handles of the others"
    )
    first, *others = parser.parse_args().names
    with until_stopped(log_to_driver=False):
        serve.start(proxy_location="Disabled")
        behind = [Idle.options(name=name).bind() for name in others]
        serve.run(Idle.options(name=first).bind(*behind), route_prefix=None)
        actor = ray.remote(num_cpus=0)(type("Idle", (), {"up": lambda _: True})).remote()
        ray.get(actor.up.remote())


if __name__ == "__main__":
    main()
