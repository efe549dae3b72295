"""What other users of the machine see of the token and the files of a local Ray."""

import errno
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
from ray._common.utils import try_to_create_directory
from ray._private.authentication import authentication_token_setup as rays
from ray._raylet import AuthenticationTokenLoader
from ray.exceptions import AuthenticationError

from deployments.config import ConfigError
from deployments.local.ray_access import check_access, keep_session, keep_token


def mode(path):
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    yield tmp_path
    loader.reset_cache()


def test_nobody_else_reads_a_token_that_ray_has_made(home):
    rays.generate_and_save_token()
    path = home / ".ray" / "auth_token"
    path.chmod(0o644)
    made = path.read_text()
    keep_token()
    assert (mode(path), path.read_text()) == ("0o600", made)


def test_where_there_is_no_token_yet_ray_takes_the_one_that_is_made(home):
    assert not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    keep_token()
    path = home / ".ray" / "auth_token"
    assert mode(path) == "0o600"
    assert len(path.read_text()) == 64
    AuthenticationTokenLoader.instance().reset_cache()
    assert AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)


@pytest.mark.parametrize("mode_", [0o600, 0o644])
def test_a_token_on_a_file_system_that_is_only_read_is_left_as_it_is(home, monkeypatch, mode_):
    rays.generate_and_save_token()
    path = home / ".ray" / "auth_token"
    path.chmod(mode_)

    def refused(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "chmod", refused)
    keep_token()
    assert mode(path) == oct(mode_)


def test_a_home_that_can_have_no_token_is_refused_before_and_when_it_is_needed(home, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    check_access()
    assert not (home / ".ray").exists(), "it only looks"
    (home / ".ray").write_text("a file")
    for refuses in (check_access, keep_token):
        with pytest.raises(
            ConfigError, match=r"token cannot be kept in .*; give the user .* a home directory"
        ):
            refuses()


@pytest.mark.parametrize(("mode_", "is_refused"), [("disabled", True), ("TOKEN", False), ("", False)])
def test_a_mode_without_a_token_is_known_before_ray_starts(home, monkeypatch, mode_, is_refused):
    monkeypatch.setenv("RAY_AUTH_MODE", mode_)
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE=token") if is_refused else nullcontext():
        check_access()


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_that_is_given_is_left_alone(home, name, monkeypatch):
    monkeypatch.setenv(name, str(home / "token"))
    keep_token()
    assert not (home / ".ray").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file or directory"), ("", "it is empty"), (" \n", "it is empty"), ("token\n", None)],
)
def test_a_file_that_is_given_without_a_token_is_refused_as_ray_would(home, monkeypatch, content, why):
    path = home / "token"
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    if content is not None:
        path.write_text(content)
    loader = AuthenticationTokenLoader.instance()
    with nullcontext() if why is None else pytest.raises(AuthenticationError):
        assert loader.has_token(ignore_auth_mode=True)
    told = rf"^RAY_AUTH_TOKEN_PATH: Ray finds no token in {path} \({why}\); write one to it, as with "
    with nullcontext() if why is None else pytest.raises(ConfigError, match=told):
        check_access()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    loader.reset_cache()
    assert loader.has_token(ignore_auth_mode=True)
    check_access()


def test_nobody_else_gets_into_a_session_or_has_another_in_its_place(tmp_path):
    root, session = tmp_path / "ray", tmp_path / "ray" / "session_1"
    for each in (root, session, session / "sockets", session / "logs"):
        try_to_create_directory(each)
        assert mode(each) == "0o777"
    keep_session(session)
    assert mode(session) == "0o700"
    assert mode(root) == "0o1777"


def test_a_directory_above_that_is_another_users_is_left_as_it_is(tmp_path, monkeypatch):
    session = tmp_path / "session_1"
    session.mkdir()
    real = Path.chmod

    def chmod(path, mode_):
        if path == tmp_path:
            raise PermissionError
        real(path, mode_)

    monkeypatch.setattr(Path, "chmod", chmod)
    keep_session(session)
    assert mode(session) == "0o700"
