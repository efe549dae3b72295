"""What admission is asked, and the rules that it goes by.

Decides nothing (`slo.admission.controller`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from slo.admission.decode_account import ONE_STREAM, DecodeTake
from slo.admission.demand import MEMORY_S
from slo.admission.tenant_limits import KeyLimit, TenantLimit, Usage
from slo.monitor.policy import RELAX_EVERY_S
from slo.request import JobId
from slo.tiers import Tier


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """When the fleet is under pressure, and what is done about it.

    Attributes:
        pressure: Load above which a class that is over its share is refused in part. Load is the work that
            arrives per second, over what the fleet can do in a second.
        max_refusal: Highest probability of a refusal for the share.
        reserved: Fraction of prefill time that is kept for the top tier, whether or not it is asked for.
        calm_s: A class whose queue the fleet could do in less time than this is not refused for its share:
            one client that waits for each answer may keep an idle fleet busy.
        max_backlog_s: A class whose queue would take longer than this at its part of the fleet is refused
            until it is shorter; the part of one that may not be shed is all of it. A tenant with no more than
            its part of such a queue is not refused until it is twice as long.
        max_late_backlog_s: Instead of `max_backlog_s`, if shorter, for a class with an objective that may
            not be shed; a longer objective counts instead. A longer queue adds only late answers, and time
            until the class is on time again. While such classes alone ask for more than the fleet can do,
            the queue of any class with an objective may be as long as that or 5 s, and one of their
            requests that has waited for this long is waited for before more with an objective is admitted,
            of their class or of one that may be shed: replicas serve first what can be on time, and would
            leave it as long as there is more of that. Tenants of their class that ask for no more than their
            part of the fleet leave time for it, and go on.
        memory_s: Time constant of the account of what arrives.
        min_retry_s: No refusal asks to come back sooner.
        min_shed_retry_s: Nor one by the monitor's policy: no shed level falls in less time.
        max_retry_s: Nor later.
    """

    pressure: float = 0.8
    max_refusal: float = 0.8
    reserved: float = 0.10
    calm_s: float = 10.0
    max_backlog_s: float = 120.0
    max_late_backlog_s: float = 20.0
    memory_s: float = MEMORY_S
    min_retry_s: float = 1.0
    min_shed_retry_s: float = RELAX_EVERY_S
    max_retry_s: float = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """What matters of a request.

    Attributes:
        usage: The most that it may take of its tenant's tokens: its prompts times `n`, and its output.
        work_s: Predicted seconds of its prefill on an idle replica.
        asker: Who asks, and will say which of its requests live; empty for one who says nothing.
        number: Its place among the requests of that asker.
        limit: Of its tenant; None when it is known already.
        key_limit: Of its key; None for none.
        only_decode: Whether only decode can compute its prompt: the prefill tier has no work with it.
        decode: What it takes of decode.
        likeness: Equal for a request that was refused and comes again, and hardly ever for two others.
    """

    job_id: JobId
    tier: Tier
    tenant: str
    usage: Usage
    work_s: float
    asker: str = ""
    number: int = 0
    limit: TenantLimit | None = None
    key_limit: KeyLimit | None = None
    only_decode: bool = False
    decode: DecodeTake = ONE_STREAM
    likeness: Hashable = None
