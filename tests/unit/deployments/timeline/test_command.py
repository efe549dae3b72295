"""`slackserve timeline` writes a page of the running deployment."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.config import ConfigError
from deployments.local import running


class Running:
    """A deployment without a replica."""

    model = "tiny"

    def __init__(self):
        async def fleet():
            return {"tiers": ["premium"], "prefill": []}

        self.router = SimpleNamespace(fleet=SimpleNamespace(remote=fleet))


@pytest.fixture
def timeline(monkeypatch):
    monkeypatch.setattr(running, "connect", lambda *_: Running())
    return lambda out: CliRunner().invoke(app, ["timeline", "--out", str(out)])


def test_a_page_is_written(timeline, tmp_path):
    ended = timeline(tmp_path / "new" / "page.html")
    assert ended.exit_code == 0, ended.output
    assert "tiny" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_a_full_disk_is_one_message(timeline, tmp_path):
    out = tmp_path / "page.html"
    out.symlink_to("/dev/full")
    error = timeline(out).exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"--out: {out} cannot be written: No space left on device"
