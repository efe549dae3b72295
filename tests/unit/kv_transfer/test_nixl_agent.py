"""Real NIXL agents: how much they take when idle, and that they transfer at once all the same."""

import sys
import time
import uuid

import psutil
import pytest
import torch
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

from kv_transfer.nixl_agent import NixlChangedError, sleeping_progress_threads

BINDINGS = sys.modules[NixlWrapper.__module__].nixlBind


def agent():
    return NixlWrapper(str(uuid.uuid4()), nixl_agent_config(num_threads=4, capture_telemetry=True))


def busy_cores(seconds=1.0):
    """Cores that this process keeps busy."""
    before = psutil.Process().cpu_times()
    time.sleep(seconds)
    after = psutil.Process().cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


def test_an_idle_agent_takes_no_core():
    without = busy_cores()
    with sleeping_progress_threads():
        kept = agent()
    assert busy_cores() - without < 0.2, kept


def test_a_sleeping_agent_answers_a_read_at_once():
    source = torch.arange(1 << 18, dtype=torch.float32)
    target = torch.zeros_like(source)
    with sleeping_progress_threads():
        producer, consumer = agent(), agent()
    for end, tensor in ((producer, source), (consumer, target)):
        end.register_memory(end.get_reg_descs([tensor]))
    name = consumer.add_remote_agent(producer.get_agent_metadata())
    descriptors = [end.get_xfer_descs([tensor]) for end, tensor in ((consumer, target), (producer, source))]
    time.sleep(0.5)  # both threads are asleep
    started_s = time.monotonic()
    handle = consumer.initialize_xfer("READ", *descriptors, name)
    state = consumer.transfer(handle)
    while state == "PROC" and time.monotonic() < started_s + 10:
        state = consumer.check_xfer_state(handle)
    assert state == "DONE"
    assert time.monotonic() - started_s < 1.0
    assert torch.equal(source, target)
    consumer.release_xfer_handle(handle)


def test_nixl_is_as_it_was_afterwards():
    original = BINDINGS.nixlAgent

    def fail():
        with sleeping_progress_threads():
            assert BINDINGS.nixlAgent is not original
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    assert BINDINGS.nixlAgent is original


def test_another_nixl_is_refused_with_words(monkeypatch):
    monkeypatch.delattr(BINDINGS, "nixlAgent")
    with pytest.raises(NixlChangedError, match=r"nixl==1\.3\.2"), sleeping_progress_threads():
        pass
