"""The version of the protocol that a deployment's processes speak, and its check where a message enters one.

While a deployment is upgraded, processes of two versions of the code are there at once. One that reads a
message of another protocol as its own would take one field for another, and decide by it; so it refuses it,
with words. A change that the other version could not read raises `PROTOCOL`: a field of a message or its
meaning, or a method that the other side does not have.
"""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any, Final

PROTOCOL: Final = 29
OTHER_PROTOCOL: Final = "other_protocol"
"""Type of the error that a request is answered with whose context is of another protocol."""


class OtherProtocolError(RuntimeError):
    """A message comes from a process that speaks another version of the protocol."""

    def __init__(self, spoken: object) -> None:
        super().__init__(
            f"a message of protocol {spoken!r} has reached a process that speaks protocol {PROTOCOL}; "
            "versions that speak different protocols cannot serve together: "
            "deploy the new one beside the old, and move the traffic"
        )


def check(spoken: object) -> None:
    """Refuse another protocol.

    Raises:
        OtherProtocolError: It is one.
    """
    if spoken != PROTOCOL:
        raise OtherProtocolError(spoken)


class Message:
    """A dataclass that one process sends to another: pickled, it says which protocol it is of.

    The content is pickled apart from that, so that a process reads none of it before it knows the version.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """See `pickle`."""
        content: Any = self
        values = tuple([getattr(self, each.name) for each in fields(content)])
        return received, (PROTOCOL, pickle.dumps((type(self), values), pickle.HIGHEST_PROTOCOL))


def received(spoken: object, content: bytes) -> Any:
    """The message that has this content; every version of the code finds this function here.

    Raises:
        OtherProtocolError: It is of another protocol.
    """
    check(spoken)
    kind, values = pickle.loads(content)  # noqa: S301 - from a process of this deployment, as the rest of the call
    return kind(*values)
