"""Processes that vote, for all tests of transports."""

import pytest
from voting_ranks import Ranks


@pytest.fixture
def processes():
    with Ranks() as ranks:
        yield ranks
