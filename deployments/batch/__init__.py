"""`slackserve batch`."""


class BatchError(RuntimeError):
    """A file of requests cannot be answered as asked; the message says why and what to do."""
