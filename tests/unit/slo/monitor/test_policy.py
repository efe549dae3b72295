"""Versions of the cluster's policy only grow."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slo.monitor.policy import UNSTEERED, ClusterPolicy, newer_of
from slo.tiers import BACKGROUND, DEFAULT_TIERS

policies = st.builds(
    ClusterPolicy,
    version=st.integers(0, 9),
    shed=st.dictionaries(st.sampled_from(DEFAULT_TIERS.names), st.floats(0, 1)),
    reserved=st.floats(0, 1),
    margin=st.none() | st.floats(1, 10),
)


def test_what_is_not_said_is_as_configured():
    assert UNSTEERED.version == 0
    assert [UNSTEERED.shed_level(tier) for tier in DEFAULT_TIERS.names] == [0.0, 0.0, 0.0]
    assert (UNSTEERED.preemption, UNSTEERED.margin, UNSTEERED.reserved) == (None, None, 0.0)


def test_a_change_makes_the_next_version_and_no_change_makes_none():
    shed = UNSTEERED.revised(shed={BACKGROUND: 0.5})
    assert (shed.version, shed.shed_level(BACKGROUND)) == (1, 0.5)
    assert shed.revised(shed={BACKGROUND: 0.5}) is shed
    assert shed.revised(reserved=0.1).version == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": -1},
        {"shed": {BACKGROUND: 1.1}},
        {"reserved": -0.1},
        {"margin": 0.9},
        {"margin": float("nan")},
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"at least|fractions"):
        ClusterPolicy(**wrong)


@settings(deadline=None)
@given(st.lists(policies, max_size=10))
def test_whoever_hears_policies_in_any_order_ends_with_the_highest_version_and_never_goes_back(heard):
    known, versions = UNSTEERED, [0]
    for policy in heard:
        known = newer_of(known, policy)
        versions.append(known.version)
    assert versions == sorted(versions)
    assert known.version == max([0, *(policy.version for policy in heard)])
    assert newer_of(known, None) is known


@settings(deadline=None)
@given(policies, st.integers(0, 20))
def test_raising_a_policy_keeps_its_content(policy, version):
    raised = policy.raised_to(version)
    assert raised.version == max(version, policy.version)
    assert raised.shed == policy.shed
