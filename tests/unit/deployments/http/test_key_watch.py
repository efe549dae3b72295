"""Keys that change while an ingress runs."""

import asyncio
import pickle
import resource
from contextlib import contextmanager

import pytest
import yaml
from waiting import assert_soon

from deployments.config.settings import parse
from deployments.http.key_watch import KeysNotReadError, KeyWatch
from slo.errors import AuthenticationError
from telemetry.catalogue import API_KEYS_UNREAD


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.yaml"


def write(file, *keys):
    """As a mounted secret changes: all at once."""
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump([{"tenant": key[:1], "key": key} for key in keys]))
    new.rename(file)


@contextmanager
def descriptors_used_up():
    """No file of this process can be opened; those that are open stay so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def built(file):
    """As it reaches an ingress."""
    watch = KeyWatch(parse({"api_keys_file": str(file)}).key_source())
    return pickle.loads(pickle.dumps(watch))


def knows(watch, key):
    try:
        return watch.ring.tenant(key, 0.0).name
    except AuthenticationError:
        return None


def test_a_key_is_added_and_another_revoked(file):
    write(file, "a-key-12345")
    watch = built(file)
    assert knows(watch, "a-key-12345") == "a"
    write(file, "b-key-12345")
    assert_soon(lambda: knows(watch, "b-key-12345") == "b", 3)
    assert knows(watch, "a-key-12345") is None


def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(file, caplog):
    write(file, "a-key-12345")
    watch = built(file)
    with caplog.at_level("INFO", "ray.serve"):
        assert knows(watch, "a-key-12345") == "a"
        for ruin in (
            lambda: file.write_text("[]"),
            lambda: file.write_text("- {tenant: c}"),
            lambda: file.write_text("- {tenant: c, key: c-key-12345, expires: 2026-06-31T00:00:00Z}"),
            file.unlink,
        ):
            told = len(caplog.records)
            ruin()
            assert_soon(lambda told=told: len(caplog.records) > told, 3)
            assert knows(watch, "a-key-12345") == "a"
            assert caplog.records[-1].getMessage().startswith("api_keys_not_read")
        write(file, "b-key-12345")
        assert_soon(lambda: knows(watch, "b-key-12345") == "b", 3)


def test_no_key_is_logged_that_has_a_mistake_beside_it(file, caplog):
    write(file, "a-key-12345")
    watch = built(file)
    with caplog.at_level("INFO", "ray.serve"):
        assert knows(watch, "a-key-12345") == "a"
        told = len(caplog.records)
        file.write_text("- tenant: a\n  key: b-key-12345: new\n")
        assert_soon(lambda: len(caplog.records) > told, 3)
    assert "line 2, column 19: mapping values are not allowed here" in caplog.text
    assert "b-key" not in caplog.text


def test_what_was_revoked_since_the_application_was_built_is_refused_from_the_first_request_on(file):
    write(file, "a-key-12345", "b-key-12345")
    watch = built(file)
    write(file, "b-key-12345")
    assert knows(watch, "a-key-12345") is None
    assert knows(watch, "b-key-12345") == "b"


def test_a_file_that_could_not_be_opened_is_read_once_it_can_be_though_it_stays_as_it_is(file, caplog):
    write(file, "a-key-12345")
    watch = built(file)
    next_one = file.with_suffix(".next")
    write(next_one, "b-key-12345")
    with caplog.at_level("INFO", "ray.serve"):
        assert knows(watch, "a-key-12345") == "a"
        with descriptors_used_up():
            next_one.rename(file)
            assert_soon(lambda: "Too many open files" in caplog.text, 3)
            assert knows(watch, "a-key-12345") == "a"
        assert_soon(lambda: knows(watch, "b-key-12345") == "b", 3)
    assert knows(watch, "a-key-12345") is None


def broken(file):
    file.write_text("- {tenant: c, key: c-key-12345, expires: 2026-06-31T00:00:00Z}")


def without_keys(file):
    file.write_text("[]")


@pytest.mark.parametrize("ruin", [without_keys, broken, lambda file: file.unlink()])
def test_an_ingress_that_has_never_read_the_file_knows_no_key_of_the_build(ruin, file, caplog):
    write(file, "a-key-12345", "b-key-12345")
    watch = built(file)
    ruin(file)
    with caplog.at_level("INFO", "ray.serve"):
        for key in ("a-key-12345", "b-key-12345", None):
            with pytest.raises(KeysNotReadError):
                knows(watch, key)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["api_keys_not_read"]
    write(file, "b-key-12345")
    assert_soon(lambda: reads(watch) and knows(watch, "b-key-12345") == "b", 3)
    assert knows(watch, "a-key-12345") is None


def reads(watch):
    try:
        return watch.ring
    except KeysNotReadError:
        return None


def test_a_variable_that_only_the_build_has_gives_the_ingress_no_key(file, monkeypatch):
    monkeypatch.setenv("KEY_OF_A", "a-key-12345")
    file.write_text("[{tenant: a, key_env: KEY_OF_A}]")
    watch = built(file)
    monkeypatch.delenv("KEY_OF_A")
    with pytest.raises(KeysNotReadError, match="KEY_OF_A"):
        knows(watch, "a-key-12345")


class Gauges:
    """As `Instruments`, of gauges without labels."""

    def __init__(self):
        self.values = {}

    def set(self, metric, value):
        self.values[metric] = value


async def test_the_first_read_is_waited_for_as_long_as_it_takes(file):
    write(file, "a-key-12345")
    watch = built(file)
    watch._instruments = gauges = Gauges()
    file.unlink()
    waiting = asyncio.create_task(watch.first_read())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert gauges.values == {API_KEYS_UNREAD: 1}
    write(file, "b-key-12345")
    await asyncio.wait_for(waiting, 5)
    assert knows(watch, "b-key-12345") == "b"
    assert_soon(lambda: gauges.values == {API_KEYS_UNREAD: 0}, 3)


def test_a_file_that_cannot_be_used_any_more_is_shown_as_long_as_it_is_so(file):
    write(file, "a-key-12345")
    watch = built(file)
    watch._instruments = gauges = Gauges()
    assert knows(watch, "a-key-12345") == "a"
    assert gauges.values == {API_KEYS_UNREAD: 0}
    without_keys(file)
    assert_soon(lambda: gauges.values == {API_KEYS_UNREAD: 1}, 3)
    assert knows(watch, "a-key-12345") == "a"
    write(file, "a-key-12345")
    assert_soon(lambda: gauges.values == {API_KEYS_UNREAD: 0}, 3)


async def test_keys_of_the_configuration_are_not_waited_for(monkeypatch):
    monkeypatch.setenv("KEY_OF_A", "a-key-12345")
    config = parse({"api_keys": [{"tenant": "a", "key_env": "KEY_OF_A"}]})
    await asyncio.wait_for(KeyWatch(config.key_source()).first_read(), 1)


def test_keys_of_the_configuration_alone_need_no_file(monkeypatch):
    monkeypatch.setenv("KEY_OF_A", "a-key-12345")
    config = parse({"api_keys": [{"tenant": "a", "key_env": "KEY_OF_A"}]})
    watch = pickle.loads(pickle.dumps(KeyWatch(config.key_source())))
    monkeypatch.delenv("KEY_OF_A")
    assert knows(watch, "a-key-12345") == "a"
    assert knows(watch, "b-key-12345") is None
