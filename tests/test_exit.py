"""A process with an open hub ends, whatever holds the hub, and what it had in the cluster goes with
it.

Each child is a real interpreter. This process sees what the child has said to the coordinator.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import tensorhub
from tensorhub import sync
from tensorhub.types import Options
from tests.rig import OPTIONS, WAIT_S

pytestmark = pytest.mark.usefixtures("prepared")
BEGIN = """
import atexit, gc, os, signal, sys, threading, time
import numpy as np
import tensorhub
from tensorhub import sync

ADDRESS = sys.argv[1]
PATIENT = tensorhub.Options(exit_timeout_s=1000)  # the last words have time, however busy the machine is
memory = {"a": np.full(4096, 7, np.uint8)}


def connect(options=PATIENT):
    return sync.connect(ADDRESS, name="child", token="", options=options)


def publish(hub, **settings):
    weights = hub.register("m", memory, **settings)
    weights.publish(1)
    return weights


"""

KEPT = "weights = hub.register('r', memory)\nweights.publish(1)\n"
WAYS = {
    "raises in a class that keeps it": (
        """
class Trainer:
    def __init__(self):
        self.hub = connect()
        self.weights = publish(self.hub)

Trainer().weights.publish(-1)
""",
        1,
    ),
    "kept to the end": (
        """
class Trainer:
    def __init__(self):
        self.hub = connect()
        self.weights = publish(self.hub)

trainer = Trainer()
""",
        0,
    ),
    "entered by hand": (
        """
hub = connect().__enter__()
weights = publish(hub)
""",
        0,
    ),
    "entered by hand, context kept": (
        """
context = connect()
hub = context.__enter__()
publish(hub)
raise SystemExit(3)
""",
        3,
    ),
    "sys.exit": (
        """
hub = connect()
weights = publish(hub)
sys.exit(3)
""",
        3,
    ),
    "sys.exit in a block": (
        """
with connect() as hub:
    publish(hub)
    sys.exit(3)
""",
        3,
    ),
    "a reference cycle": (
        """
class Trainer:
    def __init__(self):
        self.hub = connect()
        self.weights = publish(self.hub)

trainer = Trainer()
trainer.me = trainer
del trainer
""",
        0,
    ),
    "a reference cycle, collected": (
        """
class Trainer:
    def __init__(self):
        self.hub = connect()
        self.weights = publish(self.hub)

trainer = Trainer()
trainer.me = trainer
del trainer
gc.collect()
""",
        0,
    ),
    "closes when it is collected, wherever": (
        """
class Trainer:
    def __init__(self):
        self.hub = connect()
        self.weights = publish(self.hub)

    def __del__(self):
        self.hub.close()

trainer = Trainer()
trainer.me = trainer
del trainer
""",
        0,
    ),
    "closes while the interpreter is taken apart": (
        """
class Trainer:
    def __init__(self):
        self.hub = connect()
        self.weights = publish(self.hub)

    def __del__(self):
        self.hub.close()

sys.kept = Trainer()
""",
        0,
    ),
    "opens while the interpreter is taken apart": (
        """
class Late:
    def __del__(self):
        try:
            connect()
        except tensorhub.StateError:
            os.write(1, b'refused')

hub = connect()
weights = publish(hub)
sys.late = Late()
""",
        0,
    ),
    "uses it in a later exit handler": (
        """
atexit.register(lambda: hub.close())
hub = connect()
weights = publish(hub)
atexit.register(hub.describe)
""",
        0,
    ),
    "opened in a thread": (
        """
def work():
    global hub
    hub = connect()
    publish(hub)

thread = threading.Thread(target=work)
thread.start()
thread.join()
""",
        0,
    ),
    "a thread that goes on after the main one": (
        """
def work():
    threading.main_thread().join()
    hub = connect(); publish(hub); hub.describe()
    os.write(1, b'ok')

