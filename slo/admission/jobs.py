"""What is remembered of a request from its admission to its end."""

from __future__ import annotations

from typing import NamedTuple

from slo.admission.tenant_limits import Usage
from slo.tiers import Tier


class AdmittedJob(NamedTuple):
    """A request that was admitted.

    Attributes:
        usage: The most that it may take of its tenant's tokens.
        asker: Who asked, and `number` its place among the requests of that asker.
        key_name: Of the key that it came with; None for none.
        generated: Tokens that were generated for it when its client left; None while nobody has said so.
    """

    tier: Tier
    tenant: str
    work_s: float
    admitted_s: float
    usage: Usage
    asker: str
    number: int
    key_name: str | None
    generated: int | None = None

    @property
    def used(self) -> Usage | None:
        """What it took of its tenant's tokens, by who generated its answer; None while they have not said."""
        return None if self.generated is None else Usage(self.usage.prompt_tokens, self.generated)
