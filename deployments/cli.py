"""The command line: `slackserve` and its subcommands."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from deployments.batch import BatchError
from deployments.batch.command import batch
from deployments.bench import BenchError
from deployments.bench.command import bench
from deployments.calibrate.command import calibrate
from deployments.config import ConfigError
from deployments.config.replicas import MAX_LEAVE_S
from deployments.config.settings import SlackServeConfig, load, parse
from deployments.local.ending import StopRequested, end_process
from deployments.local.machine import advice, check_packages
from deployments.local.request_log import SESSION_LOGS, events_of, print_timeline
from deployments.models.conversion import ProgressCallback
from deployments.models.embedded import ModelStoreError
from deployments.models.fit import check_ahead
from deployments.models.store import ModelStore
from deployments.options import ApplicationOption, ModelOption, check_directory, finite, writing
from deployments.simulate import SimulateError
from deployments.simulate.command import simulate
from deployments.timeline.command import timeline as draw_timeline
from engine_host.cores import usable_cores
from observability.files import write as write_observability

if TYPE_CHECKING:
    from deployments.local.launcher import Part

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM serving for mixed latency objectives.",
)
app.command()(bench)
app.command()(batch)
app.command()(simulate)
app.command()(calibrate)
app.command(name="timeline")(draw_timeline)


class _Stderr:
    """Standard error; what it does not take, as a terminal that is closed, is left out and ends nothing."""

    def __init__(self) -> None:
        self._plain = Console(stderr=True)  # knows what it is at the time, also while a bar is drawn

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            self._plain.file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError):
            self._plain.file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain.file, name)


_console = Console(file=cast("IO[str]", _Stderr()))
# Serve's own threads cost a hand-over each; everything in our replicas is asynchronous and needs none. With
# gRPC between replicas this took a quarter off the time to first token of a tiny model.
SERVE_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Of the gRPC API: Serve's proxy takes messages of up to 2 GiB otherwise, before anybody asks for a key.
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(64 * 1024**2),
    # Who fails its health checks answers nobody: Serve would wait `drain_s` for it, and keep its hardware.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_DEDUP_LOGS": "0",
    # Serve's controller looks after its replicas ten times a second otherwise, and asks the GCS each time.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
}


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file; without it the embedded model.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face id or directory.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(callback=finite, min=1, help="Seconds until a start that is not ready has failed."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show the logs of all processes.")] = False,  # noqa: FBT002
) -> None:
    """Serve a model on this machine until Ctrl-C, SIGTERM, or the end of its terminal."""
    settings = _settings(config, {"model": model, "host": host, "port": port})
    check_packages(settings)  # first: those for GPUs lack the embedded model, and must not be given it
    with preparation_progress(_console) as progress:
        models = {
            section: ModelStore().resolve(each.model, progress)
            for section, each in settings.by_section().items()
        }
    check_ahead(settings, models)
    from deployments.local.launcher import LocalDeployment  # noqa: PLC0415 - after the settings are known good
    from deployments.local.loss import end_if_stuck, say_stopped  # noqa: PLC0415 - likewise

    traces = settings.tracing.options()
    for name, value in (SERVE_ENVIRONMENT | QUIET_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    os.environ.update({} if traces is None else traces.environment())
    stop = threading.Event()
    stopping = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        stopping.append(signal.SIGHUP)
    for number in stopping:
        signal.signal(number, lambda *_: stop.set())
    deployment = LocalDeployment(settings, verbose=verbose)
    threading.Thread(target=end_if_stuck, args=(deployment, stop, _console), daemon=True).start()
    started_s = time.monotonic()
    try:
        shown = _StartProgress(started_s)
        with Live(shown, console=_console, refresh_per_second=2, transient=True):
            deployment.start(lambda parts: shown.update(parts, stop), timeout)
        asking = example(deployment.url, settings, settings.model_name or models[""].model_id)
        said = advice(settings, usable_cores(), deployment.gpus)
        announce(_console, deployment.url, asking, time.monotonic() - started_s, said)
        stop.wait()
        _console.print("Stopping.")
    except StopRequested:
        _console.print("Stopping before everything was up.")
    finally:
        for number in stopping:
            signal.signal(number, signal.SIG_IGN)
        killed = deployment.stop()
        if deployment.has_begun:
            say_stopped(_console, killed)


@app.command()
def top(
    interval: Annotated[float, typer.Option(min=0.1, max=30, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look; also without a terminal.")] = False,  # noqa: FBT002
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,  # noqa: FBT002
    model: ModelOption = None,
    application: ApplicationOption = None,
) -> None:
    """Watch what the running deployment prefills, what waits and what is suspended, until Ctrl-C."""
    console = Console()
    with suppress(KeyboardInterrupt), _console.status("connecting") as status:
        from deployments.local.running import NotRunningError, connect  # noqa: PLC0415
        from deployments.top import collect as looks  # noqa: PLC0415 - imports Ray

        looks.quiet()
        try:
            running = connect(model, application)
            status.stop()
            if once or as_json or not console.is_terminal:
                looks.print_once(running, console, as_json=as_json)
            else:
                looks.watch(running, console, interval)
        except NotRunningError as error:
            status.stop()
            _console.print(Text(f"top: {error}", style="red"))
            raise typer.Exit(1) from None


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="The x-request-id or x-slackserve-id of an answer.")],
    logs: Annotated[Path, typer.Option(help="Directory of Ray's logs.")] = SESSION_LOGS,
) -> None:
    """Print what the processes on this machine have logged of one request, in the order of time."""
    try:
        events = events_of(request_id, logs)
        nothing = f"the logs in {logs} say nothing of {request_id}"
        why = nothing if logs.is_dir() else f"there is no directory {logs}"
    except PermissionError as error:
        events, why = [], f"{error.filename} cannot be read; run this as the user that the server runs as"
    if not events:
        _console.print(Text(f"trace: {why}", style="red"))
        raise typer.Exit(1)
    print_timeline(Console(), events)


@app.command()
def check(config: Annotated[Path, typer.Option(help="YAML file.")]) -> None:
    """Say what keeps a configuration from being served here, without starting it; 2 where something does."""
    try:
        wrong = [f"{config}: {problem}" for problem in _problems(load(config))]
    except ConfigError as error:
        wrong = str(error).splitlines()
    for line in wrong:
        _console.print(Text(line, style="red"), soft_wrap=True)
    if wrong:
        raise typer.Exit(2)
    typer.echo(f"{config} can be started")


@app.command()
def observability(
    config: Annotated[Path | None, typer.Option(help="Its YAML file, for tiers and models.")] = None,
    out: Annotated[Path, typer.Option(help="Directory to write them to.")] = Path("observability"),
) -> None:
    """Write Prometheus' rules and Grafana's dashboards for a deployment."""
    settings = SlackServeConfig() if config is None else load(config)
    check_directory("--out", out, ConfigError)
    with writing("--out", out, ConfigError):
        files = write_observability(settings.tiers.tier_set(), out, settings.names_given())
    for file in files:
        _console.print(str(file), highlight=False)


@app.command()
def leave(
    within: Annotated[
        float, typer.Option(min=1, max=MAX_LEAVE_S, help="Seconds that the node will last.")
    ] = 75.0,
    node_id: Annotated[str | None, typer.Option(help="Ray's id of another node.")] = None,
) -> None:
    """Have the replicas of this machine's Ray node start elsewhere and finish here, before the node ends."""
    from deployments.local import leaving  # noqa: PLC0415 - imports Ray

    try:
        left = leaving.leave(within, node_id)
    except leaving.LeaveError as error:
        _console.print(Text(f"leave: {error}", style="red"))
        raise typer.Exit(1) from None
    if left:
        _console.print(Text(f"leave: after {within:g} s still here: {', '.join(left)}", style="red"))
        raise typer.Exit(1)


