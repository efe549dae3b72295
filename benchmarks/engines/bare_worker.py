"""The CPU's prefill worker, whose boundaries can be taken out and put back."""

from benchmarks.engines.bareable import Bareable
from prefill_node.worker.cpu import PreemptibleCPUWorker


class BareableCPUWorker(Bareable, PreemptibleCPUWorker):
    """Runs with its boundaries, or as the same engine without them."""
