"""`tensorhub token`, and that no command shows a token, to whomever looks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import tensorhub
from tensorhub.cli.app import app
from tensorhub.protocol.secret import read_token_file
from tests.cli.processes import environment

SECRET = "Zyzzyva-0123-never-shown"
READ_ONLY = tensorhub.read_only_token(SECRET)


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORHUB_TOKEN", "TENSORHUB_TOKEN_FILE", "TENSORHUB_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{SECRET}\nan-older-one\n")
    return path


def test_a_new_token_is_random_its_users_own_and_not_shown(tmp_path: Path) -> None:
    made = []
    for name in ("one", "other"):
        done = run("token", "new", "--out", str(tmp_path / name))
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"{tmp_path / name}\n")
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        (token,) = read_token_file(tmp_path / name)
        assert len(token) == 43  # 32 random bytes in base64
        made.append(token)
    assert made[0] != made[1]


@pytest.mark.parametrize("command", [("new",), ("read-only", "--token-file", "FILE")])
def test_nothing_is_overwritten(file: Path, command: tuple[str, ...]) -> None:
    before = file.read_bytes()
    given = [str(file) if word == "FILE" else word for word in command]
    done = run("token", *given, "--out", str(file))
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"error: usage: {file} exists, and may be in use: give another --out, or remove it\n"
    )
    assert file.read_bytes() == before
    done = run("token", *given, "--out", str(file / "below"))
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: usage: {file / 'below'} cannot be made: Not a directory\n",
    )


def test_the_read_only_token_is_that_of_the_first_line(file: Path, tmp_path: Path) -> None:
    done = run("token", "read-only", "--token-file", str(file))
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{READ_ONLY}\n", "")
    out = tmp_path / "dashboard"
    done = run("token", "read-only", "--token-file", str(file), "--out", str(out))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"{out}\n")
    assert read_token_file(out) == (READ_ONLY.encode(),)
    assert out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ((), 1, "error: AuthenticationFailed: open access has no read-only token"),
        (
            ("--token-file", "/no/such/file"),
            2,
            "error: usage: the token file /no/such/file cannot be read",
        ),
    ],
)
def test_without_a_token_there_is_none(
    given: tuple[str, ...], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    done = run("token", "read-only", *given)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith(says)


def test_a_crash_shows_no_token(file: Path) -> None:
    """A defect ends with a traceback, in which there are no local variables."""
    program = "import tensorhub; from tensorhub.cli import main; tensorhub.connect = None; main()"
    given = (sys.executable, "-c", program, "status", "--address", "tcp://127.0.0.1:1")
    hidden = environment() | {"TENSORHUB_TOKEN": SECRET}
    done = subprocess.run(
        [*given, "--token-file", str(file)], capture_output=True, text=True, timeout=300, env=hidden
    )
    assert done.returncode == 1
    assert "TypeError" in done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in (SECRET, READ_ONLY))
