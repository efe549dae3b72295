"""A watch of a replica's board that shows what a test says."""

from types import SimpleNamespace

from prefill_node.replica.preemption_controller import Watch


class PlayedWatch(SimpleNamespace):
    """As much of it as is given, and what follows from that."""

    told = Watch.told
