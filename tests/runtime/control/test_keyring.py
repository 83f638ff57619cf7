"""A token file while it is in use: what is in force after each change of it, good or bad."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tensorhub.errors import AuthenticationFailed
from tensorhub.logs import repeats
from tensorhub.runtime.control.keyring import LOOK_S, TokenFile, open_keyring


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("old\n")
    return path


def test_each_change_of_the_file_is_in_force_after_a_second_at_most(path: Path) -> None:
    clock = Clock()
    keyring = TokenFile(path, clock)
    assert (keyring[0], tuple(keyring), len(keyring)) == (b"old", (b"old",), 1)
    for content, now in (
        ("old\nnew\n", (b"old", b"new")),
        ("new\nold\n", (b"new", b"old")),
        ("new\n", (b"new",)),
    ):
        before = tuple(keyring)
        path.write_text(content)
        clock.now += LOOK_S - 0.001
        assert tuple(keyring) == before  # it is not read for each handshake
        clock.now += 0.001
        assert tuple(keyring) == now
        assert (keyring[0], keyring[:]) == (now[0], now)
        assert [secret in keyring for secret in (b"old", b"new")] == [b"old" in now, b"new" in now]


def test_what_cannot_be_used_leaves_the_last_good_tokens_and_is_said_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    keyring = TokenFile(path, clock)

    def look() -> list[str]:
        caplog.clear()
        clock.now += LOOK_S
        assert tuple(keyring) == (b"old",)
        return [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]

    path.write_text("# half wri")
    assert "is empty" in look()[0]
    assert look() == []
    path.write_text("evil\n")
    path.chmod(0o644)
    assert "run chmod 600" in look()[0]
    assert look() == []
    path.unlink()
    assert "No such file" in look()[0]
    path.mkdir()
    assert "not a regular file" in look()[0]
    path.rmdir()
    path.touch(0o600)
    path.write_text("old\n")
    assert look() == []
    path.unlink()
    repeats.forget()
    assert "No such file" in look()[0]  # it is another time
    assert "evil" not in caplog.text


def test_at_the_start_it_must_be_good(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(AuthenticationFailed, match="run chmod 600"):
        open_keyring(path)
