"""How a server of benchmarks and tests ends."""

import signal
import subprocess
import sys

import pytest

from benchmarks.harness.local_server import end

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_one_that_does_not_end_when_it_is_asked_to_is_killed_and_told_of():
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            end(process, within_s=0.1)
    assert process.returncode == -signal.SIGKILL
