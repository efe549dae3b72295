"""Processes that convert: several over one store, killed ones, the converter's own."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_store import TIMEOUT_S, WEIGHTS, Steps, model_entries

from deployments.models.conversion import DISK_FULL_STATUS
from deployments.models.embedded import (
    EMBEDDED_MODEL_ID,
    ConversionFailedError,
    EmbeddedSource,
    run_converter,
)
from deployments.models.store import ModelStore

# A process that prepares the model in argv[1] from the source argv[2]. Its converter says "converting" and
# goes on when the file argv[3] appears; every run of it adds a line to the file argv[4].
WORKER = """
import sys, time
from pathlib import Path
from deployments.models.embedded import EmbeddedSource
from deployments.models.store import ModelStore

root, path, release, runs = map(Path, sys.argv[1:5])
source = EmbeddedSource(path, "one wheel's", converted_bytes=1)

def convert(source, destination, progress):
    with runs.open("a") as file:
        file.write("run\\n")
    (destination / "model.safetensors").write_bytes(b"weights")
    progress("converting", 0.5)
    while not release.exists():
        time.sleep(0.01)
    (destination / "config.json").write_text("{}")

def say(stage, fraction):
    print(stage, flush=True)

print(ModelStore(root, converter=convert, find_source=lambda: source).ensure_embedded(say), flush=True)
"""


@dataclass(frozen=True)
class Workers:
    """Starts `WORKER` processes over one store."""

    root: Path
    source: EmbeddedSource
    release: Path
    runs: Path

    @contextmanager
    def start(self) -> Iterator[subprocess.Popen[str]]:
        arguments = [self.root, self.source.path, self.release, self.runs]
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, arguments)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def workers(tmp_path: Path, root: Path, source: EmbeddedSource) -> Workers:
    return Workers(root, source, tmp_path / "release", tmp_path / "runs")


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return
    pytest.fail(f"the process ended without saying {start!r}: {lines}")


class TestProcesses:
    def test_a_killed_conversion_leaves_nothing_that_is_used(
        self, workers: Workers, store: ModelStore, root: Path
    ) -> None:
        with workers.start() as process:
            wait_for_line(process, "converting")
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
        leftovers = model_entries(root)
        assert len(leftovers) == 1
        assert EMBEDDED_MODEL_ID not in leftovers

        directory = store.ensure_embedded()

        assert (directory / "model.safetensors").read_bytes() == WEIGHTS
        assert model_entries(root) == [EMBEDDED_MODEL_ID]

    def test_the_second_of_two_waits_and_finds_it_done(self, workers: Workers, root: Path) -> None:
        with workers.start() as first:
            wait_for_line(first, "converting")
            with workers.start() as second:
                wait_for_line(second, "Waiting for another process")
                assert model_entries(root) != [EMBEDDED_MODEL_ID]
                workers.release.touch()
                outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in (first, second)]

        assert [output.splitlines()[-1] for output in outputs] == [str(root / EMBEDDED_MODEL_ID)] * 2
        assert workers.runs.read_text() == "run\n"
        assert model_entries(root) == [EMBEDDED_MODEL_ID]


class TestConverterProcess:
    def test_steps_are_passed_on(self) -> None:
        steps = Steps()

        run_converter([sys.executable, "-c", 'print(\'{"stage": "s", "fraction": 0.5}\')'], steps)

        assert steps.seen == [("s", 0.5)]

    def test_a_failure_carries_the_last_words(self) -> None:
        with pytest.raises(ConversionFailedError, match="ValueError: bad tensor"):
            run_converter([sys.executable, "-c", "raise ValueError('bad tensor')"], Steps())

    def test_a_full_disk_keeps_its_errno(self) -> None:
        with pytest.raises(OSError, match="space") as caught:
            run_converter([sys.executable, "-c", f"raise SystemExit({DISK_FULL_STATUS})"], Steps())
        assert caught.value.errno == errno.ENOSPC

    def test_a_kill_points_at_memory(self) -> None:
        with pytest.raises(ConversionFailedError, match="memory"):
            run_converter([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], Steps())

    def test_an_interrupt_ends_the_process(self) -> None:
        program = 'import time; print(\'{"stage": "s", "fraction": 0}\', flush=True); time.sleep(600)'

        def interrupt(_stage: str, _fraction: float) -> None:
            raise KeyboardInterrupt

        start_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_converter([sys.executable, "-c", program], interrupt)
        assert time.monotonic() - start_s < TIMEOUT_S
