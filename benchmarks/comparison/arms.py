"""The servers that `comparison.run` compares: how each is started, what its settings are, and its end.

All serve the embedded model, or its first layers, in float32 on the same cores, with one prefill and one
decode replica, 1 GiB of KV cache each, no waiting for a batch of the stream, and the same environment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness.local_server import (
    SPINNING,
    embedded_settings,
    environment,
    serve_until_ready,
    start_until,
)
from benchmarks.harness.ray_application import says_ready
from deployments.local.ending import kill_after
from engine_host.processes import named_shared_memory
from slo.tiers import PREMIUM, STANDARD, Tier

PORT = 18441
NEVER_S = 3600.0
MODEL_LEN = 8192


@dataclass(frozen=True)
class ServerArm:
    """One of the compared servers.

    Attributes:
        name: As in the results.
        stock: Arguments of `stock_server.py`; None is ours.
        preemption: Ours: the mode.
        step_tokens: Ours: tokens of a prefill step.
        is_prioritised: Send vLLM's `priority` by tier.
        is_spinning: NIXL's progress threads spin, as its Python API has them.
        stop_within_ms: Ours: how long a stop may take, by which chunks are cut; None for the default.
        rules: Ours: what else of `preemption` differs from the defaults.
        pools: Tiers that have a server each, on the same cores; none is one server for all.
    """

    name: str
    stock: tuple[str, ...] | None = None
    preemption: str = "off"
    step_tokens: int = MODEL_LEN
    is_prioritised: bool = False
    is_spinning: bool = False
    pools: tuple[Tier, ...] = ()
    stop_within_ms: float | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """What distinguishes it, for the results."""
        if self.stock is None:
            return {
                "application": "slackserve",
                "preemption": self.preemption,
                "stop_within_ms": self.stop_within_ms,
                **self.rules,
                "max_num_batched_tokens": self.step_tokens,
            }
        return {
            "application": "ray.serve.llm.build_pd_openai_app",
            "arguments": list(self.stock),
            "progress_threads": "spinning" if self.is_spinning else "sleeping",
            "pools": list(self.pools),
        }


@dataclass(frozen=True)
class Chunking:
    """How stock vLLM cuts prompts: tokens of a step, and of one prompt in a step (0: all of them)."""

    tokens: int
    long_tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> Chunking:
        """From 512 or 512/384."""
        tokens, _, long_tokens = text.partition("/")
        return cls(int(tokens), int(long_tokens or 0))

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Chunking:
        """Of an arm of `TUNED`, from its `settings`."""
        if (tokens := settings.get("max_num_batched_tokens")) is not None:
            return cls(tokens)
        given = settings["arguments"]
        step, of_one = (given[given.index(name) + 1] for name in ("--chunk-tokens", "--long-tokens"))
        return cls(int(step), int(of_one))

    def __str__(self) -> str:
        """As it is given."""
        return f"{self.tokens}/{self.long_tokens}" if self.long_tokens else str(self.tokens)

    def arguments(self) -> tuple[str, ...]:
        """For `stock_server.py`."""
        return ("--chunk-tokens", str(self.tokens), "--long-tokens", str(self.long_tokens))


def chunked(name: str, chunking: Chunking) -> ServerArm:
    """An arm of `TUNED` with its chunks; `stock-priority` also has vLLM's priorities."""
    match name:
        case "slackserve-chunked":
            return ServerArm(name, step_tokens=chunking.tokens)
        case "stock-priority":
            return ServerArm(name, (*chunking.arguments(), "--priority"), is_prioritised=True)
        case "stock-pools":
            return ServerArm(name, chunking.arguments(), pools=(PREMIUM, STANDARD))
        case _:
            return ServerArm(name, chunking.arguments())


ANY_TIME_MS = 1e6
"""A stop may take any time: prompts are whole, or cut by `max_num_batched_tokens` alone."""
SHIPPED_TOKENS = 2048
"""vLLM's default of `max_num_batched_tokens`."""
FLOWPREFILL = {"order": "sedf", "policy": "conservative", "margin": 1.0}
"""S-EDF with suspend-and-resume, as in FlowPrefill, with our boundaries, chunks and limits."""
FIXED = {
    arm.name: arm
    for arm in (
        ServerArm("stock", ()),
        ServerArm("stock-shipped", Chunking(SHIPPED_TOKENS).arguments(), is_spinning=True),
        ServerArm("slackserve-off"),
        ServerArm("slackserve", preemption="resume"),
        ServerArm("slackserve-sedf", preemption="resume", rules=FLOWPREFILL),
        ServerArm("slackserve-whole", preemption="resume", stop_within_ms=ANY_TIME_MS),
    )
}
TUNED = {
    "stock-chunked": ("256", "512", "1024", "2048"),
    "stock-priority": ("128/64", "256/32", "256/64", "256/128", "512/64", "512/128", "512/384"),
    "stock-pools": ("256", "512", "1024", "2048"),
    "slackserve-chunked": ("128", "256", "512", "1024", "2048"),
}
"""Arms whose chunks are tuned before they are measured, and what is tried for them."""


@dataclass
class RunningServer:
    """A server that is up."""

    log: Path
    ready_s: float
    _read: int = field(default=0)

    url: str = f"http://127.0.0.1:{PORT}"

    def new_log(self) -> str:
        """What it has logged since the last call."""
        with self.log.open(errors="replace") as lines:
            lines.seek(self._read)
            text = lines.read()
            self._read = lines.tell()
        return text


@contextmanager
def running(arm: ServerArm, directory: Path, model: Path | None = None) -> Iterator[RunningServer]:
    """Start an arm's server of the embedded model or of another, and leave nothing of it behind."""
    before = named_shared_memory()
    log = directory / f"{arm.name}-{time.time():.0f}.log"
    started_s = time.monotonic()
    try:
        if arm.stock is None:
            _start_ours(arm, log, directory, model)
        else:
            command = ["benchmarks.comparison.stock_server", "--port", str(PORT)]
            command += ["--max-model-len", str(MODEL_LEN), *arm.stock]
            command += ["--model", str(model)] if model else []
            command += ["--pools", *arm.pools] if arm.pools else []
            env = environment(*([SPINNING] if arm.is_spinning else []))
            start_until(lambda: says_ready(log), command, log, env)
        yield RunningServer(log, time.monotonic() - started_s)
    finally:
        _end_children()
        for left in named_shared_memory() - before:  # stock engines that were killed leave theirs
            left.unlink(missing_ok=True)


def _end_children() -> None:
    """Ask the server to stop, and kill what is left of its processes; there are no other children."""
    us = psutil.Process()
    servers, family = us.children(), us.children(recursive=True)
    for server in servers:
        server.terminate()
    psutil.wait_procs(servers, timeout=90)
    kill_after(10, family)


def _start_ours(arm: ServerArm, log: Path, directory: Path, model: Path | None) -> None:
    settings = embedded_settings(
        max_model_len=MODEL_LEN,
        preemption={"mode": arm.preemption, "stop_within_ms": arm.stop_within_ms, **arm.rules},
        # All arms do the same work: nothing is refused, here nor by shedding below.
        admission={"max_backlog_s": NEVER_S, "max_late_backlog_s": NEVER_S, "calm_s": NEVER_S},
    )
    settings["prefill"] = settings.get("prefill", {}) | {
        "engine_kwargs": {"max_num_batched_tokens": arm.step_tokens}
    }
    if model:
        settings["model"] = str(model)
    for tier in settings["tiers"].values():
        tier["sheddable"] = False
    config = directory / f"{arm.name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    serve_until_ready(log, PORT, "--config", str(config), "--verbose")
