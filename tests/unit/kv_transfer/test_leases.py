"""A pull counts only if its blocks were leased until it was done."""

import pytest

from kv_transfer.leases import Pull, PullDeadlines

PULL = Pull("engine", "lease", 1030.0, frozenset({1}))


@pytest.mark.parametrize(
    ("asked_s", "done_s", "is_late"),
    [
        ((), 29.0, False),
        ((), 29.9, True),  # the clocks of two hosts agree only so far
        ((), 31.0, True),
        ((25.0,), 44.0, False),
        ((25.0,), 46.0, True),
        ((25.0, 40.0), 59.0, False),
        ((5.0,), 29.0, False),  # never shortened
        ((31.0,), 40.0, True),  # the lease had ended
        ((25.0, 46.0), 50.0, True),
    ],
)
def test_it_is_late_when_the_lease_has_ended(asked_s, done_s, is_late):
    deadlines = PullDeadlines(extension_s=20.0)
    for each_s in asked_s:
        deadlines.lengthened({"lease", "another"}, each_s)
    assert deadlines.is_late(PULL, 1000.0, done_s) is is_late


def test_what_is_not_waited_for_any_more_is_forgotten():
    deadlines = PullDeadlines(extension_s=20.0)
    deadlines.lengthened({"lease"}, 25.0)
    deadlines.lengthened({"another"}, 26.0)
    assert deadlines.is_late(PULL, 1000.0, 44.0)
