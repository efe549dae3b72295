"""`slackserve bench`."""


class BenchError(RuntimeError):
    """A load test cannot be run as asked; the message says why and what to do."""
