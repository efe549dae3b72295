"""A server with the proxy's limits."""

import pytest
from limited_proxy import serving


@pytest.fixture
async def served(monkeypatch):
    async with serving(monkeypatch) as found:
        yield found
