"""What the command line draws."""

import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys

import pytest
from certificates import self_signed
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import SERVE_ENVIRONMENT, announce, app, example, preparation_progress
from deployments.config import ConfigError
from deployments.config.settings import parse
from deployments.local import leaving, loss
from deployments.local.launcher import LocalDeployment
from deployments.models.fit import check_ahead
from deployments.models.store import ModelStore, ResolvedModel


def test_a_model_whose_configuration_is_cut_off_is_refused_before_ray_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalDeployment, "start", lambda *_: pytest.fail("Ray would have been started"))
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    refused = CliRunner().invoke(app, ["serve", "--model", str(tmp_path)]).exception
    assert isinstance(refused, ConfigError)
    assert "is it whole?" in str(refused)


def test_packages_for_something_else_are_refused_before_a_model_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelStore, "resolve", lambda *_: pytest.fail("a model was looked for"))
    (tmp_path / "serve.yaml").write_text("accelerator: cuda")
    refused = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "serve.yaml")]).exception
    assert isinstance(refused, ConfigError)
    assert "the packages installed here are for CPUs" in str(refused)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api_keys": [{"tenant": "acme", "key_env": "ACME_KEY"}]}, "ACME_KEY"),
        ({"lora": {"adapters": {"a": "/nope"}}}, "lora.adapters.a: /nope has no adapter_config.json"),
        ({"max_model_len": 4096}, "max_model_len: 4096 is more than the model's 2048"),
        ({"prefill": {"tensor_parallel_size": 3}}, "3 does not divide the model's 4 attention heads"),
        (
            {"models": {"b": {"max_model_len": 4096}}, "model_name": "a"},
            "models.b: max_model_len: 4096 is more than the model's 2048",
        ),
    ],
)
def test_what_cannot_be_served_is_told_before_ray_starts(tmp_path, monkeypatch, given, message):
    monkeypatch.delenv("ACME_KEY", raising=False)
    monkeypatch.setattr(LocalDeployment, "start", lambda *_: pytest.fail("Ray would have been started"))
    model = {"model_type": "llama", "max_position_embeddings": 2048, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(model))
    further = {name: {"model": str(tmp_path), **each} for name, each in given.get("models", {}).items()}
    settings = {"model": str(tmp_path), **given, "models": further}
    (tmp_path / "serve.yaml").write_text(json.dumps(settings))
    refused = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "serve.yaml")]).exception
    assert isinstance(refused, ConfigError)
    assert message in str(refused)


def test_what_is_told_before_takes_neither_ray_nor_vllm():
    """Each takes seconds to import, which every start would wait for."""
    script = "import sys, deployments.cli; print({'ray', 'vllm', 'torch'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_arguments_of_vllms_that_change_what_a_model_says_are_left_to_it(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    longer = {"engine_kwargs": {"hf_overrides": {"max_position_embeddings": 8192}}}
    check_ahead(
        parse({"model": "m", "max_model_len": 4096, "prefill": longer}),
        {"": ResolvedModel("m", str(tmp_path))},
    )


@pytest.fixture
def _signals_as_before():
    """What the command ignores as it ends is not ignored by the processes that other tests start."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("has_begun", [False, True])
def test_it_says_that_it_has_stopped_what_it_had_started(tmp_path, monkeypatch, has_begun):
    def start(deployment, *_):
        deployment.has_begun = has_begun
        raise ConfigError("port: is taken")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(LocalDeployment, "start", start)
    monkeypatch.setattr(LocalDeployment, "stop", lambda _: 0)
    ended = CliRunner().invoke(app, ["serve", "--model", str(tmp_path)])
    assert str(ended.exception) == "port: is taken"
    assert ("Stopped." in ended.stderr) == has_begun


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize(("options", "timeout_s"), [([], None), (["--timeout", "7200"], 7200.0)])
def test_a_start_has_as_long_as_it_is_given(tmp_path, monkeypatch, options, timeout_s):
    given = []

    def start(_, show, timeout_s):
        given.append(timeout_s)
        raise ConfigError("enough")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(LocalDeployment, "start", start)
    monkeypatch.setattr(LocalDeployment, "stop", lambda _: 0)
    CliRunner().invoke(app, ["serve", "--model", str(tmp_path), *options])
    assert given == [timeout_s]


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("is_heard", [True, False])
def test_it_stops_when_its_terminal_is_closed_unless_nohup_has_it_go_on(tmp_path, monkeypatch, is_heard):
    def start(_, show, timeout_s):
        signal.raise_signal(signal.SIGHUP)
        show([])
        raise ConfigError("goes on")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(LocalDeployment, "start", start)
    monkeypatch.setattr(LocalDeployment, "stop", lambda _: 0)
    monkeypatch.setattr(loss, "end_if_stuck", lambda *_: None)  # would end the tests
    signal.signal(signal.SIGHUP, (lambda *_: None) if is_heard else signal.SIG_IGN)
    ended = CliRunner().invoke(app, ["serve", "--model", str(tmp_path)])
    assert ("Stopping before everything was up." in ended.stderr) == is_heard
    assert (ended.exit_code == 0) == is_heard


SERVING_NOTHING = """
import sys, time
from deployments import cli
from deployments.local.launcher import LocalDeployment, Part

