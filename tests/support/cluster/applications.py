"""The application that a cluster is given, of a tiny model, and whether it is ready."""

from __future__ import annotations

from nodes import ROOT
from ports import side_channels

from deployments.local.launcher import get_json

TIER = "slackserve.io/tier"
"""The label of a node that says which tier runs there."""
TIERS = {
    "premium": {"ttft_ms": 30_000, "sheddable": False, "weight": 4},
    "standard": {"ttft_ms": 30_000, "weight": 2},
    "background": {"weight": 1},
}
HOSTS = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
"""Environment of engines on hosts of their own: on one machine after all, they would share its memory."""


def arguments(model, *, ingress, prefill, decode, **more):
    """What the application is built from; each part runs on the nodes of its label."""
    return {
        "model": str(model),
        "model_name": "tiny",
        "max_model_len": 16_384,
        "warmup_tokens": [32, 512],
        "node_labels": {TIER: ingress},
        "prefill": {"node_labels": {TIER: prefill}},
        "decode": {"node_labels": {TIER: decode}},
        "kv_transfer": side_channels(),
        "monitor": {"port": 0, "shed": False},
        "tiers": TIERS,
        **more,
    }


def serving(args, port, environment=(), *, on_every_node=False):
    """Serve's configuration of it, with a proxy on the head, or on every node for others too."""
    return {
        "proxy_location": "EveryNode" if on_every_node else "HeadOnly",
        "http_options": {"host": "0.0.0.0" if on_every_node else "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "slackserve",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT), **dict(environment)}},
                "args": args,
            }
        ],
    }


def is_ready(url):
    """Whether a server there says so."""
    return (get_json(f"{url}/ready") or {}).get("status") == "ready"
