"""A real Prometheus that scrapes what a test serves."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from ports import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus here; Debian's package of that name has it"
)


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query"

    def query(self, expr: str) -> list[dict]:
        """The series that an expression has now; none while Prometheus starts."""
        try:
            with urllib.request.urlopen(f"{self._url}?{urllib.parse.urlencode({'query': expr})}") as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return []
            raise AssertionError(f"{expr}: {error.read().decode()}") from None
        except urllib.error.URLError:
            return []


@contextmanager
def scraping(directory: Path, ports: Iterable[int], rules: Iterable[Path] = ()) -> Iterator[Prometheus]:
    """Scrape these ports of this machine, and evaluate the rules, once a second."""
    port = free_port()
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "slackserve",
                "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in ports]}],
            }
        ],
        "rule_files": [str(_often(path, directory)) for path in rules],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(directory / "prometheus.log").open("w"),
    )
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(10)


def _often(path: Path, directory: Path) -> Path:
    """The rules of a file, evaluated at Prometheus' own interval."""
    groups = yaml.safe_load(path.read_text())["groups"]
    rules = [{name: value for name, value in group.items() if name != "interval"} for group in groups]
    copy = directory / path.name
    copy.write_text(yaml.safe_dump({"groups": rules}))
    return copy
