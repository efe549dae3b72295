"""Lines of the log."""

import logging
from logging.config import dictConfig
from logging.handlers import MemoryHandler

import pytest

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
    assert record.getMessage() == "request_refused param=a\\nrequest_ended tenant=acme why=é is fine"
