"""Keeps other users of this machine from the local Ray: from its token, its sockets and its logs.

With the token they could run code as the server, and with a socket of their own in the place of one of Ray's,
too. Ray makes the token's file as the umask says, and its directories for everybody.
"""

from __future__ import annotations

import os
import secrets
import shlex
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from deployments.config import ConfigError

_GIVEN: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""A token that is the user's own, wherever it is kept."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_SHARED: Final = 0o1777
"""Everybody may have files in such a directory, and none those of others."""


def check_access() -> None:
    """Make sure that Ray will ask for a token, and that there can be one.

    Raises:
        ConfigError: when it would not, or there cannot.
    """
    if (mode := os.environ.get("RAY_AUTH_MODE", "")) and mode.lower() != "token":
        raise ConfigError(open_ray(mode))
    _check_given()
    if (path := _made_token()) is None:
        return
    try:
        if path.exists():
            return
        above = next(each for each in path.parents if each.exists())
        can_be = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    except OSError:
        can_be = False
    if not can_be:
        raise _no_token(path)


def open_ray(mode: str) -> str:
    """What is said of a Ray that asks for no token."""
    return (
        f"Ray asks for no token (RAY_AUTH_MODE is {mode!r}), so that whoever reaches it or a replica can run "
        "code here; unset RAY_AUTH_MODE or set RAY_AUTH_MODE=token (see `ray get-auth-token`)"
    )


def _check_given() -> None:
    """Make sure that a file which the user names for the token has one: Ray makes none there.

    Raises:
        ConfigError: when it has not.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not path or os.environ.get("RAY_AUTH_TOKEN"):  # which Ray takes first
        return
    try:
        why = "" if Path(path).read_bytes().strip() else "it is empty"
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise ConfigError(
            f"RAY_AUTH_TOKEN_PATH: Ray finds no token in {path} ({why}); write one to it, as with "
            f"`(umask 077; openssl rand -hex 32 > {shlex.quote(path)})`, or unset RAY_AUTH_TOKEN_PATH"
        )


def _made_token() -> Path | None:
    """Where the token is that Ray takes unless it is given another; None if it is.

    Raises:
        ConfigError: when there is no such place.
    """
    if any(os.environ.get(name) for name in _GIVEN):
        return None
    try:
        return Path.home() / ".ray" / "auth_token"  # Ray has no setting for it
    except RuntimeError:
        raise _no_token(Path("~/.ray/auth_token")) from None


def _no_token(path: Path) -> ConfigError:
    return ConfigError(
        f"Ray's token cannot be kept in {path}; give the user of this process a home directory that it can "
        "write to, or set RAY_AUTH_TOKEN_PATH to a file with a token"
    )


def keep_token() -> None:
    """Let nobody else read the token that Ray takes unless it is given another; make one if there is none.

    Raises:
        ConfigError: when there is none, and none can be made.
    """
    if (path := _made_token()) is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if not path.exists():
            raise _no_token(path) from None
        # Where it is another user's, or mounted, it is theirs to say who reads it.
        with suppress(OSError):
            if (mode := path.stat().st_mode) & _OTHERS:
                path.chmod(mode & ~_OTHERS)
        return
    except OSError:
        raise _no_token(path) from None
    with os.fdopen(file, "w") as writing:
        writing.write(secrets.token_hex(32))


def keep_session(directory: Path) -> None:
    """Let nobody else into the directory of a Ray that has started, nor put another in its place.

    The latter they still can where the directory above, `/tmp/ray` by default, is another user's.
    """
    directory.chmod(0o700)
    with suppress(PermissionError):
        directory.parent.chmod(_SHARED)
