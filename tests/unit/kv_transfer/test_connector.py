"""The thread that computes keeps its cores; what transfers gets the last one."""

import os
import threading

import psutil
import pytest

from kv_transfer.connector import NixlConnector, transfer_threads_apart
from telemetry.pressure import PRESSURE_KEY


@pytest.fixture
def on_one_core():
    """Run the test's thread on the first of the usable cores."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    yield {min(usable)}
    os.sched_setaffinity(0, usable)


def affinity_of_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_started_within_are_on_the_last_core_and_the_caller_is_back(on_one_core):
    with transfer_threads_apart():
        assert affinity_of_a_new_thread() == {max(psutil.Process(os.getppid()).cpu_affinity())}
    assert os.sched_getaffinity(0) == on_one_core


def test_wherever_the_caller_was_moved_it_is_back(on_one_core):
    def move():
        with transfer_threads_apart():
            os.sched_setaffinity(0, psutil.Process(os.getppid()).cpu_affinity())
            raise InterruptedError

    with pytest.raises(InterruptedError):
        move()
    assert os.sched_getaffinity(0) == on_one_core


def test_vllms_loggers_get_along_with_the_statistics_that_travel_with_the_transfers():
    nothing = NixlConnector.build_kv_connector_stats().data
    ours = {**nothing, PRESSURE_KEY: {"skipped": 3}}
    transfer = {name: [1] for name in nothing}
    total = NixlConnector.build_kv_connector_stats(ours)
    assert total.is_empty()
    for step in (ours, {**transfer, PRESSURE_KEY: {"skipped": 1}}, transfer):
        total = total.aggregate(NixlConnector.build_kv_connector_stats(step))
    assert total.data == {name: [1, 1] for name in nothing}
