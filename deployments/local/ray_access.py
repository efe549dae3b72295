"""Keeps other users of this machine from the local Ray: from its token, its sockets and its logs.

With the token they could run code as the server, and with a socket of their own in the place of one of Ray's,
too. Ray makes the token's file as the umask says, and its directories for everybody.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_GIVEN: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""A token that is the user's own, wherever it is kept."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_SHARED: Final = 0o1777
"""Everybody may have files in such a directory, and none those of others."""


def keep_token() -> None:
    """Let nobody else read the token that Ray takes unless it is given another; make one if there is none."""
    if any(os.environ.get(name) for name in _GIVEN):
        return
    path = Path.home() / ".ray" / "auth_token"  # Ray has no setting for it
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        # Where it is another user's, or mounted, it is theirs to say who reads it.
        with suppress(OSError):
            if (mode := path.stat().st_mode) & _OTHERS:
                path.chmod(mode & ~_OTHERS)
        return
    with os.fdopen(file, "w") as writing:
        writing.write(secrets.token_hex(32))


def keep_session(directory: Path) -> None:
    """Let nobody else into the directory of a Ray that has started, nor put another in its place.

    The latter they still can where the directory above, `/tmp/ray` by default, is another user's.
    """
    directory.chmod(0o700)
    with suppress(PermissionError):
        directory.parent.chmod(_SHARED)
