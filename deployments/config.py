"""The configuration of a deployment: parsed once, strict, and refused before anything starts.

Owns the names, defaults and limits of every setting. An unknown key is refused with the nearest valid one;
values that cannot work together are refused with the reason. `slackserve serve`, `serve run`,
`serve deploy` and a RayService all go through `SlackServeConfig`.
"""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from deployments.admission_config import AdmissionConfig, FairnessConfig, TenantLimitsConfig
from router.decode import KvLink
from router.policies import PlacementName
from simulator.strict_yaml import ClientTier, ObjectiveMs, Positive, Section, explain, read_mapping, read_yaml
from slo.monitor import MonitorSettings
from slo.objectives import MAX_OBJECTIVE_MS
from slo.order import DEFAULT_ORDER, QueueOrder
from slo.preemption import Limits, PreemptionMode, PreemptionPolicy, PreemptionRules
from slo.steering import SteeringRules
from slo.tenancy import KeyRing, Tenant
from slo.tenant_limits import TenantLimit
from slo.tiers import CLIENT_TIERS, DEFAULT_TIER_POLICIES, Tier, TierPolicy

Port = Annotated[int, Field(ge=1, le=65535)]


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key and what would be right."""


class TierConfig(Section):
    """What a tier is promised. `ttft_ms` and `ttft_scale` exclude each other; neither means no deadline."""

    ttft_ms: ObjectiveMs | None = Field(None, description="Time to first token, milliseconds.")
    ttft_scale: Positive | None = Field(
        None, description="Instead: a multiple of the request's own predicted prefill time, for example 1.3."
    )
    tpot_ms: ObjectiveMs | None = Field(None, description="Time per output token, milliseconds.")
    sheddable: bool = Field(default=True, description="May be refused when its deadline cannot be met.")
    weight: Positive = Field(1.0, description="Worth of one request on time, relative to other tiers.")
    share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Fraction of prefill time that its requests get when they want it."
    )

    @model_validator(mode="after")
    def _one_ttft_objective(self) -> Self:
        if self.ttft_ms is not None and self.ttft_scale is not None:
            msg = "give ttft_ms or ttft_scale, not both"
            raise ValueError(msg)
        return self

    def policy(self) -> TierPolicy:
        """The same in the vocabulary of the decision rules, seconds."""
        return TierPolicy(
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            ttft_scale=self.ttft_scale,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
            sheddable=self.sheddable,
            weight=self.weight,
            share=self.share,
        )


def _default_tier(tier: Tier) -> TierConfig:
    policy = DEFAULT_TIER_POLICIES[tier]
    return TierConfig(
        ttft_ms=None if policy.ttft_s is None else policy.ttft_s * 1e3,
        tpot_ms=None if policy.tpot_s is None else policy.tpot_s * 1e3,
        sheddable=policy.sheddable,
        weight=policy.weight,
        share=policy.share,
    )


def _over_defaults(name: str, given: Any) -> Any:
    if not isinstance(given, dict) or name not in CLIENT_TIERS:
        return given
    defaults = _default_tier(Tier(name)).model_dump()
    if given.get("ttft_scale") is not None:
        defaults.pop("ttft_ms")
    return {**defaults, **given}


class TiersConfig(Section):
    """The three tiers that clients can ask for."""

    premium: TierConfig = Field(default_factory=lambda: _default_tier(Tier.PREMIUM))
    standard: TierConfig = Field(default_factory=lambda: _default_tier(Tier.STANDARD))
    background: TierConfig = Field(default_factory=lambda: _default_tier(Tier.BACKGROUND))

    @model_validator(mode="before")
    @classmethod
    def _keep_what_is_not_given(cls, values: Any) -> Any:
        """A tier that is given in part keeps its defaults for the rest."""
        if not isinstance(values, dict):
            return values
        return {name: _over_defaults(name, given) for name, given in values.items()}

    @model_validator(mode="after")
    def _shares_of_one(self) -> Self:
        total = self.premium.share + self.standard.share + self.background.share
        if total > 1 + 1e-9:
            msg = f"the shares of all tiers together are at most 1, not {total:g}"
            raise ValueError(msg)
        return self

    def policies(self) -> dict[Tier, TierPolicy]:
        """Policies by tier."""
        system = DEFAULT_TIER_POLICIES[Tier.SYSTEM]
        return {tier: getattr(self, tier.value).policy() for tier in CLIENT_TIERS} | {Tier.SYSTEM: system}


class PoolConfig(Section):
    """One tier of replicas: how many, how large, and engine arguments beyond ours."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 4096
    drain_s: Positive = Field(
        30.0, description="How long a replica that is shut down may take to finish what it has."
    )
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Passed to vLLM's AsyncEngineArgs; ours cannot be overridden."
    )

    @field_validator("engine_kwargs")
    @classmethod
    def _ours_stay(cls, values: dict[str, Any]) -> dict[str, Any]:
        for key in values:
            if key in _RESERVED_ENGINE_KWARGS:
                msg = f"engine_kwargs may not set {key!r}; {_RESERVED_ENGINE_KWARGS[key]}"
                raise ValueError(msg)
        return values


