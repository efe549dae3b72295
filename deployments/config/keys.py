"""API keys: whose they are, where they are read from, and what their tenants may do.

Owns the shape of a key and of the file of keys. What limits a tenant can have is
`deployments.config.admission`'s.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from deployments.config import ConfigError
from deployments.config.admission import TenantLimitsConfig
from slo.admission.tenant_limits import TenantLimit
from slo.admission.tenants import KeyRing, Tenant
from slo.files.strict_yaml import Section, TierName, explain, nearest, read_yaml
from slo.tiers import TierSet


class KeyConfig(Section):
    """One API key; give `key` or the environment variable that holds it."""

    tenant: Annotated[str, Field(min_length=1, max_length=64)]
    key: str | None = Field(None, min_length=8, repr=False)
    key_env: str | None = None
    highest_tier: TierName | None = Field(None, description="By default any.")
    limits: TenantLimitsConfig | None = Field(
        None, description="By default those of admission.default_limits."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.key is None) == (self.key_env is None):
            msg = f"tenant {self.tenant!r} needs exactly one of key and key_env"
            raise ValueError(msg)
        return self

    def secret(self) -> str:
        """The key itself.

        Raises:
            ConfigError: when its environment variable is not set.
        """
        if self.key is not None:
            return self.key
        assert self.key_env is not None
        if not (value := os.environ.get(self.key_env)):
            msg = f"api_keys: tenant {self.tenant!r} takes its key from ${self.key_env}, which is not set"
            raise ConfigError(msg)
        return value


def read_keys(path: Path | None) -> tuple[KeyConfig, ...]:
    """The keys in a file; none without one.

    Raises:
        ConfigError: when it cannot be read or is no list of keys.
    """
    if path is None:
        return ()
    values = read_yaml(path, ConfigError)
    if not isinstance(values, list):
        msg = f"{path}: expected a list of keys, each with tenant and key"
        raise ConfigError(msg)
    try:
        return tuple(KeyConfig.model_validate(value) for value in values)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path))) from None


def unknown_tier(keys: Sequence[KeyConfig], tiers: TierSet) -> str | None:
    """What is wrong with a key's highest tier; None when the deployment has them all."""
    for key in keys:
        if key.highest_tier is not None and key.highest_tier not in tiers.names:
            hint = nearest(key.highest_tier, tiers.names)
            return f"api_keys: tenant {key.tenant!r}: there is no tier {key.highest_tier!r}; {hint}"
    return None


def key_ring(keys: Sequence[KeyConfig], tiers: TierSet) -> KeyRing:
    """Whose each key is.

    Raises:
        ConfigError: when a highest tier is unknown, a variable is not set or two keys are equal.
    """
    if (problem := unknown_tier(keys, tiers)) is not None:
        raise ConfigError(problem)
    secrets = [key.secret() for key in keys]
    if len(set(secrets)) < len(secrets):
        msg = "api_keys: two tenants have the same key"
        raise ConfigError(msg)
    return KeyRing(
        (secret, Tenant(key.tenant, key.highest_tier)) for secret, key in zip(secrets, keys, strict=True)
    )


def tenant_limits(keys: Sequence[KeyConfig]) -> dict[str, TenantLimit]:
    """Limits of the tenants whose keys give them some.

    Raises:
        ConfigError: when two keys give one tenant different limits.
    """
    limits: dict[str, TenantLimit] = {}
    for key in keys:
        if key.limits is None:
            continue
        limit = key.limits.limit()
        if limits.setdefault(key.tenant, limit) != limit:
            msg = f"api_keys: the keys of tenant {key.tenant!r} have different limits"
            raise ConfigError(msg)
    return limits
