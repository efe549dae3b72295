"""API keys: whose they are, where they are read from, and what their tenants may do.

Owns the shape of a key and of the file of keys. What limits a tenant can have is
`deployments.config.admission`'s; that the file is read again is `deployments.http.key_watch`'s.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from pydantic import AfterValidator, AwareDatetime, Field, ValidationError, model_validator

from deployments.config import ConfigError
from deployments.config.admission import KeyLimitsConfig, TenantLimitsConfig
from slo.admission.tenant_limits import KeyLimit, TenantLimit
from slo.admission.tenants import ANONYMOUS, ApiKey, KeyRing, Tenant, cache_salt, digest, server_secret
from slo.files.strict_yaml import Section, TierName, explain, nearest, read_yaml
from slo.tiers import Tier, TierSet

_MIN_CHARACTERS: Final = 8
"""Of a key."""
_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
"""What environment variables are usually called."""


def _as_it_looks(name: str) -> str:
    if name != name.strip() or not name.isprintable():
        raise ValueError("give a name without blanks around it, line breaks or invisible characters")
    return name


OwnersName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_as_it_looks)]
"""What a tenant or a group is called: two that look alike are one."""


class KeyConfig(Section):
    """One API key; `key_env` names the environment variable that holds it, a file of keys may have `key`."""

    tells_unknown_keys: ClassVar[bool] = False

    tenant: OwnersName
    name: Annotated[str, Field(pattern=r"^[\w.:@/-]{1,64}$")] | None = Field(
        None, description="What refusals and logs call the key; keys of a tenant with one name count as one."
    )
    key: str | None = Field(None, min_length=_MIN_CHARACTERS, repr=False)
    key_env: str | None = None
    expires: AwareDatetime | None = Field(
        None, description="From when on the key is refused, with its time zone; by default never."
    )
    highest_tier: TierName | None = Field(None, description="By default any.")
    cache_group: OwnersName | None = Field(
        None,
        description="Tenants of one group share cached prefixes; by default a tenant shares with nobody.",
    )
    limits: TenantLimitsConfig | None = Field(
        None, description="By default those of admission.default_limits."
    )

    key_limits: KeyLimitsConfig | None = Field(
        None, description="What holds for this key alone, beside the tenant's limits; needs a name."
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.key_limits is not None and self.name is None:
            msg = f"tenant {self.tenant!r}: key_limits goes with name, which refusals tell"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.key is None) == (self.key_env is None):
            msg = f"tenant {self.tenant!r} needs exactly one of key and key_env"
            raise ValueError(msg)
        return self

    def secret(self) -> str:
        """The key itself, without blanks around it, as a client's is read.

        Raises:
            ConfigError: when its environment variable is not set, it is too short, or nobody could send it.
        """
        if self.key is not None:
            value, whose = self.key, f"the key of tenant {self.tenant!r}"
        else:
            assert self.key_env is not None
            whose = f"tenant {self.tenant!r} takes its key from ${self.key_env}, which"
            if (found := os.environ.get(self.key_env)) is None:
                if _VARIABLE.fullmatch(self.key_env) is None:  # maybe the key itself
                    whose = f"tenant {self.tenant!r} takes its key from a variable that"
                raise ConfigError(f"api_keys: {whose} is not set")
            value = found
        if len(value := value.strip()) < _MIN_CHARACTERS:
            problem = f"is shorter than {_MIN_CHARACTERS} characters" if value else "is empty"
            raise ConfigError(f"api_keys: {whose} {problem}")
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"api_keys: {whose} has a character that no header carries; use ASCII")
        return value


class _KeyFile(Section):
    """What a file of keys holds, under the name that it has in a configuration."""

    api_keys: tuple[KeyConfig, ...]


def read_keys(path: Path | None) -> tuple[KeyConfig, ...]:
    """The keys in a file, at least one; none without a file.

    Raises:
        ConfigError: when it cannot be read or is no list of keys. It names places, and quotes nothing.
    """
    if path is None:
        return ()
    values = read_yaml(path, ConfigError, is_quoted=False)
    if not isinstance(values, list):
        msg = f"{path}: expected a list of keys, each with tenant and key"
        raise ConfigError(msg)
    if not values:
        msg = (
            f"{path}: expected a key at least, as everybody would be let in without any; "
            "to revoke all, leave one that nobody has"
        )
        raise ConfigError(msg)
    try:
        return _KeyFile(api_keys=tuple(values)).api_keys
    except ValidationError as error:
        raise ConfigError(explain(error, str(path))) from None


def in_the_open(keys: Sequence[KeyConfig]) -> str | None:
    """What is wrong with keys that stand in the configuration itself; None when none does."""
    for key in keys:
        if key.key is not None:
            return (
                f"api_keys: the key of tenant {key.tenant!r} stands in the configuration, which Ray shows; "
                "name the environment variable that holds it (key_env), or use api_keys_file"
            )
    return None


def unknown_tier(keys: Sequence[KeyConfig], tiers: TierSet) -> str | None:
    """What is wrong with a key's highest tier; None when the deployment has them all."""
    for key in keys:
        if key.highest_tier is not None and key.highest_tier not in tiers.names:
            hint = nearest(key.highest_tier, tiers.names)
            return f"api_keys: tenant {key.tenant!r}: there is no tier {key.highest_tier!r}; {hint}"
    return None


