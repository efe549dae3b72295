"""Shared memory between the processes of a prefill replica, and the messages on it."""