if sys.version_info[:2] == (3, 12):
    hub = connect(); publish(hub)
else:
    threading.Thread(target=work).start()
""",
        0,
    ),
    "a daemon waits in a call": (
        """
hub = connect()
weights = publish(hub)
sync_call = threading.Thread(
    target=lambda: hub.wait_for('n', at_least=5, timeout=1000), daemon=True)
sync_call.start()
watching = threading.Thread(target=lambda: list(hub.watch('n')), daemon=True)
watching.start()
hub.describe()
""",
        0,
    ),
    "in a pin and a mutation": (
        """
hub = connect()
weights = publish(hub, group='g', rank=0, world_size=1)
block = hub.pin('m', 1)
block.__enter__()
other = hub.register('o', {'b': np.zeros(64)}).mutate(1)
other.__enter__()
""",
        0,
    ),
    "async, without a block": (
        """
import anyio

async def main():
    global hub, weights
    hub = await tensorhub.connect(ADDRESS, name='child', token='', options=PATIENT)
    weights = await hub.register('m', memory)
    await weights.publish(1)

anyio.run(main)
""",
        0,
    ),
    "async, on trio, dropped": (
        """
import anyio

async def main():
    hub = await tensorhub.connect(ADDRESS, name='child', token='', options=PATIENT)
    weights = await hub.register('m', memory)
    await weights.publish(1)

anyio.run(main, backend='trio')
""",
        0,
    ),
    "async, entered by hand, the loop closed under it": (
        """
import asyncio

async def main():
    global hub
    hub = await tensorhub.connect(ADDRESS, name='child', token='', options=PATIENT).__aenter__()
    await (await hub.register('m', memory)).publish(1)
    raise SystemExit(3)

asyncio.run(main())
""",
        3,
    ),
    "interrupted, and an engine of its fleet never answers": (
        """
import socket
from tensorhub.integrations.one_version_trainer import OneVersion

def interrupt():
    server.accept()[0].detach()  # open for as long as this process lives
    os.kill(os.getpid(), signal.SIGINT)

hub = connect()
weights = publish(hub)
with socket.create_server(('127.0.0.1', 0)) as server:
    threading.Thread(target=interrupt).start()
    fleet = OneVersion(hub, 'm', [f'http://127.0.0.1:{server.getsockname()[1]}'], timeout_s=1000)
    try:
        fleet.update(hub.wait_for('m', at_least=1))
    except KeyboardInterrupt:
        sys.exit(3)
""",
        3,
    ),
    "a child of multiprocessing": (
        """
import multiprocessing

def work():
    global hub
    hub = connect()
    publish(hub)

if __name__ == '__main__':
    process = multiprocessing.get_context('fork').Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
        0,
    ),
}


@pytest.fixture(scope="module")
def watcher() -> Iterator[tuple[str, sync.Hub]]:
    """A coordinator whose leases outlast these tests, and a hub that sees who is there."""
    with (
        sync.serve(token="", options=replace(OPTIONS, lease_s=10 * WAIT_S)) as coordinator,
        sync.connect(coordinator.address, name="watcher", token="", options=OPTIONS) as hub,
    ):
        yield coordinator.address, hub