_RESERVED_ENGINE_KWARGS = {
    "model": "use the key model",
    "tokenizer": "it comes with the model",
    "tensor_parallel_size": "use the pool's tensor_parallel_size",
    "max_model_len": "use the key max_model_len",
    "dtype": "use the key dtype",
    "kv_transfer_config": "use the section kv_transfer",
    "scheduler_cls": "SlackServe brings its own",
    "worker_cls": "SlackServe brings its own",
    "async_scheduling": "SlackServe's scheduler needs it off",
    "disable_log_stats": "SlackServe's metrics need the statistics",
    "scheduling_policy": "SlackServe orders by slack",
    "served_model_name": "use the key model_name",
    "pipeline_parallel_size": "only tensor parallelism is supported",
    "data_parallel_size": "use the pool's replicas",
    "distributed_executor_backend": "it follows the accelerator",
}


_RULES = PreemptionRules()
_LIMITS = Limits.default_for(PreemptionMode.RESUME)
_RECOMPUTE_LIMITS = Limits.default_for(PreemptionMode.RECOMPUTE)


class PreemptionLimitsConfig(Section):
    """How much preemption is borne; past one of these a step runs to its end, whatever waits."""

    max_preemptions: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Stops of one request; by default "
        f"{_LIMITS.max_preemptions}, and {_RECOMPUTE_LIMITS.max_preemptions} with mode: recompute.",
    )
    max_suspended_s: Positive = Field(
        _LIMITS.max_suspended_s, description="Total seconds that one request is suspended."
    )
    max_suspended_steps: Annotated[int, Field(ge=0)] = Field(
        _LIMITS.max_suspended_steps, description="Suspended steps per replica."
    )
    max_suspended_mib: Annotated[int, Field(ge=0)] = Field(
        _LIMITS.max_suspended_bytes >> 20, description="Memory of their checkpoints, MiB on each rank."
    )


class PreemptionConfig(Section):
    """Whether and when a running prefill makes way for a more urgent request."""

    mode: PreemptionMode = Field(
        _RULES.mode,
        description="A stopped prefill continues, starts again (recompute), or none is stopped.",
    )
    policy: PreemptionPolicy = Field(
        _RULES.policy,
        description="When a waiter that can be met takes over from one that can be met.",
    )
    margin: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        _RULES.margin,
        description="How much more urgent a waiter must be, or how far predictions are trusted.",
    )
    order: QueueOrder = Field(DEFAULT_ORDER, description="Which waiting prefill goes first.")
    granularity: Literal["layer", "sublayer", "operator"] = Field(
        "operator",
        description="Where a forward pass can stop: before each layer, also before each MLP, or also within.",
    )
    launch_ahead: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="On an accelerator, boundaries that may be launched before the first of them is done."
    )
    join_tokens: Annotated[int, Field(ge=1)] = Field(
        2048, description="Prompts are prefilled together while they have no more tokens together."
    )
    vote_timeout_s: Positive = Field(
        20.0, description="A tensor-parallel rank that stays away from a vote for longer has failed."
    )
    limits: PreemptionLimitsConfig = PreemptionLimitsConfig()

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return PreemptionMode.OFF if value is False else value

    def rules(self) -> PreemptionRules:
        """The same in the vocabulary of the decision rules."""
        given = self.limits
        limits = dataclasses.replace(
            Limits.default_for(self.mode),
            max_suspended_s=given.max_suspended_s,
            max_suspended_steps=given.max_suspended_steps,
            max_suspended_bytes=given.max_suspended_mib << 20,
        )
        if given.max_preemptions is not None:
            limits = dataclasses.replace(limits, max_preemptions=given.max_preemptions)
        return PreemptionRules(self.mode, self.policy, self.margin, limits)