def main() -> None:
    """Entry point; turns expected failures into one clear message and exit code 2."""
    from deployments.local.launcher import StartError  # noqa: PLC0415

    try:
        app(standalone_mode=True)
    except SystemExit as ended:
        end_process(ended.code if isinstance(ended.code, int) else 0)
    except (BatchError, BenchError, ConfigError, ModelStoreError, SimulateError, StartError) as error:
        _console.print(Text(f"{type(error).__name__}: {error}", style="red"))
        end_process(2)


@contextmanager
def preparation_progress(console: Console) -> Iterator[ProgressCallback]:
    """Give a callback that draws the progress of a model's preparation as a bar.

    The bar appears with the first call, so a model that is ready draws nothing, and goes when the block ends.
    """
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=1.0)

    def report(stage: str, fraction: float) -> None:
        bar.start()
        bar.update(task, description=stage, completed=fraction)

    try:
        yield report
    finally:
        bar.stop()


def example(url: str, settings: SlackServeConfig, model: str) -> str:
    """A command that asks the server at `url`, for a shell; `$KEY` stands for a key where it wants one."""
    tier = settings.tiers.tier_set().top
    lines = [
        f"curl {shlex.quote(f'{url}/v1/completions')}",
        f"-H 'content-type: application/json' -H 'x-slo-tier: {tier}'",
    ]
    if settings.api_keys or settings.api_keys_file is not None:
        lines.append('-H "authorization: Bearer $KEY"')
    if settings.tls is not None and not settings.tls.is_known():
        lines.append(f"--cacert {shlex.quote(str(settings.tls.certificate))}")
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 8})
    return " \\\n    ".join([*lines, f"-d {shlex.quote(body)}"])


def announce(console: Console, url: str, asking: str, seconds: float, said: Sequence[str]) -> None:
    """Say that the server is ready, and how to ask it, in lines to be pasted from any terminal."""
    lines = [
        f"Ready after {seconds:.0f} s: {url}",
        "",
        f"  {asking}",
        "",
        *said,
        "Ctrl-C stops.",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _problems(settings: SlackServeConfig) -> list[str]:
    logging.disable(logging.WARNING)  # what vLLM says of its own import
    try:
        with _console.status("checking"):
            from deployments.check import problems  # noqa: PLC0415 - imports Ray and vLLM

            return problems(settings)
    finally:
        logging.disable(logging.NOTSET)


def _settings(path: Path | None, overrides: dict[str, Any]) -> SlackServeConfig:
    if path is None:
        with resources.as_file(resources.files("deployments") / "configs" / "embedded.yaml") as default:
            settings = load(default)
        if overrides["model"] is not None:
            settings = settings.model_copy(update={"max_model_len": None})
    else:
        settings = load(path)
    given = {name: value for name, value in overrides.items() if value is not None}
    return parse({**settings.model_dump(exclude_unset=True), **given}, "command line")


class _StartProgress:
    """What is being waited for and for how long, drawn anew at every refresh."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._parts: list[Part] = []

    def update(self, parts: list[Part], stop: threading.Event) -> None:
        """Take the latest state, or stop waiting."""
        if stop.is_set():
            raise StopRequested
        self._parts = parts

    def __rich__(self) -> Table:
        """Draw it; called by rich."""
        table = Table(box=None, show_header=False)
        for part in self._parts:
            mark = Text("✓", style="green") if part.done else Text("…", style="yellow")
            table.add_row(mark, part.name, part.state)
        table.add_row("", Text(f"{time.monotonic() - self._started_s:.0f} s", style="dim"), "")
        return table


if __name__ == "__main__":
    main()