@contextmanager
def child(address: str, program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", "-c", BEGIN + program, address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ends(process: subprocess.Popen[str], code: int) -> str:
    out, complaints = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, complaints
    assert "Exception ignored" not in complaints, complaints
    return out


def begin_anew(hub: sync.Hub) -> None:
    """Version 1 can be published again."""
    if any(each.model == "m" and each.mark for each in hub.describe()):
        hub.rollback("m", to=0)


def has_left(hub: sync.Hub, model: str = "m") -> bool:
    """Whether the child says goodbye: else it is there until its lease is over, which takes
    longer.
    """
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        known = [each for each in hub.describe() if each.model == model]
        if not [worker for each in known for worker in each.workers if worker.name == "child"]:
            return True
    return False


@pytest.mark.parametrize("way", WAYS)
def test_a_process_with_an_open_hub_ends_and_has_left(
    watcher: tuple[str, sync.Hub], way: str
) -> None:
    address, hub = watcher
    begin_anew(hub)
    program, code = WAYS[way]
    with child(address, program) as process:
        ends(process, code)
    assert [each.mark for each in hub.describe() if each.model == "m"] == [1]
    assert has_left(hub)


@pytest.mark.parametrize(
    "busy",
    [
        "thread.post(lambda: time.sleep(1000))",  # its loop does not turn
        """
import anyio, socket
looked_up = threading.Event()
socket.getaddrinfo = lambda *_: looked_up.set() or time.sleep(1000)
thread.post(lambda: thread._tasks.start_soon(anyio.connect_tcp, 'a.name', 1))
looked_up.wait()
""",
    ],
    ids=["the library is stuck", "a name is being looked up"],
)
def test_what_does_not_end_in_time_is_left(watcher: tuple[str, sync.Hub], busy: str) -> None:
    program = f"""hub = connect(tensorhub.Options(exit_timeout_s=0.5))
thread = hub._async._thread
{busy}
print('ends', flush=True)"""
    with child(watcher[0], program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ends\n"
        ends(process, 0)


def test_the_option_is_checked() -> None:
    with pytest.raises(
        tensorhub.InvalidValue,
        match=r"Options.exit_timeout_s = -1: give a number of seconds, 0 or more",
    ):
        tensorhub.Options(exit_timeout_s=-1)
    assert tensorhub.Options().exit_timeout_s == 5


# --------------------------------------------------------------------------------------------------
# SIGTERM

# Children sleep in short turns: a signal that comes just before a long wait in C would have its
# handler run after that.
WAITS = "print('ready', flush=True)\nwhile True:\n    time.sleep(0.05)"
SLEEPS = "    while True:\n        time.sleep(0.05)\n"  # in a forked child
TERMINATED = {
    "by default": (
        """
tensorhub.leave_on_sigterm(1000)
hub = connect()
publish(hub)
print('ready', flush=True)
while True:
    time.sleep(0.05)
""",
        -signal.SIGTERM,
    ),
    "spot, async": (
        """
import asyncio

async def main():
    tensorhub.leave_on_sigterm(1000)
    async with tensorhub.connect(ADDRESS, name='child', token='', options=PATIENT) as hub:
        weights = await hub.register('m', memory, spot=True)
        await weights.publish(1)
        print('ready', flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
""",
        -signal.SIGTERM,
    ),
    "a handler that was there": (
        """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
tensorhub.leave_on_sigterm(1000)
hub = connect()
publish(hub)
print('ready', flush=True)
while True:
    time.sleep(0.05)
""",
        7,
    ),
    "no hub is open": (
        """
tensorhub.leave_on_sigterm(1000)
with connect() as hub:
    publish(hub)
print('ready', flush=True)
while True:
    time.sleep(0.05)
""",
        -signal.SIGTERM,
    ),
    "called again": (
        """
tensorhub.leave_on_sigterm(0)
tensorhub.leave_on_sigterm(1000)
hub = connect()
publish(hub)
print('ready', flush=True)
while True:
    time.sleep(0.05)
""",
        -signal.SIGTERM,
    ),
    "a call runs": (
        """
tensorhub.leave_on_sigterm(1000)
hub = connect()
publish(hub)
other = hub.register('n', {'b': np.zeros(8)})
signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
print('ready', flush=True)
try:
    other.replicate(timeout=1000)
except tensorhub.StateError as error:
    assert 'the process was told to end (SIGTERM)' in str(error)
    os.write(2, b'told')
    while True:
        time.sleep(0.05)
""",
        -signal.SIGTERM,
    ),
    "the program ends meanwhile": (
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tensorhub.leave_on_sigterm(1000)
hub = connect()
publish(hub)
told, signalled = os.pipe()  # `signal.pause` would miss a signal that comes before it
os.set_blocking(signalled, False)
signal.set_wakeup_fd(signalled)
print('ready', flush=True)
os.read(told, 1)
sys.exit(3)
""",
        3,
    ),
}


@pytest.mark.parametrize("way", TERMINATED)
def test_sigterm_lets_a_process_leave_before_it_ends(
    watcher: tuple[str, sync.Hub], way: str
) -> None:
    address, hub = watcher
    begin_anew(hub)
    program, code = TERMINATED[way]
    with child(address, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        ends(process, code)
    assert [each.mark for each in hub.describe() if each.model == "m"] == [1]
    assert has_left(hub)


def test_on_sigterm_what_is_retained_is_handed_over(watcher: tuple[str, sync.Hub]) -> None:
    """By `sys.exit`, as at each end, it would be lost: that waits for nobody."""
    address, hub = watcher
    room = Options(op_timeout_s=WAIT_S, host_memory_bytes=2**20)
    program = (
        f"tensorhub.leave_on_sigterm(1000)\nhub = connect()\nhub.retain('r', "
        f"latest=1)\n{KEPT}{WAITS}"
    )
    with (
        sync.connect(address, name="keeper", token="", options=room),
        child(address, program) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        ends(process, -signal.SIGTERM)
        assert has_left(hub, "r")
        assert bytes(hub.fetch("r").values().__iter__().__next__().numpy()) == b"\x07" * 4096


def test_leaving_takes_no_longer_than_it_may(watcher: tuple[str, sync.Hub]) -> None:
    """What is retained, and nobody takes, is given up in the end."""
    address, hub = watcher
    program = (
        f"tensorhub.leave_on_sigterm(4)\nhub = connect()\nhub.retain('r', "
        f"latest=1)\n{KEPT.replace('(1)', '(2)')}{WAITS}"
    )
    with child(address, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        ends(process, -signal.SIGTERM)
    assert has_left(hub, "r")
    hub.retain("r", latest=0)


def test_a_forked_child_ends_at_once(watcher: tuple[str, sync.Hub]) -> None:
    program = (
        "tensorhub.leave_on_sigterm(1000)\nhub = connect()\nready, here = os.pipe()\nchild = "
        f"os.fork()\nif child == 0:\n    os.write(here, b'x')\n{SLEEPS}os.close(here)\n"
        "assert os.read(ready, 1), 'the child has failed'\n"
        "os.kill(child, signal.SIGTERM)\nassert os.waitpid(child, 0)[1] == "
        "signal.SIGTERM\nhub.close()"
    )
    with child(watcher[0], program) as process:
        ends(process, 0)


def test_a_forked_child_that_is_wired_itself_leaves(watcher: tuple[str, sync.Hub]) -> None:
    address, hub = watcher
    begin_anew(hub)
    program = (
        "tensorhub.leave_on_sigterm(1000)\nready, here = os.pipe()\nchild = os.fork()\n"
        "if child == 0:\n    tensorhub.leave_on_sigterm(1000)\n    hub = connect()\n    "
        f"publish(hub)\n    os.write(here, b'x')\n{SLEEPS}os.close(here)\n"
        "assert os.read(ready, 1), 'the child has failed'\n"
        "os.kill(child, signal.SIGTERM)\nassert os.waitpid(child, 0)[1] == signal.SIGTERM"
    )
    with child(address, program) as process:
        ends(process, 0)
    assert has_left(hub)


def test_what_cannot_be_wired() -> None:
    with pytest.raises(
        tensorhub.InvalidValue, match="within_s=-1: give the seconds that leaving may take"
    ):
        tensorhub.leave_on_sigterm(-1)
    caught: list[Exception] = []

    def call() -> None:
        try:
            tensorhub.leave_on_sigterm()
        except tensorhub.StateError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "in the main thread" in str(caught[0])
