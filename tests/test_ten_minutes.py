"""The README's ten minutes, command by command, with real processes: what it says happens."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import PROGRAM, WAIT_S, environment, eventually

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## Ten minutes\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
INSTALLING = ("python3 ", "source ", "pip ", "export ")  # tests run in what is installed
PROGRAMS = {"tensorhub": PROGRAM, "python": (sys.executable,)}


class Terminals:
    """Commands that run in one directory; what each has printed so far is in a file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as other,
        ):
            self.port, self.http = (str(free.getsockname()[1]) for free in (one, other))
        self._env = environment() | {
            "TENSORHUB_ADDRESS": f"tcp://127.0.0.1:{self.port}",
            "PYTHONUNBUFFERED": "1",
        }

    def words(self, command: str) -> list[str]:
        first, *rest = shlex.split(command.replace("17337", self.port).replace("8080", self.http))
        return [*PROGRAMS.get(first, (first,)), *rest]

    def run(self, command: str) -> str:
        """The output of a command that ends."""
        done = subprocess.run(
            self.words(command),
            cwd=self.directory,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, command: str) -> None:
        with (self.directory / self._log(command)).open("wb") as log:
            self.running[command] = subprocess.Popen(
                self.words(command),
                cwd=self.directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, command: str, number: signal.Signals) -> None:
        self.running[command].send_signal(number)
        self.running.pop(command).wait(timeout=WAIT_S)

    def printed(self, command: str) -> str:
        return (self.directory / self._log(command)).read_text(encoding="utf-8")

    def until(self, command: str, pattern: str) -> None:
        """Wait until the command has printed that; it may not end meanwhile."""

        def there() -> bool:
            assert self.running[command].poll() is None, self.printed(command)
            return re.search(pattern, self.printed(command)) is not None

        assert eventually(there), f"{command}: no {pattern!r} in {self.printed(command)}"

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()

    def _log(self, command: str) -> str:
        return re.sub(r"\W+", "_", command) + ".log"


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    opened = Terminals(tmp_path)
    yield opened
    opened.end()


def steps() -> tuple[list[str], list[str]]:
    """The section's commands and its Python blocks, in order."""
    assert SECTION is not None
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", SECTION[1], re.MULTILINE | re.DOTALL)
    lines = [line for kind, code in blocks if kind == "sh" for line in code.splitlines()]
    commands = [line for line in lines if not line.startswith(INSTALLING)]
    return commands, [code for kind, code in blocks if kind == "python"]


@pytest.mark.heavy
def test_what_the_readme_says_happens(terminals: Terminals) -> None:
    commands, (make_a_file, loop) = steps()
    serve, publish, fetch, compare, *training = commands
    trainer, quick, slow, top, explain, late = training

    terminals.start(serve)
    terminals.until(serve, "Ctrl-C stops it")

    (terminals.directory / "make_a_file.py").write_text(make_a_file, encoding="utf-8")
    terminals.run("python make_a_file.py")
    terminals.start(publish)
    assert "fetched mine" in terminals.run(fetch)
    terminals.run(compare)
    terminals.stop(publish, signal.SIGINT)

    (terminals.directory / "loop.py").write_text(loop, encoding="utf-8")
    for command in (trainer, quick, slow):
        terminals.start(command)
    for command in (quick, slow):
        terminals.until(command, r"(?s)version \d+: .* from (trainer|quick|slow)\n.*version \d+: ")

    watch(terminals, top, explain)
    kill(terminals, trainer, late)
    restart(terminals, serve, [quick, slow, late])


def watch(terminals: Terminals, top: str, explain: str) -> None:
    terminals.start(top)  # plain lines, without a terminal
    terminals.until(top, r"actor(?s:.*)slow")
    terminals.stop(top, signal.SIGINT)
    page = f"http://127.0.0.1:{terminals.http}/"
    with urllib.request.urlopen(page, timeout=WAIT_S) as answer:
        assert b"<title>TensorHub</title>" in answer.read()

    def named() -> bool:
        longest, *parts = terminals.run(explain).splitlines()
        shares = [line for line in parts if " before_write " in line]
        return longest.endswith(": before_write on slow") and len(shares) == 1

    assert eventually(named)


def kill(terminals: Terminals, trainer: str, late: str) -> None:
    """A rollout that begins after the trainer's death gets the last version from the others."""
    terminals.stop(trainer, signal.SIGQUIT)
    terminals.start(late)
    terminals.until(late, r"version \d+: 4,198,400 bytes in .* from (quick|slow)")


def restart(terminals: Terminals, serve: str, rollouts: list[str]) -> None:
    terminals.stop(serve, signal.SIGINT)
    terminals.start(serve)
    terminals.until(serve, "Ctrl-C stops it")

    def holding() -> set[str]:
        (actor,) = json.loads(terminals.run("tensorhub status actor --json"))
        return {replica["group"] for replica in actor["replicas"]}

    names = {command.split()[2] for command in rollouts}
    assert eventually(lambda: holding() == names)
    assert [command for command in rollouts if terminals.running[command].poll() is not None] == []
