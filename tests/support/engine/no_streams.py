"""PyTorch's names for the streams and events of a GPU, for a worker on a CPU that is told to use them.

Importing it changes PyTorch; vLLM imports it in a worker's process, as its `worker_extension_cls`.
"""

from contextlib import nullcontext

import torch

recorded = []


class Event:
    """Has happened when it is recorded, as everything on a CPU has."""

    def __init__(self, **options):
        pass

    def record(self):
        recorded.append(self)

    def synchronize(self):
        pass


class Stream:
    device = torch.device("cpu")

    def wait_stream(self, other):
        pass


class NoStreams:
    def recorded(self):
        """How many events were."""
        return len(recorded)


torch.cuda.Event, torch.cuda.Stream, torch.cuda.current_stream = Event, Stream, Stream
torch.cuda.stream = nullcontext
