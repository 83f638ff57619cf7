"""A child that has imported already is a process like any other."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benches.child_processes import children

pytestmark = pytest.mark.usefixtures("prepared")
TELLS = """
import json, os, sys
is_leader, is_prepared = os.getsid(0) == os.getpid(), "tensorhub" in sys.modules
print(json.dumps([os.getppid(), os.getcwd(), os.environ.get("A"), sys.argv[1:], is_leader, is_prepared]))
sys.exit(int(sys.stdin.read()))
"""
KEEPS = """
class Trainer:
    def __del__(self): print("gone")

trainer = Trainer()
trainer.me = trainer
"""


def test_it_is_a_child_of_this_process_and_as_it_was_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TELLS, "x", "y"]
    environment = {**os.environ, "A": "b"}
    done = subprocess.run(
        command,
        input="3",
        stdout=-1,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == [os.getpid(), str(tmp_path), "b", ["x", "y"], True, True]
    assert done.returncode == 3


def test_it_can_be_killed_and_is_collected() -> None:
    before = children(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-m", "tests.processes.actor"], stdin=-1, stdout=-1, process_group=0
    ) as child:
        assert os.getpgid(child.pid) == child.pid
        assert set(children(os.getpid())) == {*before, child.pid}
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert children(os.getpid()) == before


@pytest.mark.heavy
def test_after_a_start_that_was_broken_off_the_next_child_is_the_one_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(channel: object, length: int) -> bytes:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr("benches.prepared._exactly", late)
        with pytest.raises(TimeoutError):
            subprocess.run([sys.executable, "-c", "raise SystemExit(1)"], timeout=60)
    assert subprocess.run([sys.executable, "-c", "raise SystemExit(2)"], timeout=60).returncode == 2


def test_what_is_left_is_collected_at_its_end() -> None:
    assert (
        subprocess.run([sys.executable, "-c", KEEPS], stdout=-1, text=True, timeout=60).stdout
        == "gone\n"
    )


def test_what_it_raises_is_said_on_its_standard_error() -> None:
    program = f"import warnings\n{KEEPS}\nwarnings.warn('w')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "gone\n")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("UserWarning: w\n")


@pytest.mark.parametrize("other", [["-u", "-c"], ["-c"]])
def test_whoever_asks_for_another_interpreter_gets_a_new_one(other: list[str]) -> None:
    environment = os.environ if len(other) == 2 else {**os.environ, "PYTHONOPTIMIZE": "1"}
    program = "import sys; print('tensorhub' in sys.modules)"
    done = subprocess.run(
        [sys.executable, *other, program], stdout=-1, text=True, env=environment, timeout=60
    )
    assert done.stdout == "False\n"
