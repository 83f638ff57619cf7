"""Child processes: what is said, what is heard, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import anyio
import pytest

from tensorhub.cli.child_processes import LINE_BYTES_MAX, AsyncChildProcess, ChildEnded, closing_all
from tests.cli.processes import WAIT_S, alive, children, eventually

pytestmark = pytest.mark.anyio
IMPORTS = "import os, queue, sys, time\nfrom tensorhub.cli.child_processes import Parent\n"
ECHO = f"""{IMPORTS}
commands = queue.SimpleQueue()
parent = Parent(commands.put)
print("printed")
while True:
    parent.say(echo=commands.get())
"""


def child_of(program: str, *, keeps_errors: bool = True) -> AsyncChildProcess:
    return AsyncChildProcess(
        "Fred", [sys.executable, "-c", program], environment=os.environ, keeps_errors=keeps_errors
    )


async def fails(
    program: str, doing: Callable[[AsyncChildProcess], Awaitable[object]]
) -> ChildEnded:
    async with closing_all() as running:
        running.append(child_of(program))
        with pytest.raises(ChildEnded) as caught, anyio.fail_after(WAIT_S):
            await doing(running[0])
        # and whoever asks again is told again
        with pytest.raises(ChildEnded), anyio.fail_after(WAIT_S):
            await running[0].ask(do="more")
    return caught.value


async def test_lines_go_there_and_back_and_prints_are_no_lines() -> None:
    async with closing_all() as running:
        running.append(child := child_of(ECHO))
        with anyio.fail_after(WAIT_S):
            for line in ({"do": "this", "with": [1, None, "\n"]}, {"much": "x" * 300_000}):
                assert await child.ask(**line) == {"echo": line}
        pids = [child.pid]
        assert len(alive(pids)) == 1
    assert alive(pids) == []
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            "import sys; sys.stderr.write('noise\\nthe last words \\n\\n'); sys.exit(3)",
            "exit code 3: the last words",
        ),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: it left no message"),
        ("raise SystemExit", "exit code 0: it left no message"),
        (
            "print('no JSON', flush=True); import time; time.sleep(600)",
            "exit code -9: it left no message",
        ),
        ("print('{\"half\":', end='', flush=True)", "exit code "),
    ],
)
async def test_a_child_that_ends_is_named_with_its_last_words(program: str, text: str) -> None:
    ended = await fails(program, AsyncChildProcess.hear)
    assert str(ended).startswith(f"Fred ended with {text}")


async def test_a_line_without_an_end_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.cli.child_processes.LINE_BYTES_MAX", 1000)
    assert LINE_BYTES_MAX > 1000
    ended = await fails(
        "print('1' * 1000, flush=True); import time; time.sleep(600)", AsyncChildProcess.hear
    )
    assert ended.code == -signal.SIGKILL


async def test_a_child_that_does_not_read_costs_no_deadline() -> None:
    async with closing_all() as running:
        running.append(child := child_of("import time; time.sleep(600)"))
        with anyio.move_on_after(0.1) as scope:
            await child.tell(much="x" * 10**6)
        assert scope.cancelled_caught
    assert child.returncode == -signal.SIGKILL


async def test_children_end_with_their_parent() -> None:
    program = f"""
import os, subprocess, sys, time
from tensorhub.cli.child_processes import ChildProcess
child = ChildProcess("Fred", [sys.executable, "-c", {ECHO!r}], print, environment=os.environ)
child.write({{}})
time.sleep(600)
"""
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-uc", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "{'echo': {}}\n"
        pids = children(parent.pid)
        assert len(alive(pids)) == 1
        parent.kill()
        parent.stdout.read()
    assert eventually(lambda: not alive(pids))
