"""What is remembered of requests from their admission to their end."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import NamedTuple, Self

from slo.admission.rules import AdmissionRequest
from slo.admission.tenant_limits import Usage
from slo.request import JobId
from slo.tiers import Tier


class AdmittedJob(NamedTuple):
    """A request that was admitted.

    Attributes:
        usage: The most that it may take of its tenant's tokens.
        asker: Who asked, and `number` its place among the requests of that asker.
        key_name: Of the key that it came with; None for none.
        used: What it took of its tenant's tokens; None while nobody has said so.
    """

    tier: Tier
    tenant: str
    admitted_s: float
    usage: Usage
    asker: str
    number: int
    key_name: str | None
    used: Usage | None = None

    @classmethod
    def of(cls, request: AdmissionRequest, now_s: float) -> Self:
        """The one that was asked for."""
        return cls(
            request.tier,
            request.tenant,
            now_s,
            request.usage,
            request.asker,
            request.number,
            None if request.key_limit is None else request.key_limit.name,
        )

    def having(self, generated: int) -> Usage:
        """What it took, says who has generated so many tokens for it; the most that anybody says."""
        known = self.used or Usage(self.usage.prompt_tokens)
        return known._replace(output_tokens=max(generated, known.output_tokens))


class AdmittedJobs(UserDict[JobId, AdmittedJob]):
    """Those that have not ended, in the order in which they were admitted."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[str, dict[JobId, int]] = {}

    def __setitem__(self, job_id: JobId, job: AdmittedJob) -> None:
        """A request is one of them, or more is known of it."""
        super().__setitem__(job_id, job)
        self._numbers.setdefault(job.asker, {})[job_id] = job.number

    def __delitem__(self, job_id: JobId) -> None:
        """A request is none of them any more."""
        asker = self[job_id].asker
        super().__delitem__(job_id)
        del self._numbers[asker][job_id]
        if not self._numbers[asker]:
            del self._numbers[asker]

    def of(self, asker: str) -> Mapping[JobId, int]:
        """The numbers of those that one has asked for."""
        return self._numbers.get(asker, {})