def start(deployment, show, timeout_s):
    deployment.has_begun = True
    while is_endless or not deployment.shown:
        show([Part("a part", "starting", done=False)])
        deployment.shown = True
        time.sleep(0.01)

is_endless = sys.argv.pop() == "starts"
LocalDeployment.shown = False
LocalDeployment.start = start
LocalDeployment.stop = lambda _: 0
cli.main()
"""


@pytest.mark.parametrize(("phase", "says"), [("starts", b"a part"), ("serves", b"Ctrl-C stops.")])
def test_a_terminal_that_is_closed_keeps_nothing_from_stopping(tmp_path, phase, says):
    (tmp_path / "config.json").write_text("{}")
    ours, its = pty.openpty()
    command = [sys.executable, "-c", SERVING_NOTHING, "serve", "--model", tmp_path, phase]
    environment = os.environ | {"TERM": "xterm", "PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(command, stderr=its, env=environment)
    try:
        os.close(its)
        said = b""
        while says not in said:
            said += os.read(ours, 4096)
        os.close(ours)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


class TestPreparationProgress:
    def test_it_draws_the_stage_and_clears_it(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, width=100)

        with preparation_progress(console) as report:
            report("Unpacking the weights", 0.5)

        assert isinstance(console.file, io.StringIO)
        assert "Unpacking the weights" in console.file.getvalue()

    def test_it_draws_nothing_without_a_step(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True)

        with preparation_progress(console):
            pass

        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue() == ""


def test_a_node_may_take_a_day_to_leave_but_no_longer(monkeypatch):
    waited = []
    monkeypatch.setattr(leaving, "leave", lambda within_s, node_id: waited.append(within_s) or [])
    codes = [CliRunner().invoke(app, ["leave", "--within", each]).exit_code for each in ("86400", "86401")]
    assert codes == [0, 2]
    assert waited == [86_400]


def words_of(url: str, **settings: object) -> list[str]:
    """What a shell makes of the command that is printed on a narrow terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=40)
    announce(console, url, example(url, parse(settings, "test"), "a-model"), 3.2, [])
    assert isinstance(console.file, io.StringIO)
    ready, _, *command, _, end = console.file.getvalue().splitlines()
    assert (ready, end) == (f"Ready after 3 s: {url}", "Ctrl-C stops.")
    return shlex.split("\n".join(command))


class TestAnnounce:
    @pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[fd00::5]:8000"])
    def test_the_command_can_be_pasted(self, url: str) -> None:
        words = words_of(url)

        assert words[:2] == ["curl", f"{url}/v1/completions"]
        assert "x-slo-tier: premium" in words
        assert json.loads(words[-1])["model"] == "a-model"
        assert not [word for word in words if "authorization" in word or word == "--cacert"]

    def test_it_says_where_a_key_goes(self) -> None:
        assert "authorization: Bearer $KEY" in words_of(
            "http://127.0.0.1:8000", api_keys=[{"tenant": "acme", "key_env": "ACME_KEY"}]
        )
        assert "authorization: Bearer $KEY" in words_of("http://127.0.0.1:8000", api_keys_file="keys.yaml")

    def test_it_gives_a_certificate_that_nobody_knows(self, tmp_path, monkeypatch) -> None:
        made = self_signed(tmp_path)
        tls = {"certificate": str(made.certificate), "key": str(made.key)}

        words = words_of("https://127.0.0.1:8000", tls=tls)
        assert words[words.index("--cacert") + 1] == str(made.certificate)

        monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
        assert "--cacert" not in words_of("https://127.0.0.1:8000", tls=tls)


def test_serve_waits_for_nobody_that_fails_its_health_checks():
    """Its own reading of the variable: such a replica finishes nothing, and another needs its hardware."""
    asked = "from ray.serve._private.deployment_state import DeploymentState as it"
    command = [sys.executable, "-c", f"{asked}; print(it.FORCE_STOP_UNHEALTHY_REPLICAS)"]
    environment = os.environ | SERVE_ENVIRONMENT
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split()[-1] == "True"
