"""A running prefill is preempted for a more urgent request, through the whole application."""

import pytest
from overtaking import assert_overtaken

pytestmark = pytest.mark.e2e


async def test_an_urgent_request_overtakes_a_running_prefill_which_then_ends_as_if_nothing_had_been(
    deployment,
):
    await assert_overtaken(deployment)
