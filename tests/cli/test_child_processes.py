"""Child processes: what is said, what is heard, and that none is left."""

from __future__ import annotations

import json
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
    return AsyncChildProcess("Fred", [sys.executable, "-c", program], environment=os.environ, keeps_errors=keeps_errors)


async def fails(program: str, doing: Callable[[AsyncChildProcess], Awaitable[object]]) -> ChildEnded:
    async with closing_all() as running:
        running.append(child_of(program))
        with pytest.raises(ChildEnded) as caught, anyio.fail_after(WAIT_S):
            await doing(running[0])
        with pytest.raises(ChildEnded), anyio.fail_after(WAIT_S):  # and whoever asks again is told again
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
        ("import sys; sys.stderr.write('noise\\nthe last words \\n\\n'); sys.exit(3)", "exit code 3: the last words"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: it left no message"),
        ("raise SystemExit", "exit code 0: it left no message"),
        ("print('no JSON', flush=True); import time; time.sleep(600)", "exit code -9: it left no message"),
        ("print('{\"half\":', end='', flush=True)", "exit code "),
    ],
)
async def test_a_child_that_ends_is_named_with_its_last_words(program: str, text: str) -> None:
    ended = await fails(program, AsyncChildProcess.hear)
    assert str(ended).startswith(f"Fred ended with {text}")


async def test_a_line_without_an_end_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.cli.child_processes.LINE_BYTES_MAX", 1000)
    assert LINE_BYTES_MAX > 1000
    ended = await fails("print('1' * 1000, flush=True); import time; time.sleep(600)", AsyncChildProcess.hear)
    assert ended.code == -signal.SIGKILL


async def test_what_goes_to_the_parents_standard_error_is_not_kept() -> None:
    async with closing_all() as running:
        running.append(child_of("raise SystemExit(4)", keeps_errors=False))
        with pytest.raises(ChildEnded, match=r"exit code 4$"), anyio.fail_after(WAIT_S):
            await running[0].hear()


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
    with subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE, text=True) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        assert parent.stdout.readline() == "{'echo': {}}\n"
        pids = children(parent.pid)
        assert len(alive(pids)) == 1
        parent.kill()
        parent.stdout.read()
    assert eventually(lambda: not alive(pids))


async def test_a_child_may_end_in_order_when_its_input_does() -> None:
    program = f"{IMPORTS}import threading\nover = threading.Event()\nParent(print, over.set)\nover.wait()\nsys.exit(5)"
    async with closing_all() as running:
        running.append(child := child_of(program))
        child.end_input()
        assert child.wait(WAIT_S) == 5


@pytest.mark.usefixtures("prepared_with_torch")
async def test_the_demos_children_name_what_they_cannot_use(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("weights") / "bad.safetensors"
    path.write_bytes(b"no")
    settings = {"name": "trainer", "address": "tcp://127.0.0.1:1", "weights": str(path), "seed": 0, "op_timeout_s": 60}
    command = [sys.executable, "-m", "tensorhub.cli.demo_worker", json.dumps(settings)]
    async with closing_all() as running:
        running.append(child := AsyncChildProcess("trainer", command, environment=os.environ))
        with anyio.fail_after(WAIT_S):
            line = await child.hear()
            assert (line["event"], line["kind"]) == ("failed", "usage")
            assert line["text"].startswith(f"{path} is not a safetensors file: ")
            with pytest.raises(ChildEnded, match="exit code 2"):
                await child.hear()
