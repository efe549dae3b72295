"""What clients see of each failure: runs the tests that make them happen, and keeps what they measure.

    python -m benchmarks.engines.failures [pytest's arguments]

Without arguments all of them run. What is not measured this time stays, with the commit of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.report import RESULTS, about, write

TESTS: Final = (
    "tests/degraded",
    *(f"tests/cluster/test_{name}.py" for name in ("head", "leaving", "nodes", "partition")),
)
_FILE = "SLACKSERVE_FAILURES"
"""The tests write a JSON object for each fault to the file that it names."""


def main() -> int:
    """Run the tests; their exit status."""
    _, given = argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        measured = Path(directory) / "measured"
        measured.touch()
        status = subprocess.run(  # noqa: S603 - our own tests
            [sys.executable, "-m", "pytest", *(given or (*TESTS, "-m", "long or nightly"))],
            env={**os.environ, _FILE: str(measured)},
            check=False,
        ).returncode
        if measured.stat().st_size:  # else pytest has run nothing
            keep(measured)
    return status


def keep(measured: Path) -> None:
    """Put what was measured, one JSON object a line, into the results."""
    path = RESULTS / "engines/failures.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    at = {name: value for name, value in about().items() if name in ("commit", "date")}
    for line in measured.read_text().splitlines():
        row = json.loads(line)
        results[row["fault"]] = {name: value for name, value in row.items() if name != "fault"} | at
    write("engines/failures", dict(sorted(results.items())))


if __name__ == "__main__":
    sys.exit(main())
