"""What hostile clients do to the others: runs the tests that are such clients, and keeps what they measure.

    python -m benchmarks.engines.hostile_clients [--read FILE ...]

The tests take twenty minutes. With `--read`, JUnit files of runs of theirs are kept instead.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from benchmarks.report import write

TESTS: Final = (
    "tests/e2e/clients/test_slow_clients.py",
    "tests/e2e/clients/test_hostile_clients.py",
    "tests/e2e/test_overload.py",
)


def main() -> int:
    """Run the tests; their exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", type=Path, nargs="*", default=[])
    files, status = parser.parse_args().read, 0
    with tempfile.TemporaryDirectory() as directory:
        if not files:
            files = [Path(directory) / "measured.xml"]
            command = [sys.executable, "-m", "pytest", *TESTS, "-m", "nightly"]
            command += ["-o", "junit_family=xunit1", f"--junitxml={files[0]}"]
            status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own tests
        results: dict[str, dict[str, Any]] = {}
        for path in files:
            for name, found in measured(path).items():
                again = sum(known.partition(" run ")[0] == name for known in results)
                results[f"{name} run {again + 1}" if again else name] = found
    print(write("engines/hostile_clients", results))
    return status


def measured(path: Path) -> dict[str, dict[str, Any]]:
    """By test, whether it passed, and the properties that it recorded."""
    found = {}
    for case in ET.parse(path).iter("testcase"):  # noqa: S314 - pytest's own
        passed = case.find("failure") is None and case.find("error") is None
        properties = {each.get("name", ""): _value(each.get("value", "")) for each in case.iter("property")}
        found[case.get("name", "")] = {"passed": passed, **properties}
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    sys.exit(main())
