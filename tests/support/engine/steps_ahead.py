"""vLLM's asynchronous scheduling on a CPU, where vLLM turns it off: a step is composed while one runs.

The worker finds streams and events of a GPU that do nothing; all else is vLLM's own code for a GPU.
"""

from contextlib import contextmanager
from unittest import mock

from vllm.config.scheduler import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs

from decode_node.carrying import ASYNC_SCHEDULER as OF_DECODE
from prefill_node.replica.engine import ASYNC_SCHEDULER as OF_PREFILL


class AheadConfig(SchedulerConfig):
    """Stays on, whatever the platform says, in every process that gets it."""

    def __setattr__(self, name, value):
        super().__setattr__(name, True if name == "async_scheduling" else value)


@contextmanager
def steps_ahead_on_cpu():
    """Engines that start meanwhile with one of our asynchronous schedulers have it on."""
    create = EngineArgs.create_engine_config

    def ahead(arguments, *args, **kwargs):
        config = create(arguments, *args, **kwargs)
        if config.scheduler_config.scheduler_cls in (OF_DECODE, OF_PREFILL):
            config.scheduler_config.__class__ = AheadConfig
            config.scheduler_config.async_scheduling = True
            config.parallel_config.worker_extension_cls = "no_streams.NoStreams"
        return config

    with mock.patch.object(EngineArgs, "create_engine_config", ahead):
        yield