@dataclass(frozen=True)
class KeySource:
    """All of a deployment's keys, in a form that may travel: of those read already it has the digests only.

    Attributes:
        fixed: Digest and configuration of the keys that the environment holds.
        path: The file of the others, which is read anew each time.
        tiers: The deployment's.
        default: Limits of the tenants without some of their own.
        anonymous: Whose requests are while there are no keys at all.
        secret: What tenants' cached prefixes are kept apart with; stays when keys change.
    """

    fixed: tuple[tuple[bytes, KeyConfig], ...]
    path: Path | None
    tiers: TierSet
    default: TenantLimit
    anonymous: Tenant
    secret: bytes

    @classmethod
    def of(
        cls,
        keys: Sequence[KeyConfig],
        path: Path | None,
        tiers: TierSet,
        default: TenantLimit,
        anonymous_tier: Tier | None = None,
    ) -> Self:
        """The source with the secret that its present keys make.

        Raises:
            ConfigError: as `ring`.
        """
        fixed = tuple((digest(key.secret()), key) for key in keys)
        anonymous = replace(ANONYMOUS, highest_tier=anonymous_tier, limit=default)
        digests = [known for known, _ in fixed] + [digest(key.secret()) for key in read_keys(path)]
        return cls(fixed, path, tiers, default, anonymous, server_secret(digests))

    def ring(self) -> KeyRing:
        """Whose each key is now.

        Raises:
            ConfigError: when the file cannot be read or holds no keys, a highest tier is unknown, a variable
                is not set, a key is too short, two keys are equal, or two of one tenant, or of one name,
                have different limits.
        """
        keys = [*self.fixed, *((digest(key.secret()), key) for key in read_keys(self.path))]
        configs = [key for _, key in keys]
        if (problem := unknown_tier(configs, self.tiers)) is not None:
            raise ConfigError(problem)
        if len({known for known, _ in keys}) < len(keys):
            msg = "api_keys: two tenants have the same key"
            raise ConfigError(msg)
        limits, key_limits = _tenant_limits(configs), _key_limits(configs)
        return KeyRing(
            [
                ApiKey(
                    known,
                    Tenant(
                        key.tenant,
                        key.highest_tier,
                        cache_salt(self.secret, _group(key)),
                        limits.get(key.tenant, self.default),
                        key.name,
                        key_limits.get((key.tenant, key.name)),
                    ),
                    math.inf if key.expires is None else key.expires.timestamp(),
                )
                for known, key in keys
            ],
            self.anonymous,
        )


def _group(key: KeyConfig) -> str:
    """Groups and tenants have names of their own."""
    return f"tenant {key.tenant}" if key.cache_group is None else f"group {key.cache_group}"


def _tenant_limits(keys: Sequence[KeyConfig]) -> dict[str, TenantLimit]:
    """Limits of the tenants whose keys give them some."""
    limits: dict[str, TenantLimit] = {}
    for key in keys:
        if key.limits is None:
            continue
        limit = key.limits.limit()
        if limits.setdefault(key.tenant, limit) != limit:
            msg = f"api_keys: the keys of tenant {key.tenant!r} have different limits"
            raise ConfigError(msg)
    return limits


def _key_limits(keys: Sequence[KeyConfig]) -> dict[tuple[str, str | None], KeyLimit]:
    """Limits of the keys that have some, by tenant and name."""
    limits: dict[tuple[str, str | None], KeyLimit] = {}
    given = {(key.tenant, key.name): key.key_limits for key in keys if key.name is not None}
    for key in keys:
        if key.name is None:
            continue
        if given[key.tenant, key.name] != key.key_limits:
            msg = f"api_keys: the keys {key.name!r} of tenant {key.tenant!r} have different key_limits"
            raise ConfigError(msg)
        if key.key_limits is not None:
            limits[key.tenant, key.name] = KeyLimit(key.name, key.key_limits.limit())
    return limits
