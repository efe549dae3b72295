"""A prefill replica's jobs, for all tests of them."""

import pytest
from job_table import Client, job_table


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def table(client):
    return job_table(client)
