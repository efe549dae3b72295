"""Each replica's last minutes end when it says what it remembers."""

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace

from deployments.timeline.collect import pasts
from prefill_node.replica.job_history import ReplicaPast

SECONDS = {"quick": 0.0, "slow": 0.5}


class Running:
    """A deployment of replicas that take their time to answer."""

    router = SimpleNamespace(fleet=SimpleNamespace())

    def __init__(self):
        async def fleet():
            return {
                "tiers": ["premium"],
                "prefill": [{"replica": name} for name in (*SECONDS, "gone", "fails")],
            }

        self.router.fleet.remote = fleet

    async def ask_prefill(self, method, replica, last_s):
        assert (method, last_s) == ("past", 60.0)
        if replica == "gone":
            return None
        await asyncio.sleep(SECONDS[replica])
        return ReplicaPast(-60.0, ())


async def test_an_answer_is_as_old_as_it_is_and_not_as_the_last_one():
    before = datetime.now().astimezone()
    tiers, answers = await pasts(Running(), 60.0)
    assert tiers == ["premium"]
    assert answers["gone"] is answers["fails"] is None
    assert before <= answers["quick"].at
    assert answers["slow"].at - answers["quick"].at >= timedelta(seconds=0.4)
