"""Starts a deployment on this machine, shows how far it is, and takes it down again without a trace.

Owns the local Ray and its processes for `slackserve serve`. What is deployed is `deployments.app`'s.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import os
import signal
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from deployments.grpc import SERVICERS
from deployments.http.door import Door
from deployments.http.proxy import IMPORT_PATH, LIMITS_VARIABLE
from deployments.local.checks import CHECKS_OF_THIS_MACHINE, check_ports
from deployments.local.ending import HANGING, StopRequested, kill_after
from deployments.local.machine import check_gpus, cpus_needed
from deployments.local.ray_access import keep_session, keep_token, open_ray
from deployments.names import DECODE_PREFIX, PREFILL_PREFIX
from engine_host.cores import usable_cores
from prefill_node.board.board import remove_stale_boards
from telemetry.reporting.of_model import named

if TYPE_CHECKING:
    from deployments.config.settings import SlackServeConfig

APP_NAME: Final = "slackserve"
_POLL_S: Final = 1.0
"""Between two looks at the parts: each takes CPU that they need to start."""
_STOP_TIMEOUT_S: Final = 20.0
_LOOK_S: Final = 0.2
_ENDING_S: Final = 5.0


class StartError(Exception):
    """The deployment did not come up; the message says which part and why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that is being waited for."""

    name: str
    state: str
    done: bool


class LocalDeployment:
    """One deployment on a Ray of its own.

    Args:
        config: What is deployed.
        verbose: Show the logs of all processes on this terminal.

    Attributes:
        has_begun: Whether there is anything to stop.
        is_stopping: Whether `stop` was called.
        logs: Where its Ray logs, once that has started.
        gpus: How many Ray has found.
    """

    def __init__(self, config: SlackServeConfig, *, verbose: bool = False) -> None:
        self._config = config
        self._models = {each.model_name or "": each for each in config.of_each_model()}
        self._verbose = verbose
        self._processes: list[psutil.Process] = []
        self._gcs: list[psutil.Process] = []
        self._raylet: list[psutil.Process] = []
        self.has_begun = False
        self.is_stopping = False
        self.logs: Path | None = None
        self.gpus = 0.0
        self._door: Door | None = None

    @property
    def url(self) -> str:
        """Where the API answers."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)  # noqa: S104
        scheme = "http" if self._config.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._config.port}"

    def start(self, show: Callable[[list[Part]], None], timeout_s: float | None = None) -> None:
        """Bring everything up and return once both tiers are warm.

        `show` is called about once a second with what is being waited for; it may raise `StopRequested`.
        Without a limit it takes as long as it takes: nobody knows how long a model is downloaded.

        Raises:
            ConfigError: when the configuration cannot work here.
            StartError: when a part fails, or time is up.
            StopRequested: when `show` does, or a SIGTERM comes while Ray starts.
        """
        for check in CHECKS_OF_THIS_MACHINE:
            check(self._config)
        check_ports(self._config)
        tls = self._config.tls
        self._door = Door.at(self._config.host, self._config.port, {} if tls is None else tls.http_options())
        os.environ.update(self._door.environment())
        started_s = time.monotonic()
        self._deploy(show)
        while True:
            parts = self._parts()
            show(parts)
            if all(part.done for part in parts):
                break
            if timeout_s is not None and time.monotonic() - started_s > timeout_s:
                waiting = ", ".join(f"{part.name} ({part.state})" for part in parts if not part.done)
                msg = (
                    f"not ready after {timeout_s:.0f} s (--timeout); still waiting for {waiting}; where a "
                    "model is being downloaded, start again with more: files that have come are kept"
                )
                raise StartError(msg)
            time.sleep(_POLL_S)
        self._processes = psutil.Process().children(recursive=True)

    def stop(self) -> int:
        """Take everything down; returns how many processes had to be killed.

        Where Ray does not answer, all of it is, and this process has to end by `end_process`.
        """
        import ray  # noqa: PLC0415 - takes seconds to import

        self.is_stopping = True
        if self._door is not None:
            self._door.close()
        processes = {*self._processes, *psutil.Process().children(recursive=True)}
        patience_s = _ENDING_S
        if ray.is_initialized():
            stopping = threading.Thread(target=_shut_down, name=HANGING, daemon=True)
            # Ray reports the end of its own shutdown task as a failure, on stdout.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                stopping.start()
                _join(stopping, self._gcs)
                if stopping.is_alive():  # a Ray that is shut down under it would abort this process
                    patience_s = 0.0
                else:
                    ray.shutdown()
        return _end(processes, patience_s)

    def is_lost(self) -> bool:
        """Whether a part of Ray has ended that it needs, and not because `stop` was called."""
        return not self.is_stopping and (_has_ended(self._gcs) or _has_ended(self._raylet))

    def can_answer(self) -> bool:
        """Whether requests may be answered: without the GCS they are for a while, without the raylet not."""
        return not _has_ended(self._raylet)

    def kill(self) -> int:
        """End all processes at once, from any thread; returns how many there were."""
        return _end({*self._processes, *psutil.Process().children(recursive=True)}, 0.0)

    def _deploy(self, show: Callable[[list[Part]], None]) -> None:
        """Start Ray here and import the application in another thread meanwhile, 10 s each.

        Ray's processes die with the thread that started them, so that must be this one.
        """
        self.has_begun = True
        show([Part("Ray and the application", "starting", done=False)])
        if not self._verbose:
            logging.disable(logging.WARNING)  # in this process only; the replicas log to files
        with ThreadPoolExecutor(max_workers=1) as pool:
            importing = pool.submit(importlib.import_module, "deployments.app")
            self._start_ray()
            application = importing.result().application
        from ray import serve  # noqa: PLC0415 - imported already by now

        show([Part("application", "being submitted", done=False)])
        app = application(self._config, usable_cores())
        serve.run_many(
            [serve.RunTarget(app, name=APP_NAME, route_prefix="/")], wait_for_applications_running=False
        )

    def _start_ray(self) -> None:
        import ray  # noqa: PLC0415 - takes seconds to import
        from ray import serve  # noqa: PLC0415

        os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", IMPORT_PATH)
        os.environ[LIMITS_VARIABLE] = self._config.limits.model_dump_json()
        keep_token()
        with _handler_kept(), _hang_ups_blocked():
            started = ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, cpus_needed(self._config)),
                include_dashboard=False,
                log_to_driver=self._verbose,
                logging_level="INFO" if self._verbose else "ERROR",
                _metrics_export_port=self._config.ray_metrics_port,
            )
        session = Path(started.address_info["session_dir"])
        keep_session(session)
        self.logs = session / "logs"
        of_ray = psutil.Process().children()
        self._gcs = [each for each in of_ray if _is_named(each, "gcs_server")]
        self._raylet = [each for each in of_ray if _is_named(each, "raylet")]
        check_ray_is_closed()
        resources = ray.cluster_resources()
        check_gpus(self._config, resources)
        self.gpus = resources.get("GPU", 0.0)
        given = self._config.grpc
        if given.port is None:
            serve.start(proxy_location="Disabled")
            return
        # Serve's proxy for gRPC is also one for HTTP.
        serve.start(
            http_options={"host": "127.0.0.1", "port": _some_port()},
            grpc_options={
                "port": given.port,
                "grpc_servicer_functions": list(SERVICERS),
                "enable_reflection": given.reflection,
            },
        )

    def _parts(self) -> list[Part]:
        from ray import serve  # noqa: PLC0415 - imported already by now

        app = serve.status().applications.get(APP_NAME)
        if app is None:
            return [Part("application", "being submitted", done=False)]
        parts = []
        for name, deployment in app.deployments.items():
            if deployment.status.value in {"DEPLOY_FAILED", "UNHEALTHY"}:
                raise StartError(f"{name} failed to start:\n{deployment.message}")
            states = {str(state): count for state, count in deployment.replica_states.items() if count}
            running, total = states.get("RUNNING", 0), sum(states.values())
            done = deployment.status.value == "HEALTHY" or running >= self._suffices(name)
            parts.append(Part(name.replace(":", " "), f"{running} of {max(total, 1)} replicas", done))
        if app.status.value == "DEPLOY_FAILED":
            raise StartError(f"the application failed to start:\n{app.message}")
        ready, state = (False, "waiting for the tiers") if not all(p.done for p in parts) else self._ready()
        return [*parts, Part("ready", state, ready)]

    def _suffices(self, deployment: str) -> float:
        """With how many replicas a tier that follows the load has started; infinite for all else.

        To Serve it is healthy only while no more are on order, which under load may wait for hardware.
        """
        tier, colon, model = deployment.partition(":")
        config = named(self._models, model) or self._config
        pool = {PREFILL_PREFIX: config.prefill, DECODE_PREFIX: config.decode}.get(tier + colon)
        return math.inf if pool is None or pool.max_replicas is None else pool.fewest

    def _ready(self) -> tuple[bool, str]:
        tls = self._config.tls
        answer = get_json(f"{self.url}/ready?all", trust=None if tls is None else tls.trust())
        if answer is None:
            return False, "the port does not answer yet"
        return answer.get("status") == "ready", str(answer.get("reason", answer.get("status")))


