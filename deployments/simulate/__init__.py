"""`slackserve simulate`."""


class SimulateError(Exception):
    """What was asked for cannot be simulated; the message says what to do."""
