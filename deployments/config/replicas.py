"""The replicas of a model: how many there are in each tier, where they run, and how KV moves between them."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from slo.autoscaling.scaler import DECODE_BUSY, PREFILL_BUSY, ScalingRules
from slo.files.strict_yaml import Positive, Section
from slo.liveness import HUNG_AFTER_S
from slo.objectives import MAX_OBJECTIVE_MS
from slo.predict.handoff import TransferFit

LAST_PORT: Final = 65535
CUDA_HUNG_AFTER_S: Final = 30.0
MAX_LEAVE_S: Final = 86_400
"""The longest that `slackserve leave` waits for what a node has, which may take drain_s and lease_s."""
_MAX_LEASE_S: Final = 3600
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]


class PoolConfig(Section):
    """One tier of replicas: how many, how large, and engine arguments beyond ours."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    min_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="With max_replicas, the fewest replicas; by default as many as at the start."
    )
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="The tier grows up to so many replicas, by the load; none keeps their number."
    )
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 4096
    drain_s: Positive = Field(
        30.0, description="How long a replica that is shut down may take to finish what it has."
    )
    hung_after_s: Positive | None = Field(
        None,
        description="An engine that has work has failed when it has made no progress for longer, and for "
        f"five times what its pass should take; by default {HUNG_AFTER_S:g} on cpu, and "
        f"{CUDA_HUNG_AFTER_S:g} on cuda, where a kernel may be compiled at its first use.",
    )
    node_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray node labels that a node must have to run these replicas."
    )
    accelerator_type: str | None = Field(None, description="By default the deployment's accelerator_type.")
    gpus_per_worker: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Part of a GPU that each worker takes, on cuda; workers of both tiers can share one."
    )
    across_nodes: bool = Field(
        default=False, description="On cuda, let the workers of one replica be on several nodes."
    )
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Passed to vLLM's AsyncEngineArgs; ours cannot be overridden."
    )

    def hung_after(self, accelerator: str) -> float:
        """Seconds without progress before which no engine counts as hung."""
        if self.hung_after_s is not None:
            return self.hung_after_s
        return HUNG_AFTER_S if accelerator == "cpu" else CUDA_HUNG_AFTER_S

    @property
    def fewest(self) -> int:
        """The fewest replicas that there are at any time."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """The most replicas that there are at any time."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    def apart_from(self, decode: "PoolConfig") -> str | None:
        """What is wrong where KV cannot move from whole workers to whole workers, as NIXL asks; else None."""
        degrees = (self.tensor_parallel_size, decode.tensor_parallel_size)
        if max(degrees) % min(degrees) == 0:
            return None
        return (
            f"prefill.tensor_parallel_size ({degrees[0]}) and decode.tensor_parallel_size ({degrees[1]}): "
            "one has to be a multiple of the other, as KV moves between whole workers"
        )

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_replicas is not None and self.max_replicas is None:
            msg = "min_replicas goes with max_replicas"
            raise ValueError(msg)
        if not self.fewest <= self.replicas <= self.most:
            msg = (
                f"replicas, with which the tier starts, are {self.replicas}, which is not between "
                f"min_replicas and max_replicas, {self.fewest} and {self.most}"
            )
            raise ValueError(msg)
        return self

    @field_validator("drain_s")
    @classmethod
    def _within_what_a_node_is_given(cls, value: float) -> float:
        if value > (most_s := MAX_LEAVE_S - _MAX_LEASE_S):
            msg = (
                f"give at most {most_s}: with a kv_transfer.lease_s of up to {_MAX_LEASE_S} it has to end "
                f"within the {MAX_LEAVE_S} s that `slackserve leave --within` takes"
            )
            raise ValueError(msg)
        return value

    @field_validator("engine_kwargs")
    @classmethod
    def _ours_stay(cls, values: dict[str, Any]) -> dict[str, Any]:
        for key in values:
            if key in _RESERVED_ENGINE_KWARGS:
                msg = f"engine_kwargs may not set {key!r}; {_RESERVED_ENGINE_KWARGS[key]}"
                raise ValueError(msg)
        return values

    @field_validator("engine_kwargs")
    @classmethod
    def _of_their_kinds(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What is read before vLLM reads it, or fails in a replica only; what is null is as if not given."""
        given = {key: value for key, value in values.items() if value is not None}
        for key in _MAPPINGS & given.keys():
            if not isinstance(given[key], dict):
                raise ValueError(f"{key!r} has keys and values of its own, not {given[key]!r}")  # noqa: TRY004 - pydantic wants it
        for key in _COUNTS & given.keys():
            if type(given[key]) is not int or given[key] < 1:
                raise ValueError(f"{key!r} is a number from 1 on, not {given[key]!r}")
        tokens, streams = given.get("max_num_batched_tokens"), given.get("max_num_seqs", 1)
        if tokens is not None and tokens < streams:
            msg = (
                f"max_num_batched_tokens ({tokens}) is less than max_num_seqs ({streams}), each of which "
                "takes one at least; raise the one or lower the other"
            )
            raise ValueError(msg)
        return given


_RESERVED_ENGINE_KWARGS = {
    "model": "use the key model",
    "tokenizer": "it comes with the model",
    "tensor_parallel_size": "use the pool's tensor_parallel_size",
    "max_model_len": "use the key max_model_len",
    "dtype": "use the key dtype",
    "kv_transfer_config": "use the section kv_transfer",
    "scheduler_cls": "SlackServe brings its own",
    "worker_cls": "SlackServe brings its own",
    "disable_log_stats": "SlackServe's metrics need the statistics",
    "scheduling_policy": "SlackServe orders by slack",
    "served_model_name": "use the key model_name",
    **dict.fromkeys(
        ("pipeline_parallel_size", "prefill_context_parallel_size"),
        "a replica has workers for tensor parallelism only: use the pool's tensor_parallel_size, or replicas",
    ),
    **dict.fromkeys(
        (
            "data_parallel_address",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_rank",
            "data_parallel_rpc_port",
            "data_parallel_size",
            "data_parallel_size_local",
            "data_parallel_start_rank",
        ),
        "use the pool's replicas",
    ),
    **dict.fromkeys(
        ("master_addr", "master_port", "nnodes", "node_rank"),
        "Ray places the workers of a replica: use the pool's across_nodes",
    ),
    "hf_token": "Ray shows the configuration: set HF_TOKEN where the replicas run",
    "kv_events_config": "it tells whoever connects the token ids of all prompts",
    "distributed_executor_backend": "it follows the accelerator",
    "otlp_traces_endpoint": "use the section tracing",
    "enable_lora": "use the section lora",
    "lora_modules": "use the section lora",
    "max_loras": "use the section lora",
    "max_lora_rank": "use the section lora",
    **dict.fromkeys(
        ("spec_method", "spec_model", "spec_tokens"),
        "use speculative_config, as {method: ngram, num_speculative_tokens: 4}",
    ),
    **dict.fromkeys(
        ("kv_offloading_size", "kv_offloading_backend"),
        "SlackServe has no prefix cache beyond the engines' own memory: leave it out",
    ),
    **dict.fromkeys(
        ("max_num_queued_reqs", "max_num_queued_tokens"),
        "SlackServe bounds queues before a replica is chosen: use admission.max_backlog_s, or the pool's "
        "max_ongoing_requests",
    ),
    "stream_interval": "the first token that decode adds tells that the KV cache has come: leave it out",
}
_MAPPINGS: Final = frozenset(
    {
        "additional_config",
        "default_chat_template_kwargs",
        "hf_overrides",
        "override_generation_config",
        "speculative_config",
        "structured_outputs_config",
    }
)
_COUNTS: Final = frozenset({"max_num_batched_tokens", "max_num_seqs"})


class AutoscalingConfig(Section):
    """How tiers of replicas with a max_replicas follow the load."""

    start_s: Positive = Field(60.0, description="How long a replica takes from its order until it serves.")
    keep_s: Positive = Field(300.0, description="Replicas are kept that were needed within this time.")
    busy: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Part of their time, or of decode's memory or pace, that replicas are planned to be in "
        "use; by default all of prefill's and 0.8 of decode's.",
    )

    def rules(self, pool: PoolConfig, *, is_prefill: bool) -> ScalingRules:
        """The same in the vocabulary of the rule."""
        by_default = PREFILL_BUSY if is_prefill else DECODE_BUSY
        busy = by_default if self.busy is None else self.busy
        return ScalingRules(pool.fewest, pool.most, self.start_s, self.keep_s, busy)


class KVLinkConfig(Section):
    """What KV moves over, as the router reckons with it."""

    bytes_per_token: Annotated[int, Field(ge=1)] = Field(description="KV bytes of one token, all layers.")
    gigabytes_per_s: Positive = Field(description="Bandwidth into one decode replica, 10^9 bytes per second.")
    latency_ms: Annotated[float, Field(ge=0, le=MAX_OBJECTIVE_MS)] = 0.0

    def link(self) -> TransferFit:
        """The same in the router's vocabulary."""
        return TransferFit(self.latency_ms / 1e3, self.bytes_per_token / (self.gigabytes_per_s * 1e9))


class KVTransferConfig(Section):
    """How KV blocks move from prefill to decode."""

    link: KVLinkConfig | None = Field(
        None,
        description="What KV moves over, which local_below reckons with; none takes the profile's.",
    )

    buffer_device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where NIXL reads and writes blocks; auto follows the accelerator."
    )
    lease_s: Annotated[int, Field(ge=6, le=_MAX_LEASE_S)] = Field(
        30, description="Seconds that finished prefill blocks wait for decode to pull them."
    )
    local_below: Annotated[int, Field(ge=0, le=8192)] = Field(
        0,
        description="Prompts of at most so many tokens are computed by decode where that is predicted to "
        "delay it and its streams less than the way through prefill delays the prompt; 0 for none.",
    )
    prefill_port: Port = Field(20000, description="First NIXL side-channel port of prefill replicas.")
    decode_port: Port = Field(22000, description="First NIXL side-channel port of decode replicas.")
