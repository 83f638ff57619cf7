"""A process of the testbed: one side of a system, and the loop of a trainer or a rollout around it
(`benches.commands`).

`python -m benches.testbed.process NAMESPACE [DIRECTORY OF PACKAGES]`: it runs in that host.

What it does is written to a file, a line for each event, so that it is known also after a kill.
Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from benches.commands import obey
from benches.testbed.shares import Real, Share
from benches.testbed.systems.base import Got, Setting, System, connect, receive_into

AGAIN_S = 0.05  # before a call that failed is made again
LEAVE_S = 20.0  # a process whose parent has ended leaves within this
PROBE_PORT = 7090
_CLONE_NEWNET: Final = 0x40000000


class BenchProcess:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._system: System
        self._share: Share
        self._log: int
        self._who = ""
        self._is_open = False
        self._has_joined = anyio.Event()
        self._rolling = anyio.CancelScope()

    async def join(self, system: str, setting: dict[str, Any], log: str, opens: bool) -> None:
        """Become a side of this system, and connect if it `opens`; a rollout asks for nothing
        yet.
        """
        its = Setting(**setting)
        self._who = its.host
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        nbytes, file = (
            its.nbytes if its.role in ("trainer", "rollout") else 0,
            its.options.get("file"),
        )
        self._share = (
            Real(nbytes, Path(file))
            if nbytes and file
            else Share(
                nbytes, its.group_rank, its.group_size, its.options.get(f"{its.role} cut", "rows")
            )
        )
        module = importlib.import_module(f"benches.testbed.systems.{system}")
        self._system = module.System(its, self._share, self._stack)
        self._is_open = opens
        if opens:
            await self._system.open()
        self._has_joined.set()

    async def train(self, versions: int, at_s: float, every_s: float) -> None:
        """Publish so many versions, the first at `at_s`, each other one after so many seconds of
        training.
        """
        for version in range(1, versions + 1):
            await _until(at_s)
            phases = await self._system.publish(version, partial(self._share.write, version))
            ended_s = time.monotonic()
            stalled_s = sum(phases.values())
            self._note(
                "publish",
                began_s=ended_s - stalled_s,
                ended_s=ended_s,
                version=version,
                phases=phases,
            )
            at_s += stalled_s + every_s  # writing is training

    async def roll(self, generations_s: list[float], until: int, pauses: bool, at_s: float) -> None:
        """Fetch the newest version; then generate for so long each time, and update in between,
        until that version is there.

        `pauses`: a new version stops the generation, which goes on after the update.
        """
        with self._rolling:
            await self._has_joined.wait()
            try:
                await self._roll(generations_s, until, pauses, at_s)
            except Exception:
                # who leaves closes what a thread may still read from
                if not self._rolling.cancel_called:
                    raise

    async def _roll(
        self, generations_s: list[float], until: int, pauses: bool, at_s: float
    ) -> None:
        await _until(at_s)
        have = await self._attempt("join", at_s)
        for seconds in generations_s:
            left_s = seconds
            while left_s > 0:
                if have >= until:
                    return
                left_s -= await self._generate(left_s, have, pauses)
                if self._system.newest() > have or self._system.decides_together:
                    have = await self._attempt("update", time.monotonic())
        raise RuntimeError(f"it has nothing more to generate, and version {have} of {until}")

    async def _generate(self, seconds: float, have: int, pauses: bool) -> float:
        """How long it did."""
        began_s = time.monotonic()
        if not pauses:
            await anyio.sleep(seconds)
            return seconds
        with anyio.move_on_after(seconds):
            await self._system.newer(have)
        return time.monotonic() - began_s

    async def _attempt(self, what: str, began_s: float) -> int:
        """Have the newest version, also if it takes several calls; which it is."""
        self._note("begin", what=what, began_s=began_s)
        while True:
            try:
                got = await self._call(what)
            except Exception as error:
                self._note("failed", what=what, began_s=time.monotonic(), error=repr(error)[:500])
                if not getattr(error, "retryable", isinstance(error, ConnectionError)):
                    raise
                await anyio.sleep(AGAIN_S)
            else:
                break
        ended_s = time.monotonic()
        if not got.changed:
            self._note("nothing", began_s=ended_s)
            return got.version
        told = {"version": got.version, "phases": got.phases, "sources": dict(got.sources)}
        self._note(what, began_s=began_s, ended_s=ended_s, **told)
        found = await anyio.to_thread.run_sync(self._share.versions)
        if found != [got.version]:
            raise RuntimeError(f"it was given version {got.version}, and has {found}")
        return got.version

    async def _call(self, what: str) -> Got:
        if not self._is_open:
            await self._system.open()
            self._is_open = True
        return await (self._system.first() if what == "join" else self._system.update())

    def _note(self, kind: str, **fields: Any) -> None:
        os.write(self._log, json.dumps({"who": self._who, "kind": kind, **fields}).encode() + b"\n")

    async def leave(self) -> None:
        """Leave as a machine that has been told in time: the system's own way."""
        self._note("leave", began_s=time.monotonic())
        self._rolling.cancel()
        await self._stack.aclose()

    async def probe_send(self, host: str, nbytes: int, count: int) -> None:
        """Send so many bytes, so many times, to who connects: what a link carries."""
        await anyio.to_thread.run_sync(_send, host, nbytes, count)

    async def probe_receive(self, host: str, nbytes: int, count: int) -> list[float]:
        """Seconds for each of them."""
        return await anyio.to_thread.run_sync(_receive, host, nbytes, count)


async def _until(at_s: float) -> None:
    await anyio.sleep(max(0.0, at_s - time.monotonic()))


def _send(host: str, nbytes: int, count: int) -> None:
    with socket.create_server((host, PROBE_PORT)) as listener:
        connection, _ = listener.accept()
    with connection:
        for _ in range(count):
            connection.recv(1)
            connection.sendall(bytes(nbytes))


def _receive(host: str, nbytes: int, count: int) -> list[float]:
    seconds = []
    with connect(host, PROBE_PORT) as connection:
        view = memoryview(bytearray(nbytes))
        for _ in range(count):
            began_s = time.monotonic()
            connection.sendall(b"?")
            receive_into(connection, view)
            seconds.append(time.monotonic() - began_s)
    return seconds


def _end_with_parent() -> None:
    """Whatever this process waits for: it ends a while after its parent."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(LEAVE_S)
    os._exit(1)


def _enter(namespace: str) -> None:
    """Go to that host. Threads that begin later are there, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    _enter(sys.argv[1])
    sys.path[:0] = sys.argv[2:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(obey, BenchProcess)
