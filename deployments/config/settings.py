"""The configuration of a deployment: parsed once, strict, and refused before anything starts.

Owns the whole and how it is read; sections have modules of their own beside this one. An unknown key is
refused with the nearest valid one; values that cannot work together are refused with the reason.
`slackserve serve`, `serve run`, `serve deploy` and a RayService all go through `SlackServeConfig`.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from deployments.config import ConfigError
from deployments.config.admission import AdmissionConfig, FairnessConfig
from deployments.config.degraded import DegradedConfig
from deployments.config.keys import KeyConfig, KeySource, in_the_open, unknown_tier
from deployments.config.limits import LimitsConfig
from deployments.config.lora import LoraConfig
from deployments.config.models import GivenName, ModelName, ModelSection
from deployments.config.monitor import MonitorConfig
from deployments.config.preemption import PreemptionConfig
from deployments.config.pressure import PressureConfig
from deployments.config.replicas import LAST_PORT, AutoscalingConfig, KVTransferConfig, PoolConfig, Port
from deployments.config.router import RouterSection
from deployments.config.tiers import TiersConfig
from deployments.config.tls import TLSConfig
from deployments.config.tracing import TracingConfig
from slo.files.strict_yaml import Address, Section, TierName, explain, nearest, read_mapping
from slo.objectives import MAX_OBJECTIVE_MS


class GrpcConfig(Section):
    """The gRPC API of `slackserve serve`; elsewhere `grpc_options` of the Serve configuration says this."""

    port: Port | None = Field(None, description="Port on every address; none serves HTTP only.")
    reflection: bool = Field(
        default=False, description="Tell anybody, without a key, which services and messages there are."
    )


class SlackServeConfig(Section):
    """Everything that a deployment can be told."""

    # Secrets may be in what is refused, and Serve logs what pydantic says of it.
    model_config = ConfigDict(hide_input_in_errors=True)

    model: str | None = Field(
        None, description="Hugging Face id or directory; none serves the embedded SmolLM2-135M-Instruct."
    )
    model_name: GivenName | None = Field(None, description="What clients call the model; by default its id.")
    models: dict[ModelName, ModelSection] = Field(
        default_factory=dict,
        max_length=16,
        description="Further models, each with replicas of its own, by what clients call them.",
    )
    accelerator: Literal["cpu", "cuda"] = "cpu"
    accelerator_type: str | None = Field(None, description="Ray's accelerator type, for example H100.")
    dtype: str | None = Field(None, description="By default float32 on cpu, auto on cuda.")
    max_model_len: Annotated[int, Field(ge=64)] | None = Field(
        None, description="Longest prompt plus output, tokens; by default what the model allows."
    )
    kv_cache_gib: Annotated[int, Field(ge=1)] = Field(1, description="KV cache per worker on cpu, GiB.")
    host: Address = "127.0.0.1"
    port: Port = 8000
    tls: TLSConfig | None = Field(None, description="Serve HTTPS on the port; none serves plain HTTP.")
    grpc: GrpcConfig = GrpcConfig()
    ray_metrics_port: Port | None = Field(
        None,
        description="Where Ray exports all metrics but the monitor's, on every address; none takes a free "
        "port, another one at each start.",
    )
    ingress_replicas: Annotated[int, Field(ge=1, le=100)] = Field(
        1, description="Processes that take requests; several with `node_labels` are on a node each."
    )
    node_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray node labels that a node must have to run ingress and router."
    )
    pin_cores: bool = Field(default=True, description="On cpu, give each replica cores of its own.")
    tiers: TiersConfig = TiersConfig()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    lora: LoraConfig = LoraConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    pressure: PressureConfig = PressureConfig()
    fairness: FairnessConfig = FairnessConfig()
    admission: AdmissionConfig = AdmissionConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    router: RouterSection = RouterSection()
    degraded: DegradedConfig = DegradedConfig()
    limits: LimitsConfig = LimitsConfig()
    monitor: MonitorConfig = MonitorConfig()
    tracing: TracingConfig = TracingConfig()
    profile: Path | None = Field(
        None, description="Prefill times written by `slackserve calibrate`; none measures at start."
    )
    handoff_ms: Annotated[float, Field(ge=0, le=MAX_OBJECTIVE_MS)] | None = Field(
        None, description="Predicted time from the end of prefill to the first token, without a profile."
    )
    warmup_tokens: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, min_length=2, description="Prompt lengths that are prefilled before ready."
    )
    api_keys: tuple[KeyConfig, ...] = ()
    api_keys_file: Path | None = Field(
        None, description="YAML list of the same shape as api_keys; read again when it changes."
    )
    anonymous_tier: TierName | None = Field(
        None, description="The highest tier of requests while no API keys are configured; by default any."
    )
    log_json: bool = False

    @model_validator(mode="after")
    def _no_speculation_under_pressure(self) -> Self:
        if self.pressure.enabled and self.decode.engine_kwargs.get("speculative_config") is not None:
            msg = "pressure.enabled: decode cannot speculate then; remove decode's speculative_config"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _steps_ahead_where_it_can_be(self) -> Self:
        if "async_scheduling" in self.prefill.engine_kwargs:
            msg = (
                "prefill.engine_kwargs may not set 'async_scheduling'; SlackServe sets it: "
                "off wherever a step may be stopped"
            )
            raise ValueError(msg)
        if self.decode.engine_kwargs.get("async_scheduling", False) is not False:
            msg = "decode.engine_kwargs may set 'async_scheduling' to false only; it is on where it can be"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _one_name_for_chunks(self) -> Self:
        if "long_prefill_token_threshold" in self.decode.engine_kwargs:
            msg = (
                "decode.engine_kwargs may not set 'long_prefill_token_threshold'; use degraded.chunk_tokens, "
                "which sets it"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _ranks_on_gpus_of_their_own(self) -> Self:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if pool.gpus_per_worker < 1 and pool.tensor_parallel_size > 1:
                msg = (
                    f"{name}.gpus_per_worker below 1 goes with tensor_parallel_size: 1: Ray gives all ranks "
                    "of a replica parts of the same GPU, where NCCL refuses to run two"
                )
                raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _kv_cache_of_cpus(self) -> Self:
        if self.accelerator == "cuda" and "kv_cache_gib" in self.model_fields_set:
            msg = (
                "kv_cache_gib goes with accelerator: cpu; on cuda use gpu_memory_utilization in "
                "engine_kwargs, of which the KV cache is a part"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _no_gpu_settings_on_cpus(self) -> Self:
        settings = {"accelerator_type": self.accelerator_type is not None}
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            settings |= {
                f"{name}.accelerator_type": pool.accelerator_type is not None,
                f"{name}.gpus_per_worker": pool.gpus_per_worker != 1,
                f"{name}.across_nodes": pool.across_nodes,
            }
        for key, is_set in settings.items():
            if is_set and self.accelerator == "cpu":
                msg = f"{key} goes with accelerator: cuda"
                raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _autoscaling_knows_the_load(self) -> Self:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if pool.max_replicas is not None and not self.monitor.enabled:
                msg = f"{name}.max_replicas needs monitor.enabled: the monitor knows the load"
                raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _transfer_can_work(self) -> Self:
        if self.kv_transfer.buffer_device == "cuda" and self.accelerator == "cpu":
            msg = "kv_transfer.buffer_device: cuda needs accelerator: cuda"
            raise ValueError(msg)
        if self.kv_transfer.local_below and not self.degraded.local_prefill:
            msg = (
                "kv_transfer.local_below needs degraded.local_prefill, by whose means decode computes prompts"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _warm_up_teaches_a_line(self) -> Self:
        if (named := self.warmup_tokens) is None:  # a replica cuts the default's to its model
            return self
        if len(set(named)) < 2:  # noqa: PLR2004 - a line needs two points
            msg = "warmup_tokens needs at least two different lengths"
            raise ValueError(msg)
        if self.max_model_len is not None and max(named) >= self.max_model_len:
            msg = f"warmup_tokens must stay below max_model_len ({self.max_model_len})"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        tiers = self.tiers.tier_set()
        for problem in (
            in_the_open(self.api_keys),
            unknown_tier(self.api_keys, tiers),
            self.prefill.apart_from(self.decode),
        ):
            if problem is not None:
                raise ValueError(problem)
        if self.anonymous_tier is not None and self.anonymous_tier not in tiers.names:
            hint = nearest(self.anonymous_tier, tiers.names)
            raise ValueError(f"anonymous_tier: there is no tier {self.anonymous_tier!r}; {hint}")
        return self

    @model_validator(mode="after")
    def _side_channels_apart(self) -> Self:
        sides = sorted(
            (port, pool.most * pool.tensor_parallel_size)
            for each in self.of_each_model()
            for port, pool in (
                (each.kv_transfer.prefill_port, each.prefill),
                (each.kv_transfer.decode_port, each.decode),
            )
        )
        last, most = sides[-1]
        if last + most - 1 > LAST_PORT:
            msg = (
                f"kv_transfer: ports from {last} on need {most} in a row, one per worker; "
                f"they run beyond {LAST_PORT}"
            )
            raise ValueError(msg)
        for (first, needed), (following, _) in pairwise(sides):
            if following - first < needed:
                msg = (
                    f"kv_transfer: ports from {first} on need {needed} in a row, one per worker; "
                    f"they run into {following}"
                )
                raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _adapters_run_eagerly(self) -> Self:
        if self.lora.adapters and self.preemption.compiled:
            msg = "preemption.compiled: compiled passes with LoRA adapters are not supported; leave out one"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _compiled_or_eager(self) -> Self:
        if self.preemption.compiled and self.prefill.engine_kwargs.get("enforce_eager"):
            msg = "preemption.compiled: prefill's enforce_eager: true has passes not compiled; leave out one"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _nothing_in_the_open_beside_tls(self) -> Self:
        if self.tls is not None and self.grpc.port is not None:
            msg = (
                "grpc.port: Ray Serve speaks gRPC without TLS, so that keys would be sent in the open; "
                "leave out tls and put a proxy that has it before both ports"
            )
            raise ValueError(msg)
        return self

    def of_each_model(self) -> tuple["SlackServeConfig", ...]:
        """The configuration of each model's replicas: this one's, and one for each of `models`.

        Raises:
            ValueError: One of them cannot work.
        """
        return tuple(self.by_section().values())

    def by_section(self) -> dict[str, "SlackServeConfig"]:
        """The same, by what stands before a key of theirs: nothing, or `models.coder.`.

        Raises:
            ValueError: One of them cannot work.
        """
        mine: dict[str, Any] = {key: getattr(self, key) for key in type(self).model_fields}
        named = {key: mine[key] for key in self.model_fields_set if key != "models"}
        found = {"": self}
        for place, (name, section) in enumerate(self.models.items(), 1):
            own = section.instead_of(mine, place) | {"model_name": name}
            try:
                found[f"models.{name}."] = type(self).model_validate(named | own)
            except ValidationError as error:
                raise ValueError(explain(error, f"models.{name}")) from None
        return found

    def names_given(self) -> tuple[str, ...]:
        """What all models are called; empty where the name of one depends on what is found under its id."""
        return () if self.model_name is None else (self.model_name, *self.models)

    def handoff_s(self) -> float:
        """Predicted time from the end of prefill to the first token, without a profile.

        Two calls between processes; where engines compute on the same cores, they wait for one.
        """
        by_default_ms = 50.0 if self.accelerator == "cpu" else 10.0
        return (by_default_ms if self.handoff_ms is None else self.handoff_ms) / 1e3

    def warm_up(self) -> tuple[int, ...]:
        """Prompt lengths that are prefilled before ready, as far as the model and one step take them.

        Up to a thousand tokens and more a GPU takes what the host needs to launch a pass: what a token takes
        shows in longer ones only.
        """
        return self.warmup_tokens or ((32, 256, 1024) if self.accelerator == "cpu" else (64, 512, 2048, 8192))

    def router_timeout_s(self) -> float:
        """How long the router is waited for."""
        by_default_ms = 500.0 if self.accelerator == "cpu" else 50.0
        return (self.router.timeout_ms or by_default_ms) / 1e3

    def key_source(self) -> KeySource:
        """The configured API keys.

        Raises:
            ConfigError: when the key file cannot be read or a variable is not set.
        """
        default = self.admission.default_limits.limit()
        return KeySource.of(
            self.api_keys, self.api_keys_file, self.tiers.tier_set(), default, self.anonymous_tier
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