class KVLinkConfig(Section):
    """What KV moves over, as the router reckons with it."""

    bytes_per_token: Annotated[int, Field(ge=1)] = Field(description="KV bytes of one token, all layers.")
    gigabytes_per_s: Positive = Field(description="Bandwidth into one decode replica, 10^9 bytes per second.")
    latency_ms: Annotated[float, Field(ge=0, le=MAX_OBJECTIVE_MS)] = 0.0

    def link(self) -> KvLink:
        """The same in the router's vocabulary."""
        return KvLink(self.bytes_per_token, self.gigabytes_per_s * 1e9, self.latency_ms / 1e3)


class KVTransferConfig(Section):
    """How KV blocks move from prefill to decode."""

    link: KVLinkConfig | None = Field(
        None, description="Adds the transfer of each prompt's KV to handoff_ms; none leaves it one number."
    )

    buffer_device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where NIXL reads and writes blocks; auto follows the accelerator."
    )
    lease_s: Annotated[int, Field(ge=6, le=3600)] = Field(
        30, description="Seconds that finished prefill blocks wait for decode to pull them."
    )
    prefill_port: Port = Field(20000, description="First NIXL side-channel port of prefill replicas.")
    decode_port: Port = Field(22000, description="First NIXL side-channel port of decode replicas.")


class RouterSection(Section):
    """How requests are placed."""

    placement: PlacementName = "least_harm"
    timeout_ms: Positive | None = Field(
        None,
        description="Whoever waits longer for the router's word places the request without it; by default "
        "50, and 500 on cpu, where the router shares its cores with engines.",
    )
    late_binding: bool = Field(
        default=False, description="Hold requests back until a replica can start them soon."
    )
    bind_ahead_ms: Positive = Field(
        80.0, description="How soon that is, so that no replica idles for want of work."
    )
    stale_after_s: Positive = Field(10.0, description="A replica that is silent for longer is not used.")
    silent_after_s: Positive = Field(
        1.5, description="One that is silent for longer is used only if all are; they report every 0.5 s."
    )
    max_replacements: Annotated[int, Field(ge=0, le=10)] = Field(
        2, description="How often a request whose prefill replica is lost is placed again."
    )
    stretch: Annotated[float, Field(ge=1)] = Field(
        2.0,
        description=(
            "A tier's own objective is not held against a request below this multiple of what the request "
            "takes on an idle replica; objectives that the client names are held as they are."
        ),
    )


_MONITOR = MonitorSettings()
_STEERING = _MONITOR.rules
Target = Annotated[float, Field(gt=0, lt=1)]


class TargetsConfig(Section):
    """By tier, the fraction of requests that shall meet their objectives."""

    premium: Target = _MONITOR.targets[Tier.PREMIUM]
    standard: Target = _MONITOR.targets[Tier.STANDARD]
    background: Target = _MONITOR.targets[Tier.BACKGROUND]


