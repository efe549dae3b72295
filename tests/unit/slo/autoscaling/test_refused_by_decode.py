"""How large a decode tier gets that refuses requests for want of memory, in virtual time."""

import heapq
from itertools import count

import pytest

from slo.admission.decode_account import DecodeAccount, DecodeTake
from slo.autoscaling.need import DecodeDemand, decode_need
from slo.autoscaling.scaler import Scaler, ScalingRules
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS

STAY_S = 40.0
RULES = ScalingRules(2, 16, start_s=60.0, keep_s=300.0, busy=0.8)


class DecodeTier:
    """Replicas that hold ten streams each, all of which stay for as long; who finds no place is refused.

    Args:
        back_s: After so long who was refused comes again; None for never.
    """

    def __init__(self, load, back_s):
        self.account, self.scaler = DecodeAccount(DEFAULT_TIERS), Scaler(RULES)
        self.gap_s, self.back_s = STAY_S / (10 * load), back_s
        self.ends = []
        self.ups = [0.0] * RULES.min_replicas
        self.sizes = []
        self.refused_at = []

    def run(self, until_s):
        names, asks, number = count(), [], 0
        for second in range(int(until_s)):
            while (at_s := number * self.gap_s) < second + 1:
                heapq.heappush(asks, (at_s, next(names), f"prompt-{number}"))
                number += 1
            while asks and asks[0][0] < second + 1:
                at_s, name, likeness = heapq.heappop(asks)
                if not self.takes(at_s, JobId(f"{name}"), likeness) and self.back_s is not None:
                    heapq.heappush(asks, (at_s + self.back_s, next(names), likeness))
            self.follow(second + 1.0)

    def takes(self, now_s, job, likeness):
        self.end(now_s)
        self.account.arrived(BACKGROUND, DecodeTake(1, 100), now_s, likeness)
        self.account.admitted(job, BACKGROUND, DecodeTake(1, 100), likeness)
        if len(self.ends) < 10 * self.running(now_s):
            self.account.decodes(job)
            self.ends.append((now_s + STAY_S, job))
            return True
        self.account.lacked(job, now_s)
        self.account.withdrawn(job)
        self.refused_at.append(now_s)
        return False

    def end(self, now_s):
        while self.ends and self.ends[0][0] <= now_s:
            end_s, job = self.ends.pop(0)
            self.account.ended(job, end_s)

    def running(self, now_s):
        return sum(up_s <= now_s for up_s in self.ups)

    def follow(self, now_s):
        self.end(now_s)
        memory, running = len(self.ends) / 10, self.running(now_s)
        self.account.sees(DecodeDemand(memory, len(self.ends), replicas=running))
        seen = DecodeDemand(
            memory, len(self.ends), replicas=running, refused=self.account.replicas_refused(now_s)
        )
        target = self.scaler.decide(lambda _: decode_need(seen), running, len(self.ups), now_s).target
        self.ups = [*self.ups, *[now_s + RULES.start_s] * (target - len(self.ups))][:target]
        self.sizes.append(target)


@pytest.mark.parametrize("back_s", [None, 3.0, 6.0, 10.0, 20.0, 60.0])
def test_the_same_refused_requests_order_replicas_once(back_s):
    """Two have room for 20 of 32 streams; who comes again until there is more waits, and has to be served."""
    tier = DecodeTier(3.2, back_s)
    tier.run(1200.0)
    assert max(tier.sizes) <= (4 if back_s is None else 7)
    assert tier.sizes[-1] == 4
    assert tier.refused_at[-1] < 2.5 * RULES.start_s
