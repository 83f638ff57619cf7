"""What is said over one session: at once as far as the peer takes it, together as far as it has
gathered, in order always.

What a session may be behind with, and long answers: `test_greedy.py` and `test_server.py`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from tensorhub.messages import (
    VERSIONS,
    Advice,
    Announce,
    Description,
    Done,
    FromCoordinator,
    FromWorker,
    ManifestReply,
    Registered,
)
from tensorhub.protocol.codec import FROM_COORDINATOR, FROM_WORKER
from tensorhub.protocol.polled_stream import PolledStream, Poller
from tensorhub.protocol.pot import Pot
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import session as session_module
from tensorhub.runtime.control.session import Kind, Session, Turn
from tensorhub.types import Location, ModelInfo, Options, VersionInfo, WorkerView
from tests.rig import WAIT_S, nothing_left, until

MOST = 2**26
NEWEST = Announce("m", VersionInfo("m", 1, "content", 1, 1))


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes the kernel has taken, each time it was given some."""
    sends: list[int] = []
    send = PolledStream.send_nowait

    def counting(self: PolledStream, item: bytes) -> int:
        sends.append(send(self, item))
        return sends[-1]

    monkeypatch.setattr(PolledStream, "send_nowait", counting)
    return sends


@contextlib.asynccontextmanager
async def sessions(
    count: int,
) -> AsyncIterator[list[tuple[Session, MessageStream[FromCoordinator]]]]:
    """Sessions of one loop, each with what its peer hears."""
    kind = Kind(MOST, Pot(MOST), Pot(MOST))
    async with (
        nothing_left(),
        contextlib.AsyncExitStack() as stack,
        anyio.create_task_group() as tasks,
    ):
        poller, turn = Poller(), Turn()
        tasks.start_soon(poller.keep)
        found = []
        for number in range(count):
            mine, theirs = socket.socketpair()
            mine.setblocking(False)
            theirs.setblocking(False)
            messages: MessageStream[FromWorker] = MessageStream(
                poller.stream(mine), FROM_WORKER, MOST
            )
            hears = MessageStream(poller.stream(theirs), FROM_COORDINATOR, MOST)
            await stack.enter_async_context(messages)
            await stack.enter_async_context(hears)
            session = Session(number, messages, b"", kind, Options(), turn)
            tasks.start_soon(session.talk)
            found.append((session, hears))
        for _ in range(3):  # until all of them wait
            await anyio.lowlevel.checkpoint()
        with anyio.fail_after(WAIT_S):
            yield found
        tasks.cancel_scope.cancel()


# the kernel is full as it is spoken to at once, or at length
@pytest.mark.parametrize("said_per_turn", [1, 100])
async def test_what_the_peer_has_not_taken_is_said_later_and_in_order(said_per_turn: int) -> None:
    async with sessions(1) as [(session, hears)]:
        count = 0
        while session.unread < 500 or not session.is_deaf():
            for _ in range(said_per_turn):
                session.say(Done(count))
                count += 1
            await anyio.lowlevel.checkpoint()
        session.say(Done(count))
        for request in range(count + 1):
            assert await hears.receive() == Done(request)
        await until(lambda: session.unread == 0)
        session.say(NEWEST)
        assert await hears.receive() == NEWEST


async def test_a_peer_of_the_release_before_is_told_what_it_knows_and_no_more() -> None:
    worker = WorkerView("w", "i", "live", Location("s", "r", "h"), (), "9.9")
    told = Description(2, (ModelInfo("m", 0, None, 0, (), (), (), (worker,)),))
    registered = Registered(1, "w", 1, 1, True, in_lineage=5)
    older = replace(told.models[0], workers=(replace(worker, release=""),))
    async with sessions(1) as [(session, hears)]:
        session.messages.version = VERSIONS[0]
        for message in (registered, Advice("which it does not know", "none"), told, NEWEST):
            session.say(message)
        assert await hears.receive() == replace(registered, in_lineage=None)
        assert await hears.receive() == replace(told, models=(older,))
        assert await hears.receive() == NEWEST


async def test_long_answers_keep_their_place(sends: list[int]) -> None:
    said: list[FromCoordinator] = [Done(1), ManifestReply(2, bytes(100)), Done(3), Done(4)]
    async with sessions(1) as [(session, hears)]:
        for message in said:
            session.say(message)
        assert [await hears.receive() for _ in said] == said
        assert len(sends) == 3


async def test_who_is_too_far_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "OUTBOX_MESSAGES_MAX", 3)
    async with sessions(1) as [(session, _)]:
        for request in range(3):
            session.say(Done(request))
        assert [session.scope.cancel_called] == [False]
        session.say(Done(3))
        assert session.scope.cancel_called
        assert session.unread == 3