class MonitorConfig(Section):
    """The cluster-wide SLO monitor: what it measures against, and what it may do."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        9465, description="Where it exports metrics to Prometheus; 0 for nowhere."
    )
    targets: TargetsConfig = TargetsConfig()
    window_s: Annotated[float, Field(ge=12, le=86_400)] = Field(
        _MONITOR.window_s, description="The long window; the short one is a twelfth of it."
    )
    shed: bool = Field(_MONITOR.steers, description="Shed and reserve when a tier misses its target.")
    correct: bool = Field(_MONITOR.corrects, description="Correct predictions by measured forward passes.")
    direct: bool = Field(_MONITOR.directs, description="Order running prefills to make way.")
    quantile: Annotated[float, Field(gt=0, lt=1)] = Field(
        _MONITOR.quantile, description="Of measured over predicted times, that predictions aim at."
    )
    act_at_burn: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        _STEERING.act_at_burn, description="The burn rate from which on a tier is at risk."
    )
    least_missed: Annotated[int, Field(ge=1)] = Field(
        _STEERING.least_missed, description="Misses in the short window below which it is not."
    )
    step: Annotated[float, Field(gt=0, le=1)] = Field(
        _STEERING.step, description="By how much a shed level changes at a time."
    )
    most_shed_standard: Annotated[float, Field(ge=0, le=1)] = _STEERING.most_shed_standard
    reserve_step: Annotated[float, Field(gt=0, le=1)] = _STEERING.reserve_step
    most_reserved: Annotated[float, Field(ge=0, le=1)] = _STEERING.most_reserved
    tighten_every_s: Positive = Field(
        _STEERING.tighten_every_s, description="Least time between two steps towards more shedding."
    )
    relax_every_s: Positive = Field(
        _STEERING.relax_every_s, description="Least time between any step and one towards less."
    )

    def settings(self, preemption: PreemptionConfig) -> MonitorSettings:
        """The same in the vocabulary of the decision rules."""
        names = [field.name for field in dataclasses.fields(SteeringRules)]
        return MonitorSettings(
            targets={tier: getattr(self.targets, tier.value) for tier in CLIENT_TIERS},
            window_s=self.window_s,
            rules=SteeringRules(**{name: getattr(self, name) for name in names}),
            steers=self.shed,
            corrects=self.correct,
            directs=self.direct,
            quantile=self.quantile,
            preemption=preemption.policy,
            margin=preemption.margin,
        )


class LimitsConfig(Section):
    """What a client may send."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024 * 1024


class KeyConfig(Section):
    """One API key; give `key` or the environment variable that holds it."""

    tenant: Annotated[str, Field(min_length=1, max_length=64)]
    key: str | None = Field(None, min_length=8, repr=False)
    key_env: str | None = None
    highest_tier: ClientTier = Tier.PREMIUM
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


