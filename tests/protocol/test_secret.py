"""Where the token comes from, and where there must be one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorhub.errors import AuthenticationFailed
from tensorhub.protocol.secret import Secret, check_open_access, is_loopback, resolve_token


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


def test_the_argument_comes_first_then_the_environment_then_the_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_token(None) == b""
    write(home / ".config/tensorhub/token", b"usual\n")
    assert resolve_token(None) == b"usual"
    monkeypatch.setenv("TENSORHUB_TOKEN_FILE", str(write(home / "named", b" named \n")))
    assert resolve_token(None) == b"named"
    monkeypatch.setenv("TENSORHUB_TOKEN", " environment\n")
    assert resolve_token(None) == b"environment"
    assert resolve_token(" argument\n") == b"argument"
    assert resolve_token(b" as it is\n") == b" as it is\n"
    assert resolve_token("") == b""
    monkeypatch.setenv("TENSORHUB_TOKEN", "")
    assert resolve_token(None) == b"named"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o666])
def test_a_file_that_others_may_read_is_refused(home: Path, mode: int) -> None:
    path = write(home / ".config/tensorhub/token", b"secret", mode)
    with pytest.raises(AuthenticationFailed, match=f"chmod 600 {path}"):
        resolve_token(None)


@pytest.mark.parametrize(("content", "says"), [(b"", "empty"), (b" \n", "empty"), (b"x" * 4097, "4096")])
def test_a_file_without_a_token_is_refused(home: Path, content: bytes, says: str) -> None:
    write(home / ".config/tensorhub/token", content)
    with pytest.raises(AuthenticationFailed, match=says):
        resolve_token(None)


def test_a_named_file_must_be_there_and_be_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_TOKEN_FILE", str(home / "missing"))
    with pytest.raises(AuthenticationFailed, match=r"missing.*TENSORHUB_TOKEN"):
        resolve_token(None)
    os.mkfifo(home / "pipe", 0o600)
    monkeypatch.setenv("TENSORHUB_TOKEN_FILE", str(home / "pipe"))
    with pytest.raises(AuthenticationFailed, match="regular file"):
        resolve_token(None)


def test_a_secret_is_not_shown() -> None:
    secret = resolve_token("tell nobody")
    for text in (repr(secret), str(secret), f"{secret}", repr({"token": secret})):
        assert "tell nobody" not in text
        assert "hidden" in text
    assert "open" in repr(Secret())
    assert isinstance(secret, bytes)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"])
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
