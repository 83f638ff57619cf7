"""Exit codes, error lines, and what a signal does to a command."""

import os
import signal

import anyio
import pytest
import typer

from tensorhub.cli.common import (
    FAILED,
    USAGE,
    CommandError,
    check_address,
    format_bytes,
    report,
    run,
    seconds,
    size,
    usage,
    whole,
)
from tensorhub.errors import CoordinatorUnavailable, VersionConflict


def exit_code(error: Exception | None = None, number: int | None = None) -> int:
    async def body() -> int:
        if number is not None:
            os.kill(os.getpid(), number)
            await anyio.sleep(30)
        if error is not None:
            raise error
        return 0

    with pytest.raises(typer.Exit) as ended:
        run(body)
    return ended.value.exit_code


def test_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 0
    assert capfd.readouterr() == ("", "")
    assert exit_code(VersionConflict("7 was\nused  already")) == FAILED
    assert exit_code(usage("give a file")) == USAGE
    assert exit_code(number=signal.SIGINT) == 130
    assert exit_code(number=signal.SIGTERM) == 143
    assert capfd.readouterr().err.splitlines() == [
        "error: VersionConflict: 7 was used already",
        "error: usage: give a file",
    ]


def test_an_expected_error_in_a_group_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    inner = ExceptionGroup("", [OSError("noise"), CoordinatorUnavailable("nobody there")])
    assert report(ExceptionGroup("", [inner])) == FAILED
    assert capfd.readouterr().err == "error: CoordinatorUnavailable: nobody there\n"


def test_what_others_have_said_is_no_command_to_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    report(CoordinatorUnavailable("it is \x1b[2J\x9b31mfine\x07\u202e, größe 📏"))
    assert (
        capfd.readouterr().err
        == "error: CoordinatorUnavailable: it is \\x1b[2J\\x9b31mfine\\x07\\u202e, größe 📏\n"
    )


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("100MB", 10**8),
        ("1.5GiB", 1_610_612_736),
        ("2 kB", 2000),
        ("3K", 3000),
        ("4ki", 4096),
        ("5B", 5),
        ("0.5TB", 5 * 10**11),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "MB",
        "1e9",
        "1.5.2GB",
        "1XB",
        "1iB",
        "100 M B",
        "9" * 21,
        "9999999PB",
        "\u0661",
    ],
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="give bytes, as 100MB"):
        size(text)


def test_bytes_for_people() -> None:
    shown = [format_bytes(nbytes) for nbytes in (0, 999, 1000, 90_000_000, 15_000_000_000, 2**63)]
    assert shown == ["0 B", "999 B", "1.0 kB", "90.0 MB", "15.0 GB", "9,223.4 PB"]


def test_numbers_and_seconds() -> None:
    assert (whole(0, 9)("9"), whole(1)("10"), whole(1)("3"), seconds(0, 5)("1.5")) == (
        9,
        10,
        3,
        1.5,
    )
    for wrong in ("10", "-1", "x", "1.0", "9" * 30, "\u0662"):
        with pytest.raises(typer.BadParameter, match="give a whole number, 0 to 9"):
            whole(0, 9)(wrong)
    for wrong in ("nan", "-1", "6", "x"):
        with pytest.raises(typer.BadParameter, match="give seconds, 0 to 5"):
            seconds(0, 5)(wrong)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        report(ZeroDivisionError())
    with pytest.raises(RuntimeError):
        run(failing)


async def failing() -> int:
    raise RuntimeError("a bug")


def test_what_cleaning_up_after_a_signal_raises_is_not_the_outcome() -> None:
    async def body() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep(30)
        finally:
            raise VersionConflict("on the way out")

    with pytest.raises(typer.Exit) as ended:
        run(body)
    assert ended.value.exit_code == 143


def test_addresses() -> None:
    assert check_address("tcp://[::1]:80") == "tcp://[::1]:80"
    with pytest.raises(CommandError, match="TENSORHUB_ADDRESS"):
        check_address(None)
    with pytest.raises(CommandError, match=r'give "tcp://HOST:PORT"'):
        check_address("http://here")