class SlackServeConfig(Section):
    """Everything that a deployment can be told."""

    model: str | None = Field(
        None, description="Hugging Face id or directory; none serves the embedded SmolLM2-135M-Instruct."
    )
    model_name: str | None = Field(None, description="What clients call the model; by default its id.")
    accelerator: Literal["cpu", "cuda"] = "cpu"
    accelerator_type: str | None = Field(None, description="Ray's accelerator type, for example H100.")
    dtype: str | None = Field(None, description="By default float32 on cpu, auto on cuda.")
    max_model_len: Annotated[int, Field(ge=64)] | None = Field(
        None, description="Longest prompt plus output, tokens; by default what the model allows."
    )
    kv_cache_gib: Annotated[int, Field(ge=1)] = Field(1, description="KV cache per replica on cpu, GiB.")
    host: str = "127.0.0.1"
    port: Port = 8000
    ingress_replicas: Annotated[int, Field(ge=1, le=100)] = 1
    pin_cores: bool = Field(default=True, description="On cpu, give each replica cores of its own.")
    tiers: TiersConfig = TiersConfig()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    fairness: FairnessConfig = FairnessConfig()
    admission: AdmissionConfig = AdmissionConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    router: RouterSection = RouterSection()
    limits: LimitsConfig = LimitsConfig()
    monitor: MonitorConfig = MonitorConfig()
    profile: Path | None = Field(
        None, description="Prefill times written by `slackserve calibrate`; none measures at start."
    )
    handoff_ms: Annotated[float, Field(ge=0, le=MAX_OBJECTIVE_MS)] = Field(
        50.0, description="Predicted time from the end of prefill to the first token, without a profile."
    )
    warmup_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (32, 256, 1024), min_length=2, description="Prompt lengths that are prefilled before ready."
    )
    api_keys: tuple[KeyConfig, ...] = ()
    api_keys_file: Path | None = Field(None, description="YAML list of the same shape as api_keys.")
    log_json: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.accelerator_type is not None and self.accelerator == "cpu":
            msg = "accelerator_type goes with accelerator: cuda"
            raise ValueError(msg)
        if self.kv_transfer.buffer_device == "cuda" and self.accelerator == "cpu":
            msg = "kv_transfer.buffer_device: cuda needs accelerator: cuda"
            raise ValueError(msg)
        if len(set(self.warmup_tokens)) < 2:  # noqa: PLR2004 - a line needs two points
            msg = "warmup_tokens needs at least two different lengths"
            raise ValueError(msg)
        if self.max_model_len is not None and max(self.warmup_tokens) >= self.max_model_len:
            msg = f"warmup_tokens must stay below max_model_len ({self.max_model_len})"
            raise ValueError(msg)
        self._side_channels_apart()
        return self

    def _side_channels_apart(self) -> None:
        transfer = self.kv_transfer
        first, last, pool = min(
            [
                (transfer.prefill_port, transfer.decode_port, self.prefill),
                (transfer.decode_port, transfer.prefill_port, self.decode),
            ],
            key=lambda side: side[0],
        )
        needed = pool.replicas * pool.tensor_parallel_size
        if last - first < needed:
            msg = (
                f"kv_transfer: ports from {first} on need {needed} in a row, one per worker; "
                f"they run into {last}"
            )
            raise ValueError(msg)

    def tenant_limits(self) -> dict[str, TenantLimit]:
        """Limits of the tenants that have some of their own.

        Raises:
            ConfigError: when the key file cannot be read, or two keys give one tenant different limits.
        """
        limits: dict[str, TenantLimit] = {}
        for key in self._keys():
            if key.limits is None:
                continue
            limit = key.limits.limit()
            if limits.setdefault(key.tenant, limit) != limit:
                msg = f"api_keys: the keys of tenant {key.tenant!r} have different limits"
                raise ConfigError(msg)
        return limits

    def _keys(self) -> list[KeyConfig]:
        return [*self.api_keys, *_keys_from(self.api_keys_file)]

    def router_timeout_s(self) -> float:
        """How long the router is waited for."""
        by_default_ms = 500.0 if self.accelerator == "cpu" else 50.0
        return (self.router.timeout_ms or by_default_ms) / 1e3

    def key_ring(self) -> KeyRing:
        """The configured API keys.

        Raises:
            ConfigError: when the key file cannot be read, a variable is not set or two keys are equal.
        """
        keys = self._keys()
        secrets = [key.secret() for key in keys]
        if len(set(secrets)) < len(secrets):
            msg = "api_keys: two tenants have the same key"
            raise ConfigError(msg)
        return KeyRing(
            (secret, Tenant(key.tenant, key.highest_tier)) for secret, key in zip(secrets, keys, strict=True)
        )


def parse(values: dict[str, Any], source: str = "configuration") -> SlackServeConfig:
    """Check `values`.

    Raises:
        ConfigError: naming each wrong key, its place in `source` and what would be right.
    """
    try:
        return SlackServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, source)) from None


def load(path: Path) -> SlackServeConfig:
    """Read a YAML file.

    Raises:
        ConfigError: when it cannot be read, is not YAML, or holds values that cannot be used.
    """
    return parse(read_mapping(path, ConfigError), str(path))


def _keys_from(path: Path | None) -> tuple[KeyConfig, ...]:
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
