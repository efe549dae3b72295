"""How long a start may take, what ends it, what it shows, and what is left after it."""

import http.server
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ports import free_port
from ray import serve
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ServeStatus,
)

from deployments.config import ConfigError
from deployments.config.settings import parse
from deployments.local import launcher
from deployments.local.ending import StopRequested, kill_after
from deployments.local.launcher import (
    LocalDeployment,
    Part,
    StartError,
    check_ray_is_closed,
    get_json,
)


@pytest.mark.parametrize(
    ("mode", "is_refused"),
    [("disabled", True), (None, True), ("k8s", True), ("token", False), ("TOKEN", False)],
)
def test_a_ray_that_asks_for_no_token_is_refused_wherever_it_listens(mode, is_refused, monkeypatch):
    """Its own processes may listen on the loopback interface alone: replicas listen on every address."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(StartError, match="set RAY_AUTH_MODE=token") if is_refused else nullcontext():
        check_ray_is_closed()


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("10.1.2.3", "http://10.1.2.3:8000")],
)
def test_the_url_can_be_opened_as_it_is_printed(host, url):
    assert LocalDeployment(parse({"host": host})).url == url


def test_the_servers_own_address_is_asked_past_any_proxy(monkeypatch):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"status": "not ready"}')

        def log_message(self, *_):
            pass

    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert get_json(f"http://127.0.0.1:{server.server_port}/ready") == {"status": "not ready"}
    assert get_json(f"http://127.0.0.1:{free_port()}/ready", timeout_s=1) is None


def test_importing_it_leaves_serve_for_when_the_environment_is_set():
    """Serve reads its settings when it is imported; `slackserve serve` sets them first."""
    script = "import sys, deployments.local.launcher; print('ray.serve' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


BOARD_AND_WAIT = """
import signal, time
from prefill_node.board.board import Board
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(Board.create(1).path, flush=True)
time.sleep(60)
"""


def test_a_replica_that_is_killed_while_it_starts_leaves_no_board(monkeypatch):
    command = [sys.executable, "-c", BOARD_AND_WAIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replica:
        board = Path(replica.stdout.readline().strip())
        assert board.exists()
        found = [psutil.Process(replica.pid)]
        monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: found)
        monkeypatch.setattr(launcher, "kill_after", lambda _, processes: kill_after(0.1, processes))
        assert LocalDeployment(parse({"model": "m"})).stop() == 1
        assert not board.exists()


def test_there_is_something_to_stop_from_when_ray_is_started(monkeypatch, taken_port):
    class BegunError(Exception):
        pass

    def show(_):
        raise BegunError

    monkeypatch.setattr(launcher.Door, "environment", lambda _: {})
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    for port, refusal, has_begun in ((taken_port, ConfigError, False), (free_port(), BegunError, True)):
        deployment = LocalDeployment(parse({"port": port, "accelerator": "cpu"}))
        with pytest.raises(refusal):
            deployment.start(show)
        assert deployment.has_begun == has_begun
        deployment.stop()


@pytest.fixture
def start(monkeypatch):
    """Starts what is ready after so many seconds of a clock that nobody waits for."""
    clock = SimpleNamespace(now_s=1000.0)

    def sleep(seconds):
        clock.now_s += seconds

    def start_what_takes(seconds, **options):
        until_s = clock.now_s + seconds
        deployment = LocalDeployment(parse({"port": free_port(), "accelerator": "cpu"}))
        monkeypatch.setattr(deployment, "_deploy", lambda _: None)
        monkeypatch.setattr(
            deployment, "_parts", lambda: [Part("Prefill m", "0 of 1 replicas", done=clock.now_s >= until_s)]
        )
        try:
            deployment.start(lambda _: None, **options)
        finally:
            deployment.stop()

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    monkeypatch.setattr(launcher.Door, "environment", lambda _: {})
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    return start_what_takes


def test_a_start_takes_as_long_as_a_download_does(start):
    start(20_000)


def test_a_start_that_takes_longer_than_it_may_says_which_option_allows_more(start):
    start(50, timeout_s=60)
    with pytest.raises(
        StartError, match=r"60 s \(--timeout\); still waiting for Prefill m \(0 of 1 replicas\)"
    ):
        start(100, timeout_s=60)


def of_serve(deployments):
    """What Serve says of an application, by deployment its status and states of replicas."""
    parts = {
        name: DeploymentStatusOverview(
            DeploymentStatus(status), DeploymentStatusTrigger.UNSPECIFIED, states, "the engine died"
        )
        for name, (status, states) in deployments.items()
    }
    app = ApplicationStatusOverview(ApplicationStatus.DEPLOYING, "", 0.0, parts)
    return ServeStatus(applications={launcher.APP_NAME: app})


@pytest.mark.parametrize(
    ("pool", "status", "states", "is_done"),
    [
        ({}, "UPDATING", {"STARTING": 1}, False),
        ({}, "HEALTHY", {"RUNNING": 1}, True),
        ({"replicas": 2}, "UPDATING", {"RUNNING": 1, "STARTING": 1}, False),
        ({"max_replicas": 3}, "UPDATING", {"STARTING": 3}, False),
        ({"max_replicas": 3}, "UPDATING", {"RUNNING": 1, "STARTING": 2}, True),
        ({"max_replicas": 3}, "UPSCALING", {"RUNNING": 2, "STARTING": 1}, True),
        ({"max_replicas": 3}, "DOWNSCALING", {"RUNNING": 1, "STOPPING": 1}, True),
        ({"replicas": 2, "max_replicas": 3}, "UPDATING", {"RUNNING": 1, "STARTING": 1}, False),
        ({"replicas": 2, "min_replicas": 1, "max_replicas": 3}, "UPDATING", {"RUNNING": 1}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("tier", ["Prefill", "Decode"])
def test_a_tier_that_follows_the_load_has_started_with_its_fewest(
    monkeypatch, tier, pool, status, states, is_done
):
    """Others may be on order for as long as the load lasts, and there may be no GPU for them."""
    further = {"org/b": {"model": "b", tier.lower(): pool}}
    config = parse({"model": "org/a.5", tier.lower(): pool, "models": further})
    of_further_alone = parse({"model": "org/a.5", "models": further})
    names = [f"{tier}:org--a_5", f"{tier}:org--b", "Router"]
    said = of_serve(dict.fromkeys(names, (status, states)))
    monkeypatch.setattr(serve, "status", lambda: said)
    monkeypatch.setattr(LocalDeployment, "_ready", lambda _: (False, "not ready"))

    def done(config):
        return [part.done for part in LocalDeployment(config)._parts()]

    is_healthy = status == "HEALTHY"
    assert done(config) == [is_done, is_done, is_healthy, False]
    assert done(of_further_alone) == [is_healthy, is_done, is_healthy, False]


@pytest.mark.parametrize("status", ["DEPLOY_FAILED", "UNHEALTHY"])
def test_a_tier_that_fails_to_start_ends_the_start_whatever_runs(monkeypatch, status):
    config = parse({"model": "m", "decode": {"max_replicas": 3}})
    monkeypatch.setattr(serve, "status", lambda: of_serve({"Decode:m": (status, {"RUNNING": 1})}))
    with pytest.raises(StartError, match="Decode:m failed to start:\nthe engine died"):
        LocalDeployment(config)._parts()


@pytest.mark.parametrize("port", [None, 9466])
def test_ray_exports_its_metrics_where_it_is_told_to(monkeypatch, tmp_path, port):
    given = []

    def init(**options):
        given.append(options["_metrics_export_port"])
        return SimpleNamespace(address_info={"session_dir": str(tmp_path)})

    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    with pytest.raises(StartError):
        LocalDeployment(parse({"model": "m", "ray_metrics_port": port}))._start_ray()
    assert given == [port]


def test_it_knows_how_many_gpus_ray_has_found(monkeypatch, tmp_path):
    started = SimpleNamespace(address_info={"session_dir": str(tmp_path)})
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(ray, "init", lambda **_: started)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    deployment = LocalDeployment(parse({"model": "m", "accelerator": "cuda"}))
    deployment._start_ray()
    assert deployment.gpus == 2.0


@pytest.mark.parametrize(("ended", "can_answer"), [("gcs_server", True), ("raylet", False)])
def test_ray_is_lost_with_its_gcs_and_with_its_raylet(monkeypatch, tmp_path, ended, can_answer):
    parts = {}

    def init(**_):
        for name in ("gcs_server", "raylet"):
            (tmp_path / name).symlink_to(shutil.which("sleep"))
            parts[name] = subprocess.Popen([tmp_path / name, "60"])
        return SimpleNamespace(address_info={"session_dir": str(tmp_path)})

    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(  # without those of a Ray that other tests have left in this process
        psutil.Process, "children", lambda *_, **__: [psutil.Process(part.pid) for part in parts.values()]
    )
    deployment = LocalDeployment(parse({"model": "m"}))
    try:
        with pytest.raises(StartError):
            deployment._start_ray()
        assert deployment.logs == tmp_path / "logs"
        assert (deployment.is_lost(), deployment.can_answer()) == (False, True)
        parts[ended].kill()
        parts[ended].wait()
        assert (deployment.is_lost(), deployment.can_answer()) == (True, can_answer)
        deployment.is_stopping = True
        assert not deployment.is_lost()
    finally:
        for part in parts.values():
            part.kill()
            part.wait()


def test_other_users_get_neither_rays_token_nor_into_its_session(monkeypatch, tmp_path):
    session, token = tmp_path / "ray" / "session_1", tmp_path / ".ray" / "auth_token"
    session.mkdir(parents=True)
    session.chmod(0o777)

    def init(**_):
        assert token.stat().st_mode & 0o777 == 0o600
        return SimpleNamespace(address_info={"session_dir": str(session)})

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    with pytest.raises(StartError):
        LocalDeployment(parse({"model": "m"}))._start_ray()
    assert session.stat().st_mode & 0o777 == 0o700


def test_a_signal_while_ray_starts_ends_the_start_and_not_the_process(monkeypatch):
    """Ray's own handler would end it with the signal's number."""
    heard = []

    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(launcher, "keep_token", lambda: None)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(StopRequested):
            LocalDeployment(parse({"model": "m"}))._start_ray()
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_ray_starts_does_not_end_with_the_terminal(monkeypatch, tmp_path):
    """A terminal that is closed sends SIGHUP to it as well, and answers that are under way need it."""
    started = []

    def init(**_):
        started.append(subprocess.Popen(["sleep", "60"]))
        raise StopRequested

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(launcher, "keep_token", lambda: None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(StopRequested):
        LocalDeployment(parse({"model": "m"}))._start_ray()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    [part] = started
    part.send_signal(signal.SIGHUP)
    part.terminate()
    assert part.wait(10) == -signal.SIGTERM


def test_a_stop_shows_nothing_of_what_ray_says_of_its_own_end(monkeypatch, capsys):
    """Ray prints that the end of its controller's last task failed, and on which stream is its own choice."""

    def shut_down():
        for stream in (sys.stdout, sys.stderr):
            stream.write("graceful_shutdown failed")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", shut_down)
    monkeypatch.setattr(launcher, "_shut_down", shut_down)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    LocalDeployment(parse({"model": "m"})).stop()
    assert capsys.readouterr() == ("", "")
