"""A whole fleet in virtual time: the router's core, prefill replicas, links, decode replicas, failures.

Owns the way of a request through them. What is decided on it is decided by the code that serves: placement
and admission by `router.core`, order and preemption by each replica's scheduler and governor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from router.messages import Placed
from simulator.fleet.decode import Decoding
from simulator.fleet.decode_site import DecodeSite
from simulator.fleet.dispatch import Dispatch
from simulator.fleet.elastic_tier import Crew, ElasticTier
from simulator.fleet.outcome import FleetRun, Passage
from simulator.fleet.prefill_site import PrefillSite, ReplicaLifetime
from simulator.fleet.scaling import DecodeTierSeen, Elasticity, Payroll, PrefillTierSeen
from simulator.fleet.setup import Failure, FleetSetup
from simulator.replica.hardware import ReplicaModel
from simulator.replica.job import Job
from simulator.replica.loop import EventLoop
from simulator.workload.arrivals import Arrival
from slo.errors import Rejected
from slo.outcomes import Outcome
from slo.request import JobId, ReplicaId, RequestContext

TOO_LONG: Final = "too_long"
"""Why a request is refused that the memory of no replica could ever hold."""


def simulate(
    setup: FleetSetup,
    arrivals: Sequence[Arrival],
    failures: Sequence[Failure] = (),
    *,
    elasticity: Elasticity[PrefillTierSeen] | None = None,
    decode_elasticity: Elasticity[DecodeTierSeen] | None = None,
) -> FleetRun:
    """Serve a stream until every request has ended; the same arguments give the same result.

    While no prefill replica lives, requests are refused. `elasticity` has the prefill tier grow and shrink
    from the number of the setup, whose `admission` tells the demand if there is one; `decode_elasticity` the
    decode tier.

    Raises:
        ValueError: when a failure is of a replica that there is not.
    """
    fleet = _Fleet(setup, arrivals)
    fleet.scale(elasticity, decode_elasticity)
    return fleet.run(failures)


class _Fleet:
    """One simulation."""

    def __init__(self, setup: FleetSetup, arrivals: Sequence[Arrival]) -> None:
        self._setup = setup
        self._payroll = Payroll(setup.weighted_tiers())
        self._decode_payroll = Payroll(setup.weighted_tiers())
        self._prefill_tier: ElasticTier[PrefillTierSeen] | None = None
        self._decode_tier: ElasticTier[DecodeTierSeen] | None = None
        self._loop = EventLoop()
        self._passages = {str(arrival.number): Passage(arrival) for arrival in arrivals}
        self._left = len(arrivals)
        self._sites: dict[ReplicaId, PrefillSite] = {}
        self._places = [self._new_site(place) for place in range(setup.prefill_replicas)]
        self._decode: dict[ReplicaId, DecodeSite] = {}
        for _ in range(setup.decode_replicas):
            self._new_decode()
        informs = self._places[0].informs
        self._dispatch = Dispatch(self._loop, setup, informs=informs)

    def run(self, failures: Sequence[Failure]) -> FleetRun:
        """Let everything happen."""
        for site in self._places:
            self._dispatch.hear(site.first_report(self._setup.hardware.predictor()))
            self._start_reports(site)
            self._payroll.hired(site.replica_id, 0.0)
        for decode in self._decode.values():
            self._dispatch.hear(decode.report())
            self._start_decode_reports(decode)
            self._decode_payroll.hired(decode.replica_id, 0.0)
        for passage in self._passages.values():
            self._loop.call_at(passage.arrival.at_s, self._place, passage)
        for failure in failures:
            if failure.replica not in range(len(self._places)):
                raise ValueError(
                    f"prefill replica {failure.replica} cannot die: 0 is the first of {len(self._places)}"
                )
            self._loop.call_at(failure.at_s, self._die, failure.replica)
            self._loop.call_at(failure.back_s, self._come_back, failure.replica)
        for tier in (self._prefill_tier, self._decode_tier):
            if tier is not None:
                tier.start()
        self._loop.run()
        return FleetRun(
            [*self._passages.values()],
            [site.replica for site in self._sites.values()],
            [site.replica for site in self._decode.values()],
            self._setup.prefill_replicas,
            () if self._prefill_tier is None else self._prefill_tier.sizes,
            self._payroll.total_s(self._loop.now_s),
            () if self._decode_tier is None else self._decode_tier.sizes,
            self._decode_payroll.total_s(self._loop.now_s),
        )

    def _is_over(self) -> bool:
        return self._left == 0

    # The way of a request.

    def _place(self, passage: Passage) -> None:
        """A request, or one whose replica has died, asks for a place."""
        arrival = passage.arrival
        if not self._can_ever_hold(arrival):
            self._refuse(passage, TOO_LONG, Outcome.REJECTED)
            return
        decision = self._dispatch.place(JobId(str(arrival.number)), arrival)
        passage.unattainable = decision.unattainable
        match decision:
            case Rejected():
                self._refuse(passage, decision.reason.value, Outcome.SHED)
            case Placed():
                self._send(passage, decision)

    def _send(self, passage: Passage, decision: Placed) -> None:
        assert decision.predicted_ttft_s is not None
        passage.placements += 1
        passage.prefill_replica = decision.prefill_replica
        passage.decode_replica = decision.decode_replica
        passage.predicted_ttft_s = decision.predicted_ttft_s
        arrival = passage.arrival
        self._decode[decision.decode_replica].began(JobId(str(arrival.number)), arrival.tier, arrival.tokens)
        delays = self._setup.delays
        reach_s = self._loop.now_s + delays.wire_s + delays.render_s
        if decision.prefill_replica is None:
            self._loop.call_at(reach_s, self._compute_on_decode, passage)
            return
        self._sites[decision.prefill_replica].expected += 1
        self._loop.call_at(reach_s, self._reach, passage, self._context(passage.arrival, decision))

    def _compute_on_decode(self, passage: Passage) -> None:
        """A request reaches its decode replica, which computes its prompt; a step has read the weights."""
        arrival, step = passage.arrival, self._setup.decode
        passage.job = Job(arrival, self._setup.hardware.weights[arrival.tier], math.inf)
        pass_s = self._setup.hardware.cost.prefill_s(arrival.tokens)
        compute_s = max(0.0, pass_s - step.fixed_s - step.weights_s)
        assert passage.decode_replica is not None
        self._decode[passage.decode_replica].compute(
            str(arrival.number),
            arrival.tier,
            (arrival.tokens, arrival.output_tokens),
            compute_s,
            partial(self._computed, passage),
        )

    def _computed(self, passage: Passage, decoding: Decoding) -> None:
        """A request that decode has computed alone has ended."""
        assert passage.job is not None
        passage.job.prefilled_s = passage.job.first_token_s = decoding.first_token_s
        passage.tpot_s = decoding.tpot_s
        self._over(passage)

    def _context(self, arrival: Arrival, placed: Placed) -> RequestContext:
        """What reaches the prefill replica, with what is left of the budget."""
        number = str(arrival.number)
        context = RequestContext(
            JobId(number),
            number,
            arrival.tier,
            placed.ttft_budget_s,
            placed.handoff_s,
            placed.prefill_replica,
        )
        spent_s = self._loop.now_s - arrival.at_s + self._setup.delays.render_s
        return context.after(spent_s).for_prefill()

    def _reach(self, passage: Passage, context: RequestContext) -> None:
        """A request reaches its prefill replica, dead or alive."""
        assert context.prefill_replica is not None
        site = self._sites[context.prefill_replica]
        site.expected -= 1
        budget_s = context.ttft_budget_s
        deadline_s = math.inf if budget_s is None else self._loop.now_s + budget_s
        weight = self._setup.hardware.weights[context.tier]
        job = Job(passage.arrival, weight, deadline_s, context.handoff_s)
        if (before := passage.job) is not None:
            job.preemptions, job.wasted_s = before.preemptions, before.wasted_s
            job.first_token_s = before.first_token_s
        passage.job = job
        if site.is_alive:
            site.arrive(job)
        else:
            self._lose(site, job)

    def _prefilled(self, site: PrefillSite, job: Job) -> None:
        self._dispatch.prefilled(job.job_id)
        passage = self._passages[job.request_id]
        assert passage.decode_replica is not None
        arrival = job.arrival
        if job.first_token_s == math.inf:
            job.first_token_s = self._loop.now_s + self._setup.handoff_s
        if arrival.output_tokens == 1:  # that was all
            site.release(job)
            self._over(passage)
            return
        size_bytes = arrival.tokens * self._setup.hardware.cost.shape.kv_bytes_per_token
        self._decode[passage.decode_replica].take(
            job.request_id,
            arrival.tier,
            (arrival.tokens, arrival.output_tokens - 1, size_bytes),
            pulled=partial(site.release, job),
            ended=partial(self._finish, passage),
        )

    def _finish(self, passage: Passage, decoding: Decoding) -> None:
        assert passage.job is not None
        lasted_s = decoding.last_token_s - passage.job.first_token_s
        passage.tpot_s = max(0.0, lasted_s) / (passage.arrival.output_tokens - 1)
        self._over(passage)

    def _over(self, passage: Passage) -> None:
        assert passage.decode_replica is not None
        job_id = JobId(str(passage.arrival.number))
        self._decode[passage.decode_replica].over(job_id)
        self._dispatch.ended(job_id)
        self._end(passage, Outcome.FINISHED)

    def _refuse(self, passage: Passage, reason: str, outcome: Outcome) -> None:
        if passage.job is None:
            weight = self._setup.hardware.weights[passage.arrival.tier]
            passage.job = Job(passage.arrival, weight, math.inf)
        passage.job.refused = reason
        passage.job.first_token_s = math.inf
        if passage.placements:
            self._dispatch.ended(JobId(str(passage.arrival.number)))
        self._end(passage, outcome)

    def _end(self, passage: Passage, outcome: Outcome) -> None:
        assert passage.outcome is None, "a request has ended twice"
        passage.outcome = outcome
        self._left -= 1
        if self._prefill_tier is not None:
            self._payroll.judge(passage, self._loop.now_s)

    def _can_ever_hold(self, arrival: Arrival) -> bool:
        fits_prefill = arrival.tokens <= self._setup.hardware.kv_tokens
        return fits_prefill and arrival.tokens + arrival.output_tokens <= self._setup.decode.kv_tokens

    # Replicas and their deaths.

    def _new_site(self, place: int) -> PrefillSite:
        setup = self._setup
        setting = setup.arm.settings[0] if setup.setting is None else setup.setting

        def build(life: ReplicaLifetime, prefilled: Callable[[Job], None]) -> ReplicaModel:
            return setup.arm.build(life, setup.hardware, setting, prefilled)

        replica_id = ReplicaId(f"prefill-{place}.{len(self._sites)}")
        site = PrefillSite(replica_id, ReplicaLifetime(self._loop), build, self._prefilled, setup.handoff_s)
        self._sites[replica_id] = site
        return site

    def _start_reports(self, site: PrefillSite) -> None:
        if site.informs:
            site.reporter.start(self._dispatch.report, 2 * self._setup.delays.report_s, self._is_over)

    def _die(self, place: int) -> None:
        site = self._places[place]
        if not site.is_alive:
            return
        for job in site.die():
            self._lose(site, job)
        self._payroll.left(site.replica_id, self._loop.now_s)
        self._loop.call_at(self._loop.now_s + self._setup.delays.detect_s, self._notice, site)

    def _lose(self, site: PrefillSite, job: Job) -> None:
        """A request was on a dead replica, or has come to one: it is placed again when that is noticed."""
        passage = self._passages[job.request_id]
        assert passage.decode_replica is not None
        decode = self._decode[passage.decode_replica]
        decode.lose(job.request_id)
        decode.over(job.job_id)
        site.stranded.append(job)
        if site.is_noticed:
            self._place_again(site)

    def _notice(self, site: PrefillSite) -> None:
        site.is_noticed = True
        self._dispatch.gone(site.replica_id)
        self._place_again(site)

    def _place_again(self, site: PrefillSite) -> None:
        stranded, site.stranded = site.stranded, []
        for job in stranded:
            self._place(self._passages[job.request_id])

    def _come_back(self, place: int) -> None:
        if self._places[place].is_alive:
            return
        self._places[place] = site = self._new_site(place)
        self._payroll.hired(site.replica_id, self._loop.now_s)
        if not site.informs:
            self._dispatch.report(site.first_report(self._setup.hardware.predictor()))
        self._start_reports(site)

    # Growing and shrinking.

    def scale(
        self, prefill: Elasticity[PrefillTierSeen] | None, decode: Elasticity[DecodeTierSeen] | None
    ) -> None:
        """Have tiers grow and shrink."""
        if prefill is not None:
            crew = Crew(self._staying, self._see, self._hire, self._let_go, self._is_over)
            places = len(self._places)
            self._prefill_tier = ElasticTier(self._loop, crew, self._payroll, prefill, places)
        if decode is not None:
            of_decode = Crew(
                self._staying_decode, self._see_decode, self._hire_decode, self._let_go_decode, self._is_over
            )
            self._decode_tier = ElasticTier(
                self._loop, of_decode, self._decode_payroll, decode, len(self._decode)
            )

    def _staying(self) -> list[PrefillSite]:
        return [site for site in self._places if site.is_alive and not site.is_draining]

    def _see(self, running: int, target: int) -> PrefillTierSeen:
        work, backlog_s = self._dispatch.demand()
        ongoing = sum(site.outstanding for site in self._places if site.is_alive)
        at_risk = self._payroll.is_at_risk(self._loop.now_s)
        return PrefillTierSeen(work, backlog_s, ongoing, running, target, at_risk)

    def _hire(self) -> ReplicaId:
        site = self._new_site(len(self._places))
        self._places.append(site)
        self._start_reports(site)
        return site.replica_id

    def _let_go(self) -> None:
        """End the replicas that have drained."""
        for site in self._places:
            if site.is_alive and site.is_draining and not site.here and not site.expected:
                site.die()
                self._notice(site)
                self._payroll.left(site.replica_id, self._loop.now_s)

    def _new_decode(self) -> DecodeSite:
        name = ReplicaId(f"decode-{len(self._decode)}")
        replica = self._setup.decode_replica(self._loop)
        self._decode[name] = site = DecodeSite(self._loop, name, replica, self._setup.link)
        return site

    def _start_decode_reports(self, site: DecodeSite) -> None:
        answer_s = 2 * self._setup.delays.report_s
        site.reporter.start(self._dispatch.report, answer_s, lambda: site.is_gone or self._is_over())

    def _staying_decode(self) -> list[DecodeSite]:
        return [site for site in self._decode.values() if not site.is_draining]

    def _see_decode(self, running: int, target: int) -> DecodeTierSeen:
        ongoing = sum(site.ongoing for site in self._decode.values())
        return DecodeTierSeen(self._dispatch.decode_demand(), ongoing, running, target)

    def _hire_decode(self) -> ReplicaId:
        site = self._new_decode()
        self._dispatch.hear(site.report())
        self._start_decode_reports(site)
        return site.replica_id

    def _let_go_decode(self) -> None:
        for site in self._decode.values():
            if site.is_draining and not site.is_gone and site.ongoing == 0:
                site.is_gone = True
                self._dispatch.gone(site.replica_id)
                self._decode_payroll.left(site.replica_id, self._loop.now_s)
