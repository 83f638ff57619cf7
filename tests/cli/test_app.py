"""The command line's own options."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from typer.testing import CliRunner

import tensorhub
from tensorhub.cli.app import COMMANDS, app


def test_version() -> None:
    program = (
        "import sys; from tensorhub.cli import main; sys.argv = ['tensorhub', '--version']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, f"tensorhub {tensorhub.__version__}\n"), (
        done.stderr
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_cannot_be_printed_is_an_error_in_one_line(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tensorhub", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            env=environment,
        )
    assert done.stderr == "error: output: stdout cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS), ("token", "new"), ("token", "read-only")]
)
def test_help(command: tuple[str, ...]) -> None:
    """At 80 columns: whole words, paragraphs that fill their lines, nothing cut, and no ranges of
    64 bits.
    """
    short, long = (
        CliRunner().invoke(app, [*command, option], env={"COLUMNS": "80"})
        for option in ("-h", "--help")
    )
    assert (short.exit_code, short.output) == (0, long.output)
    lines = short.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert short.output.isascii()
    assert "..." not in short.output.replace('{"address": ...}', "").replace("[ARGS]...", "")
    assert "<=" not in short.output
    assert "9223372036854775807" not in short.output
    described = lines[
        2 : next(
            at for at, line in enumerate(lines) if line.endswith(":") and not line.startswith(" ")
        )
    ]
    for line, after in pairwise(described):  # a line that ends early ends its paragraph
        assert not after or not line or len(line) + 1 + len(after.split()[0]) > 78, line


def test_every_command_that_prints_data_can_print_json() -> None:
    for name in COMMANDS.keys() - {"report", "token"}:  # a page, and secrets
        assert "--json" in CliRunner().invoke(app, [name, "--help"]).output, name


def test_a_wrong_command_is_told_a_right_one_and_imports_none() -> None:
    program = (
        "import sys; from tensorhub.cli.app import app; app(['stauts'], standalone_mode=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert "No such command 'stauts'. Did you mean 'status'?" in done.stderr
