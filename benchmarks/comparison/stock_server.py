"""Ray Serve LLM's own prefill/decode application with the embedded model, as a peer of ours.

One prefill and one decode replica behind `ray.serve.llm.build_pd_openai_app`, on the same cores, with the
same KV cache, data type and environment as `slackserve serve` takes on this machine, and with its connector,
which keeps the engines off each other's cores. With `--pools` that for each of some pools, all on the same
cores, each at `/POOL/v1`. Runs until SIGTERM.

    python -m benchmarks.comparison.stock_server --port 8000 [--chunk-tokens 512] [--priority]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.harness.ray_application import until_stopped
from deployments.cli import QUIET_ENVIRONMENT, SERVE_ENVIRONMENT
from deployments.engines.cpu_plan import Workers, plan_cores
from deployments.engines.environment import cpu_environment
from deployments.models.store import ModelStore
from kv_transfer.connector import NixlConnector

PREFILL_NIXL_PORT = 24000
DECODE_NIXL_PORT = 26000
POOL_PORTS = 100
"""How far the ports of two pools are apart."""
LOGICAL_CPUS = 16
"""More than there are: most of the processes idle most of the time."""


def llm_config(role: str, cores: str, pool: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One tier of a pool. Only prefill is told about chunks; its steps take whole prompts without."""
    model = ModelStore().resolve(arguments.model)
    is_prefill = role == "kv_producer"
    engine_kwargs: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": arguments.max_model_len,
        "scheduling_policy": "priority" if arguments.priority else "fcfs",
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            # vLLM's own would have both engines compute on the machine's last core (`kv_transfer.connector`).
            "kv_connector_module_path": NixlConnector.__module__,
            "kv_role": role,
            "kv_buffer_device": "cpu",
        },
    }
    if is_prefill:
        engine_kwargs |= {
            "max_num_batched_tokens": arguments.chunk_tokens or arguments.max_model_len,
            "enable_chunked_prefill": arguments.chunk_tokens is not None,
            "long_prefill_token_threshold": arguments.long_tokens,
        }
    return {
        "model_loading_config": {"model_id": model.model_id, "model_source": model.source},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "engine_kwargs": engine_kwargs,
        "runtime_env": {
            "env_vars": {
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                **cpu_environment(kv_cache_gib=1),
            }
        },
        # Only spares the start a process that would find the model where it is.
        "callback_config": {"callback_class": "deployments.engines.environment.EngineLoadsModel"},
        "experimental_configs": {
            "stream_batching_interval_ms": arguments.batching_ms,
            "NIXL_SIDE_CHANNEL_PORT_BASE": (PREFILL_NIXL_PORT if is_prefill else DECODE_NIXL_PORT)
            + POOL_PORTS * pool,
        },
        "deployment_config": {"num_replicas": 1, "max_ongoing_requests": 4096},
    }


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", help="a directory; by default the embedded model")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--chunk-tokens", type=int, help="chunked prefill; without it whole prompts")
    parser.add_argument("--long-tokens", type=int, default=0, help="most of a chunk for one prompt")
    parser.add_argument("--priority", action="store_true", help="vLLM's scheduling by `priority`")
    parser.add_argument("--batching-ms", type=float, default=0, help="tokens within it are sent at once")
    parser.add_argument("--pools", nargs="+", help="names; without, one pool at /v1")
    arguments = parser.parse_args()

    for name, value in (SERVE_ENVIRONMENT | QUIET_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    cores = plan_cores(sorted(os.sched_getaffinity(0)), Workers())[0]
    with until_stopped(address="local", num_cpus=LOGICAL_CPUS, include_dashboard=False, log_to_driver=True):
        serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
        for number, pool in enumerate(arguments.pools or [""]):
            app = build_pd_openai_app(
                {
                    "prefill_config": llm_config("kv_producer", cores.prefill[0], number, arguments),
                    "decode_config": llm_config("kv_consumer", cores.decode[0], number, arguments),
                    "ingress_deployment_config": {
                        "num_replicas": 1,
                        "autoscaling_config": None,
                        "max_ongoing_requests": 100_000,
                        "ray_actor_options": {"num_cpus": 0.1},
                    },
                }
            )
            serve.run(app, name=f"stock{pool}", route_prefix=f"/{pool}")


if __name__ == "__main__":
    main()
