"""Lines of the log."""

import io
import json
import logging
import math
import re
from dataclasses import dataclass
from logging.config import dictConfig
from logging.handlers import MemoryHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._common.formatters import JSONFormatter
from ray._common.logging_constants import LogKey
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import (
    ServeComponentFilter,
    ServeContextFilter,
    ServeCoreContextFilter,
    ServeLogAttributeRemovalFilter,
)
from ray.serve.context import _RequestContext

from router.messages import PlacementReason
from telemetry import logs

CORE = (LogKey.WORKER_ID, LogKey.NODE_ID, LogKey.ACTOR_ID, LogKey.ACTOR_NAME)
CORE += (LogKey.JOB_ID, LogKey.TASK_ID, LogKey.TASK_NAME, LogKey.TASK_FUNCTION_NAME)


@pytest.fixture
def json_log():
    """Takes the lines of Serve's log since it was asked last, as it writes them as JSON in a replica."""
    logger, text = logging.getLogger("ray.serve"), io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JSONFormatter())
    for each in (
        ServeCoreContextFilter(),
        ServeContextFilter(),
        ServeComponentFilter("Router", "writer", ServeComponentType.REPLICA),
        ServeLogAttributeRemovalFilter(),
    ):
        handler.addFilter(each)

    def taken():
        lines = text.getvalue().splitlines()
        text.seek(0)
        text.truncate()
        return [json.loads(line, parse_constant=pytest.fail) for line in lines]

    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield taken
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def serves_log(tmp_path):
    """The file that Serve's log goes to, as Serve sets it up."""
    path = tmp_path / "replica.log"
    logger, file = logging.getLogger("ray.serve"), logging.FileHandler(path)
    handler = MemoryHandler(1, target=file)
    logger.addHandler(handler)
    yield path
    logger.removeHandler(handler)
    file.close()


def test_a_library_that_configures_logging_leaves_serves_log_alone(serves_log, caplog):
    with caplog.at_level("INFO", "ray.serve"):
        with logs.kept():
            logs.event("before")
            dictConfig({"version": 1, "disable_existing_loggers": False})
        logs.event("after")
    assert serves_log.read_text().split() == ["before", "after"]


def test_what_a_client_sent_forges_no_line(caplog):
    with caplog.at_level("INFO", "ray.serve"):
        logs.event("request_refused", param="a\nrequest_ended tenant=acme", why="é is fine")
    (record,) = caplog.records
    assert record.getMessage() == 'request_refused param="a\\nrequest_ended tenant=acme" why="é is fine"'


@given(
    st.lists(
        st.text() | st.sampled_from(["", " ", '"', "\\", 'a "b" c=d', "RuntimeError('a b')"]), min_size=1
    )
)
def test_fields_are_read_as_they_were_written(values):
    given = {f"name_{number}": value for number, value in enumerate(values)}
    (text,) = logged(**given)
    assert "\n" not in text
    found = logs.fields_of(text.partition(" ")[2])
    assert [name for name, _ in found] == [*given]
    for value, (_, written) in zip(values, found, strict=True):
        plain = written if written[0] != '"' else re.sub(r'\\(["\\])', r"\1", written[1:-1])
        assert plain == value or not value.isprintable()


def test_one_word_stays_as_it_is():
    (text,) = logged(tier="premium", seconds=0.25, tokens=7, why=None, path="C:\\a", list="a,b")
    assert text == "said tier=premium seconds=0.25 tokens=7 path=C:\\a list=a,b"


@dataclass(frozen=True)
class Demand:
    tokens: int


def test_each_line_of_serves_json_log_is_json(json_log):
    """A parser that is as strict as JSON takes each, whatever the event is about."""
    shed = {"b": [0.5, math.inf], 1: None}
    logs.event("placed", slack_s=math.inf, error=-math.inf, share=math.nan, shed=shed)
    reason = PlacementReason.NOBODY_LATE
    logs.event("tier_scaled", demand=Demand(3), reason=reason, tokens=7, is_idle=True, left=None)
    placed, scaled = json_log()
    assert placed["message"] == "placed slack_s=inf error=-inf share=nan shed=\"{'b': [0.5, inf], 1: None}\""
    names = ("slack_s", "error", "share", "shed")
    assert [placed[name] for name in names] == [None, None, None, {"b": [0.5, None], "1": None}]
    assert scaled["demand"] == "Demand(tokens=3)"
    names = ("reason", "tokens", "is_idle", "left")
    assert [scaled[name] for name in names] == ["nobody_late", 7, True, None]


def test_what_an_event_is_about_stands_beside_what_serve_writes_of_itself(json_log, monkeypatch):
    context = _RequestContext(request_id="serves", route="/v1", app_name="slackserve")
    monkeypatch.setattr("ray.serve.context._get_serve_request_context", lambda: context)
    logs.event("decode_failed", request_id="clients", job_id="job", replica="failed")
    (line,) = json_log()
    assert line["message"] == "decode_failed request_id=clients job_id=job replica=failed"
    assert [line[name] for name in ("event", "job_id")] == ["decode_failed", "job"]
    assert [line[name] for name in ("deployment", "replica", "request_id")] == ["Router", "writer", "serves"]
    assert [line[name] for name in ("event_replica", "event_request_id")] == ["failed", "clients"]


def test_no_field_of_an_event_is_lost_to_serve(json_log, monkeypatch):
    context = _RequestContext(request_id="serves", route="/v1", app_name="slackserve")
    monkeypatch.setattr("ray.serve.context._get_serve_request_context", lambda: context)
    rays = dict.fromkeys((key.value for key in CORE), "rays")
    monkeypatch.setattr(ServeCoreContextFilter, "get_ray_core_logging_context", staticmethod(lambda: rays))
    logs.event("said")
    (line,) = json_log()
    theirs = {"serves", "/v1", "slackserve", "Router", "writer", "rays", ServeComponentType.REPLICA}
    names = {name for name in line if line[name] in theirs}
    assert {"replica", "request_id", "node_id"} <= names
    logs.event("said", **dict.fromkeys(names, "ours"))
    (line,) = json_log()
    assert {line[f"event_{name}"] for name in names} == {"ours"}


def logged(**fields):
    """The messages that an event with these fields writes."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    try:
        logs.event("said", level=logging.CRITICAL, **fields)
    finally:
        logger.removeHandler(handler)
    return messages
