"""What is said over one session: at once as far as the peer takes it, together as far as it has gathered, in order always.

What a session may be behind with, and long answers: `test_greedy.py` and `test_server.py`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from tensorhub.messages import Announce, Done, FromCoordinator, FromWorker, HeartbeatAck, ManifestReply
from tensorhub.protocol import codec
from tensorhub.protocol.codec import FROM_COORDINATOR, FROM_WORKER
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.polled_stream import PolledStream, Poller
from tensorhub.protocol.pot import Pot
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import session as session_module
from tensorhub.runtime.control.session import Kind, Session, Turn
from tensorhub.types import Options, VersionInfo
from tests.rig import WAIT_S, nothing_left, until

MOST = 2**26
NEWEST = Announce("m", VersionInfo("m", 1, "content", 1, 1))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
async def sessions(count: int) -> AsyncIterator[list[tuple[Session, MessageStream[FromCoordinator]]]]:
    """Sessions of one loop, each with what its peer hears."""
    kind = Kind(MOST, Pot(MOST), Pot(MOST))
    async with nothing_left(), contextlib.AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        poller, turn = Poller(), Turn()
        tasks.start_soon(poller.keep)
        found = []
        for number in range(count):
            mine, theirs = socket.socketpair()
            mine.setblocking(False)
            theirs.setblocking(False)
            messages: MessageStream[FromWorker] = MessageStream(poller.stream(mine), FROM_WORKER, MOST)
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


async def test_what_has_gathered_goes_in_one_send(sends: list[int]) -> None:
    async with sessions(1) as [(session, hears)]:
        for request in range(5):
            session.say(Done(request))
        assert session.unread == 5
        assert [await hears.receive() for _ in range(5)] == [Done(request) for request in range(5)]
        assert len(sends) == 1
        assert session.unread == 0


async def test_others_have_a_turn_between_the_sends_of_who_is_told_much(
    sends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "SAID_AT_ONCE_MAX", 3)
    async with sessions(1) as [(session, hears)]:
        for request in range(100):
            session.say(Done(request))
        seen = set[int]()
        while session.unread:
            await anyio.lowlevel.checkpoint()
            seen.add(len(sends))
        assert len(sends) == 34
        assert len(seen) > 10  # trio shuffles who is next
        assert [await hears.receive() for _ in range(100)] == [Done(request) for request in range(100)]


async def test_what_is_said_to_many_is_encoded_once(sends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = codec.encode

    def counting(message: Any) -> bytes:
        encoded.append(type(message).__name__)
        return encode(message)

    async with sessions(5) as found:
        monkeypatch.setattr(codec, "encode", counting)
        for session, _ in found:
            session.say(HeartbeatAck(session.number))
            session.say(NEWEST)
        for session, hears in found:
            assert [await hears.receive(), await hears.receive()] == [HeartbeatAck(session.number), NEWEST]
        assert (encoded.count("HeartbeatAck"), encoded.count("Announce")) == (5, 1)
        other = Announce("other", None)
        found[0][0].say(other)
        assert await found[0][1].receive() == other
        assert len(sends) == 5 + 1


async def test_all_sessions_that_are_told_something_in_a_turn_are_spoken_to_in_the_next(sends: list[int]) -> None:
    """A few at a time would leave the others without an answer for long: a turn in which a thousand are heard is long."""
    async with sessions(200) as found:
        for session, _ in found:
            session.say(NEWEST)
        assert sends == []
        while not sends:
            await anyio.lowlevel.checkpoint()
        assert len(sends) == 200


@pytest.mark.parametrize("said_per_turn", [1, 100])  # the kernel is full as it is spoken to at once, or at length
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


async def test_a_connection_that_is_gone_ends_the_talk() -> None:
    async with sessions(1) as [(first, hears)], anyio.create_task_group() as tasks:
        session = Session(1, first.messages, b"", first.kind, Options(), first._turn)
        ended = anyio.Event()

        async def talk() -> None:
            with pytest.raises(ConnectionLost):
                await session.talk()
            ended.set()

        await hears.aclose()
        tasks.start_soon(talk)
        await anyio.lowlevel.checkpoint()
        session.say(Done(1))
        await ended.wait()


async def test_the_end_comes_after_all_that_was_said() -> None:
    async with sessions(1) as [(first, hears)]:
        session = Session(1, first.messages, b"", first.kind, Options(), first._turn)
        session.say(Done(1))
        session.say(None)
        await session.talk()
        assert await hears.receive() == Done(1)


async def test_a_defect_is_raised_by_the_sessions_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback of the loop raises would only be logged, and the peer would wait for ever."""

    def defect(message: Any) -> bytes:
        raise ZeroDivisionError

    async with sessions(1) as [(first, _)]:
        session = Session(1, first.messages, b"", first.kind, Options(), first._turn)
        monkeypatch.setattr(codec, "encode", defect)
        session.say(Done(1))
        with pytest.raises(ZeroDivisionError):
            await session.talk()
