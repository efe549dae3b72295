"""How far the host runs ahead of the device, on a device whose clock is the test's."""

from dataclasses import dataclass, field

import pytest

from prefill_node.worker.launch_ahead import EventBound, HostOnly

KERNEL_S = 1.0


@dataclass
class Device:
    """Runs what is launched in order, one after the other; `now_s` is the host's time."""

    now_s: float = 0.0
    free_at_s: float = 0.0
    starved_s: float = 0.0
    ends_s: list = field(default_factory=list)
    events: list = field(default_factory=list)
    waits: int = 0

    def launch(self, seconds):
        if self.ends_s:
            self.starved_s += max(0.0, self.now_s - self.free_at_s)
        self.free_at_s = max(self.free_at_s, self.now_s) + seconds
        self.ends_s.append(self.free_at_s)

    @property
    def unfinished(self):
        return sum(end_s > self.now_s for end_s in self.ends_s)

    def new_event(self):
        self.events.append(Event(self))
        return self.events[-1]


@dataclass
class Event:
    device: Device
    passed_at_s: float | None = None

    def record(self):
        self.passed_at_s = max(self.device.free_at_s, self.device.now_s)

    def synchronize(self):
        assert self.passed_at_s is not None, "waits for a mark that was never set"
        self.device.waits += 1
        self.device.now_s = max(self.device.now_s, self.passed_at_s)


def run(device, bound, boundaries=20, host_s=0.01):
    """A forward pass; how much was launched and not finished at each boundary."""
    bound.start()
    unfinished = []
    for _ in range(boundaries):
        bound.reach()
        unfinished.append(device.unfinished)
        device.now_s += host_s
        device.launch(KERNEL_S)
    return unfinished


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("host_s", [0.0, 0.01, 0.9])
def test_a_fast_host_is_held_at_its_depth_and_the_device_never_starves(depth, host_s):
    device = Device()
    unfinished = run(device, EventBound(depth, device.new_event), boundaries=100, host_s=host_s)
    assert max(unfinished) == depth
    assert device.starved_s == 0.0


def test_a_slow_host_is_not_held_up():
    device = Device()
    run(device, EventBound(2, device.new_event), host_s=3.0)
    assert device.now_s == pytest.approx(20 * 3.0)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_first_boundaries_up_to_the_depth_wait_for_nothing(depth):
    device = Device()
    bound = EventBound(depth, device.new_event)
    run(device, bound, boundaries=depth)
    assert device.waits == 0
    bound.reach()
    assert device.waits == 1


def test_a_new_pass_does_not_wait_for_the_marks_of_the_last():
    device = Device()
    bound = EventBound(3, device.new_event)
    run(device, bound)
    device.waits = 0
    run(device, bound, boundaries=3)
    assert device.waits == 0


def test_a_pass_that_was_stopped_leaves_nothing_behind():
    device = Device()
    bound = EventBound(2, device.new_event)
    run(device, bound, boundaries=3)
    assert max(run(device, bound)[2:]) == 2
    assert device.starved_s == 0.0


def test_it_makes_as_many_events_as_it_needs_once():
    device = Device()
    bound = EventBound(4, device.new_event)
    for _ in range(3):
        run(device, bound)
    assert len(device.events) == 4


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_that_would_starve_the_device_is_refused(depth):
    device = Device()
    with pytest.raises(ValueError, match=f"at least 1, not {depth}"):
        EventBound(depth, device.new_event)


def test_a_host_that_computes_itself_never_waits():
    device = Device()
    assert run(device, HostOnly(), boundaries=5) == [0, 1, 2, 3, 4], "as here nothing bounds it"
    assert device.waits == 0
