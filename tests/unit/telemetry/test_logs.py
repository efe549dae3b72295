"""Lines of the log."""

from telemetry import logs


def test_what_a_client_sent_forges_no_line(caplog):
    with caplog.at_level("INFO", "ray.serve"):
        logs.event("request_refused", param="a\nrequest_ended tenant=acme", why="é is fine")
    (record,) = caplog.records
    assert record.getMessage() == "request_refused param=a\\nrequest_ended tenant=acme why=é is fine"
