"""The demo's processes: started, heard and ended together.

Each child has a session of its own, so that Ctrl-C reaches the demo alone; each ends when its stdin does, so that none
outlives the demo, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from tensorhub.cli.common import CommandError

EVENT_BYTES_MAX = 16 * 2**20
STDERR_BYTES_KEPT = 4096
LEAVE_S = 20.0  # for a child that was told to stop
KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Event:
    """One line of one child, or its end: kind "ended", with `code` and the last of its `stderr`."""

    name: str
    kind: str
    fields: dict[str, Any]


class Crew:
    """The running children by name."""

    def __init__(self, events: MemoryObjectReceiveStream[Event]) -> None:
        self.processes: dict[str, Process] = {}
        self._events = events

    def __repr__(self) -> str:
        alive = sum(process.returncode is None for process in self.processes.values())
        return f"<Crew: {alive} of {len(self.processes)} alive>"

    async def event(self, timeout_s: float) -> Event:
        """The next event of anybody; CommandError if a child fails, ends unasked, or all are silent too long."""
        try:
            with anyio.fail_after(timeout_s):
                event = await self._events.receive()
        except TimeoutError:
            raise CommandError(
                "DemoFailed", f"no process of the demo had news for {timeout_s:g} s; see --timeout-s"
            ) from None
        if event.kind == "failed":
            kind, text = event.fields["kind"], event.fields["text"]
            if kind == "usage":
                raise CommandError(kind, text, 2)
            raise CommandError(kind, f"in {event.name}: {text}")
        if event.kind == "ended":
            raise CommandError("DemoFailed", _obituary(event))
        return event

    async def order(self, name: str, **fields: object) -> None:
        """Tell one child what to do. (One that is gone is told nothing: its end is an event.)"""
        stdin = self.processes[name].stdin
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            if stdin is not None:
                await stdin.send(json.dumps(fields).encode() + b"\n")

    async def dismiss(self) -> None:
        """Let every child leave in order; CommandError if one fails at that or takes too long."""
        for name in self.processes:
            await self.order(name, do="stop")
        codes: dict[str, int] = {}
        with anyio.move_on_after(LEAVE_S):
            while len(codes) < len(self.processes):
                event = await self._events.receive()
                if event.kind == "failed":
                    raise CommandError(event.fields["kind"], f"in {event.name}: {event.fields['text']}")
                if event.kind == "ended":
                    codes[event.name] = event.fields["code"]
                    if event.fields["code"] != 0:
                        raise CommandError("DemoFailed", _obituary(event))
        late = self.processes.keys() - codes.keys()
        if late:
            raise CommandError("DemoFailed", f"{', '.join(sorted(late))} did not leave within {LEAVE_S:g} s")


def _obituary(event: Event) -> str:
    lines = event.fields["stderr"].strip().splitlines()
    last = lines[-1] if lines else "it left no message"
    return f"{event.name} ended with exit code {event.fields['code']}: {last}"


@contextlib.asynccontextmanager
async def hire(children: Mapping[str, Sequence[str]], token: str) -> AsyncIterator[Crew]:
    """Start `python -m tensorhub.cli.demo_worker` once for each name, with these arguments; end all of them after."""
    environment = os.environ | {"TENSORHUB_TOKEN": token, "OMP_NUM_THREADS": "1"}
    send, receive = anyio.create_memory_object_stream[Event](256)
    crew = Crew(receive)
    try:
        async with anyio.create_task_group() as tasks:
            for name, arguments in children.items():
                command = [sys.executable, "-m", "tensorhub.cli.demo_worker", *arguments]
                process = await anyio.open_process(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
                crew.processes[name] = process
                tasks.start_soon(_listen, name, process, send)
            yield crew
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_S):
            await _end(crew.processes)
        send.close()
        receive.close()


async def _listen(name: str, process: Process, send: MemoryObjectSendStream[Event]) -> None:
    """Pass on what a child says, and at last its end."""
    tail: deque[int] = deque(maxlen=STDERR_BYTES_KEPT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_keep_tail, process, tail)
        await _pass_on(name, process, send)
        code = await process.wait()
    await send.send(Event(name, "ended", {"code": code, "stderr": bytes(tail).decode(errors="replace")}))


async def _pass_on(name: str, process: Process, send: MemoryObjectSendStream[Event]) -> None:
    if process.stdout is None:
        return
    lines = BufferedByteReceiveStream(process.stdout)
    while True:
        try:
            fields = json.loads(await lines.receive_until(b"\n", EVENT_BYTES_MAX))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            return
        await send.send(Event(name, fields.pop("event"), fields))


async def _keep_tail(process: Process, tail: deque[int]) -> None:
    if process.stderr is not None:
        with contextlib.suppress(anyio.BrokenResourceError):
            async for part in process.stderr:
                tail.extend(part)


async def _end(processes: Mapping[str, Process]) -> None:
    """Kill what still runs, and collect it: a demo's child has nothing to lose."""
    for process in processes.values():
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    for process in processes.values():
        await process.aclose()