@contextmanager
def _handler_kept() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, for which `ray.init` installs one that raises SystemExit.

    Raises:
        StopRequested: when a SIGTERM has come, so that Ray's handler has raised.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)
    except SystemExit:
        raise StopRequested from None


@contextmanager
def _hang_ups_blocked() -> Iterator[None]:
    """Have the processes that this thread starts never see SIGHUP; Ray does so with SIGINT.

    A terminal that is closed sends it to all of them. This process, which then has them finish what is under
    way, gets it in another thread, or later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(processes: Iterable[psutil.Process], patience_s: float) -> int:
    killed = kill_after(patience_s, processes)
    remove_stale_boards()  # a replica that was killed while it started has left one
    return killed


def _join(stopping: threading.Thread, needed: list[psutil.Process]) -> None:
    """Wait for a thread, and no longer than the processes run that it needs."""
    until_s = time.monotonic() + _STOP_TIMEOUT_S
    while stopping.is_alive() and time.monotonic() < until_s and any(map(_is_running, needed)):
        stopping.join(_LOOK_S)


def _is_named(process: psutil.Process, name: str) -> bool:
    try:
        return bool(process.name() == name)
    except psutil.NoSuchProcess:
        return False


def _has_ended(part: list[psutil.Process]) -> bool:
    """Whether a part of Ray has begun and runs no more."""
    return bool(part) and not any(map(_is_running, part))


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _shut_down() -> None:
    """End what Serve runs, and then the monitor, which an ingress would start again."""
    from ray import serve  # noqa: PLC0415 - takes seconds to import

    from deployments.monitor.actor import stop_monitor  # noqa: PLC0415 - likewise

    serve.shutdown()
    stop_monitor(APP_NAME)


def get_json(url: str, timeout_s: float = 5.0, trust: ssl.SSLContext | None = None) -> dict[str, Any] | None:
    """The JSON that a GET answers with, whatever the status; None when there is no answer.

    Past any proxy that the environment names: the server is on this machine.

    Args:
        url: What is asked for.
        timeout_s: Longest wait.
        trust: Which certificates a server may have; by default what the system trusts.
    """
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)]
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=timeout_s) as response:
            return json.load(response)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        try:
            return json.load(error)  # type: ignore[no-any-return]
        except ValueError:
            return None
    except (OSError, ValueError):
        return None


def check_ray_is_closed() -> None:
    """Make sure that nobody runs code on this machine who merely reaches a port of Ray's or of a replica.

    Where Ray's own processes listen says nothing of that: Serve's replicas listen on every address.

    Raises:
        StartError: when the Ray that was started asks for no token. A Ray of `ray.init` asks for one unless
            `RAY_AUTH_MODE` says otherwise, and puts that into the environment.
    """
    if (mode := os.environ.get("RAY_AUTH_MODE", "")).lower() != "token":
        raise StartError(open_ray(mode))


def _some_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
