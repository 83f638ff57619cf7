"""Where the token comes from, and where there must be one."""

from __future__ import annotations

import copy
import hmac
import os
import pickle
from pathlib import Path

import pytest

from tensorhub.errors import AuthenticationFailed, StateError
from tensorhub.protocol.secret import (
    Secret,
    Token,
    check_open_access,
    is_loopback,
    read_only_token,
    read_token_file,
    resolve_token,
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home directory and environment."""
    for name in ("TENSORHUB_TOKEN", "TENSORHUB_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def in_force(token: Token | None = None) -> tuple[bytes, ...]:
    found = resolve_token(token)
    return read_token_file(found) if isinstance(found, Path) else (found,)


def test_the_argument_comes_first_then_the_environment_then_the_files(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_force() == (b"",)
    write(home / ".config/tensorhub/token", b"usual\n")
    assert in_force() == (b"usual",)
    monkeypatch.setenv("TENSORHUB_TOKEN_FILE", str(write(home / "named", b" named \n")))
    assert in_force() == (b"named",)
    monkeypatch.setenv("TENSORHUB_TOKEN", " environment\n")
    assert in_force() == (b"environment",)
    assert in_force(" argument\n") == (b"argument",)
    assert in_force(b" as it is\n") == (b" as it is\n",)
    assert in_force("") == (b"",)
    assert in_force(write(home / "given", b"given")) == (b"given",)
    monkeypatch.setenv("TENSORHUB_TOKEN", "")
    assert in_force() == (b"named",)


def test_what_is_no_token_is_said_to_be_none_without_being_shown() -> None:
    with pytest.raises(StateError, match="not int") as caught:
        resolve_token(5318008)  # type: ignore[arg-type]
    assert "5318008" not in str(caught.value)


def test_a_file_has_one_token_a_line(home: Path) -> None:
    path = write(home / "token", b"\n# the old one goes in May\r\n new-one \r\n\nold one\n")
    assert read_token_file(path) == (b"new-one", b"old one")


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o444, 0o660, 0o620, 0o666])
def test_a_file_that_others_may_read_is_refused(home: Path, mode: int) -> None:
    path = write(home / ".config/tensorhub/token", b"secret", mode)
    with pytest.raises(AuthenticationFailed, match=f"chmod 600 {path}"):
        read_token_file(path)


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_group_of_this_process_may_read_the_file_as_kubernetes_mounts_a_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    write(home / "..2026_11_28/token", b"secret", mode)
    (home / "..data").symlink_to("..2026_11_28")
    (home / "token").symlink_to("..data/token")
    group = (home / "token").stat().st_gid
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [group])
    assert read_token_file(home / "token") == (b"secret",)
    monkeypatch.setattr(os, "getgroups", lambda: [group + 2])
    with pytest.raises(AuthenticationFailed, match="chmod 600"):
        read_token_file(home / "token")


@pytest.mark.root
def test_a_file_of_another_user_is_refused_and_one_of_root_is_not(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(home / "token", b"secret")
    os.chown(path, 12345, -1)
    with pytest.raises(
        AuthenticationFailed, match="belongs to user 12345, who is neither this user"
    ):
        read_token_file(path)
    os.chown(path, 0, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_token_file(path) == (b"secret",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"# none\n", "empty"),
        (b"x" * 4097, "4096"),
        (b"x\n" * 9, "9 tokens"),
    ],
)
def test_a_file_without_a_token_or_with_too_much_in_it_is_refused(
    home: Path, content: bytes, says: str
) -> None:
    path = write(home / ".config/tensorhub/token", content)
    with pytest.raises(AuthenticationFailed, match=says):
        read_token_file(path)


def test_a_named_file_must_be_there_and_be_a_file(home: Path) -> None:
    with pytest.raises(AuthenticationFailed, match=r"missing.*TENSORHUB_TOKEN"):
        read_token_file(home / "missing")
    os.mkfifo(home / "pipe", 0o600)
    with pytest.raises(AuthenticationFailed, match="regular file"):
        read_token_file(home / "pipe")
    with pytest.raises(AuthenticationFailed, match="regular file"):
        read_token_file(home)
    with pytest.raises(AuthenticationFailed, match="cannot be read"):
        read_token_file(home / "nul\0byte")


def test_a_secret_is_not_shown() -> None:
    secret = resolve_token("tell nobody")
    for text in (repr(secret), str(secret), f"{secret}", repr({"token": secret})):
        assert "tell nobody" not in text
        assert "hidden" in text
    assert "open" in repr(Secret())
    assert isinstance(secret, bytes)
    for leave in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="a secret is neither pickled"):
            leave(secret)


def test_the_read_only_token_belongs_to_one_token() -> None:
    made = read_only_token(" tell nobody\n")
    assert made == read_only_token("tell nobody") == read_only_token(b"tell nobody")
    assert made == hmac.new(b"tell nobody", b"tensorhub/1 read-only", "sha256").hexdigest()
    assert made != read_only_token("tell somebody")
    for empty in ("", " ", b""):
        with pytest.raises(AuthenticationFailed, match="open access has no read-only token"):
            read_only_token(empty)
    with pytest.raises(StateError, match="tensorhub token read-only"):
        read_only_token(Path("file"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_open_access(b"", host)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "",
        "10.0.0.1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "example.org",
        "localhost.example.org",
    ],
)
def test_elsewhere_a_secret_is_needed(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(AuthenticationFailed, match=r"TENSORHUB_TOKEN.*127\.0\.0\.1"):
        check_open_access(b"", host)
    check_open_access(b"secret", host)
