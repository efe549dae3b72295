"""Ray's own processes fail. The fleet's last tests: nothing that fails is replaced afterwards."""

import asyncio
import time

import psutil
import pytest
import ray
from fleet import tell
from streams import WHOLE, begun_streams, stream

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TOKENS = 400


async def test_rays_gcs_is_killed(fleet):
    """Streams that run go on, and others begin: no call between replicas passes through it."""
    await fleet.until_whole()
    async with fleet.deployment.http(wait_s=120) as http:
        calls = await begun_streams(http, 4, TOKENS)
        server = fleet.deployment.process.pid
        (gcs,) = [
            one for one in psutil.Process(server).children(recursive=True) if one.name() == "gcs_server"
        ]
        ray.shutdown()  # who is connected is ended with it
        gcs.kill()
        killed_s = time.monotonic()
        later = []
        while time.monotonic() < killed_s + 10:
            later.append(await stream(http, 8, lambda: None))
        answers = await asyncio.gather(*calls)
    tell(
        "GCS killed",
        streams=len(answers),
        cut=sum(answer != (TOKENS, WHOLE) for answer in answers),
        later=len(later),
        errors=sum(answer != (8, WHOLE) for answer in later),
        lasted_s=round(time.monotonic() - killed_s, 1),
    )
    assert answers == [(TOKENS, WHOLE)] * len(calls)
    assert later == [(8, WHOLE)] * len(later)
