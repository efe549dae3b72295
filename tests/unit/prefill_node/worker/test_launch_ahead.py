"""How far the host runs ahead of the device, on a device whose clock is the test's."""

from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.worker.launch_ahead import HostOnly, TimeBound

AHEAD_S = 2.0
NEVER_S = 1e-9


@dataclass
class Device:
    """Runs what is launched in order, one after the other; `now_s` is the host's time."""

    now_s: float = 0.0
    free_at_s: float = 0.0
    starved_s: float = 0.0
    launched: bool = False
    events: list = field(default_factory=list)
    waits: int = 0

    def launch(self, seconds):
        if self.launched:
            self.starved_s += max(0.0, self.now_s - self.free_at_s)
        self.launched = True
        self.free_at_s = max(self.free_at_s, self.now_s) + seconds

    @property
    def left_s(self):
        """What is launched and not done."""
        return max(0.0, self.free_at_s - self.now_s)

    def new_event(self):
        self.events.append(Event(self))
        return self.events[-1]

    def sleep(self, seconds):
        self.now_s += seconds

    def bound(self, ahead_s=AHEAD_S):
        return TimeBound(ahead_s, self.new_event, clock=lambda: self.now_s, sleep=self.sleep)


@dataclass
class Event:
    device: Device
    passed_at_s: float | None = None

    def record(self):
        self.passed_at_s = max(self.device.free_at_s, self.device.now_s)

    def query(self):
        return self.device.now_s >= self.passed_at_s

    def synchronize(self):
        assert self.passed_at_s is not None, "waits for a mark that was never set"
        self.device.waits += 1
        self.device.now_s = max(self.device.now_s, self.passed_at_s)


def run(device, bound, stretches, host_s=0.0, predicted=None, first=0):
    """A forward pass; what was launched and not done when the host went on at each boundary, seconds."""
    *at_s, _ = accumulate(stretches if predicted is None else predicted, initial=0.0)
    bound.start(at_s)
    left = []
    for boundary in range(first, len(stretches)):
        bound.reach(boundary)
        left.append(device.left_s)
        device.now_s += host_s
        device.launch(stretches[boundary])
    return left


lengths = st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.9, 2.1, 8.0]), min_size=2, max_size=40).filter(
    lambda found: sum(found[:-1]) > 0
)


@given(lengths)
def test_no_more_is_launched_than_the_bound_however_unequal_the_stretches(stretches):
    device = Device()
    assert max(run(device, device.bound(), stretches)) <= AHEAD_S + 1e-6


@given(lengths)
def test_a_fast_host_never_starves_the_device(stretches):
    device = Device()
    run(device, device.bound(), stretches, host_s=NEVER_S)
    assert device.starved_s <= NEVER_S * len(stretches)


def test_of_many_short_stretches_as_many_are_launched_as_fit():
    device = Device()
    left = run(device, device.bound(), [0.01] * 500)
    assert max(left) == pytest.approx(AHEAD_S, abs=0.02)


def test_before_a_long_stretch_is_done_the_next_one_is_not_launched():
    """A count of one boundary would launch 8 s more while 8 s are still to run."""
    device = Device()
    assert run(device, device.bound(), [8.0, 8.0, 8.0])[1:] == pytest.approx([AHEAD_S] * 2, abs=1e-3)


def test_a_slow_host_is_not_held_up():
    device = Device()
    run(device, device.bound(), [1.0] * 20, host_s=3.0)
    assert device.now_s == pytest.approx(20 * 3.0, abs=1e-2)


def test_a_device_that_is_faster_than_predicted_does_not_wait_for_the_prediction():
    device = Device()
    run(device, device.bound(), [1.0] * 20, predicted=[4.0] * 20, host_s=NEVER_S)
    assert device.now_s < 21.0


def test_on_a_device_that_is_slower_no_more_is_launched_than_a_stretch_and_the_bound():
    device = Device()
    left = run(device, device.bound(), [3.0] * 20, predicted=[1.0] * 20)
    assert max(left) <= 3.0 * (AHEAD_S / 1.0 + 1)


@pytest.mark.parametrize("predicted", [[0.0] * 4, []])
def test_where_nothing_is_predicted_the_host_does_not_wait(predicted):
    """A pass that is measured takes as long as one that is bounded well."""
    device = Device()
    left = run(device, device.bound(), [5.0] * 4, predicted=predicted)
    assert left == pytest.approx([0.0, 5.0, 10.0, 15.0])
    assert device.waits == 0


def test_the_first_pass_that_is_predicted_is_bounded():
    device = Device()
    bound = device.bound()
    run(device, bound, [1.0] * 4, predicted=[0.0] * 4)
    device.now_s = device.free_at_s
    assert max(run(device, bound, [1.0] * 20)) <= AHEAD_S + 1e-6


def test_a_pass_that_goes_on_from_a_checkpoint_counts_from_there():
    device = Device()
    assert max(run(device, device.bound(), [1.5] * 20, first=10)) <= AHEAD_S + 1e-6


def test_a_new_pass_does_not_wait_for_the_marks_of_the_last():
    device = Device()
    bound = device.bound()
    run(device, bound, [1.0] * 20)
    device.waits = 0
    run(device, bound, [0.1] * 10)
    assert device.waits == 0


def test_it_makes_as_many_events_as_a_pass_has_boundaries_once():
    device = Device()
    bound = device.bound()
    for _ in range(3):
        run(device, bound, [0.1] * 7)
    assert len(device.events) == 7


@pytest.mark.parametrize("ahead_s", [0.0, -1.0])
def test_a_bound_that_would_starve_the_device_is_refused(ahead_s):
    with pytest.raises(ValueError, match="must be positive"):
        Device().bound(ahead_s)


def test_a_host_that_computes_itself_never_waits():
    device = Device()
    assert run(device, HostOnly(), [1.0] * 5) == [0, 1, 2, 3, 4], "as here nothing bounds it"
    assert device.waits == 0
