"""Lines of the log."""

import logging
import re
from logging.config import dictConfig
from logging.handlers import MemoryHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry import logs


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
