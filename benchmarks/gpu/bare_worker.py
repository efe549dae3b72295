"""The GPU's prefill worker, whose boundaries can be taken out and put back."""

from benchmarks.engines.bareable import Bareable
from prefill_node.worker.cuda import PreemptibleGPUWorker


class BareableGPUWorker(Bareable, PreemptibleGPUWorker):
    """Runs with its boundaries, or as the same engine without them."""
