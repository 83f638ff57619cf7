"""Sessions that send large frames, and do not finish them: what the coordinator holds of those is
bounded, and nobody whose token is another one waits for that.

Covers `runtime.control.server` and `protocol.pot`.
"""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.coordinator.entities import Version
from tensorhub.errors import StateError
from tensorhub.messages import (
    GetManifest,
    GetPart,
    Heartbeat,
    Join,
    ManifestReply,
    Register,
    Registered,
)
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.frames import HEADER_BYTES, READ_BYTES_MAX
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.secret import read_only_secret
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import server as server_module
from tensorhub.runtime.control.port import bound
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.runtime.control.session import ReadOnlyAnswers
from tensorhub.runtime.control.store import MemoryStore
from tensorhub.types import Location, Medium, OpKey, Options, Purpose, VersionInfo, parse_address
from tests.rig import CHUNK_BYTES, WAIT_S, nothing_left, tensors, until

SECRET = "the cluster's own"
READ_ONLY = tensorhub.read_only_token(SECRET)
# nothing but the bounds helps
PATIENT = Options(op_timeout_s=WAIT_S, lease_s=4 * WAIT_S, chunk_bytes=CHUNK_BYTES)
FRAME_BYTES = 2**18
SESSIONS = 12


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Watched(MessageStream[Any]):
    """What a server receives by."""

    all: list[Watched] = []  # noqa: RUF012 - of one test

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.all.append(self)


def undecoded() -> int:
    """The bytes of frames that the server holds, and that are not whole."""
    return sum(len(stream._decoder._buffer) for stream in Watched.all)


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    Watched.all.clear()
    monkeypatch.setattr(server_module, "MessageStream", Watched)


@contextlib.asynccontextmanager
async def serving(options: Options = PATIENT) -> AsyncIterator[CoordinatorServer]:
    server = CoordinatorServer(
        options=options, secrets_accepted=(SECRET.encode(),), store=MemoryStore()
    )
    listening = anyio.Event()
    with await bound("127.0.0.1", 0, 5.0) as holder:
        async with nothing_left(), anyio.create_task_group() as tasks:
            tasks.start_soon(server.run, holder, listening.set)
            await listening.wait()
            yield server
            tasks.cancel_scope.cancel()


async def joined(server: CoordinatorServer, number: int, *, read_only: bool) -> MessageStream[Any]:
    """A worker by hand, that has joined."""
    messages = MessageStream(
        await anyio.connect_tcp(*parse_address(server.address)), FROM_COORDINATOR, 2**26
    )
    secret = read_only_secret(SECRET.encode()) if read_only else SECRET.encode()
    await messages.handshake(
        ClientHandshake("worker", f"by-hand-{number}", secret, bytes(NONCE_BYTES)), WAIT_S
    )
    await messages.send(Join(f"w{number}", Location(), (), 1, 0))
    await messages.receive()
    return messages


def unfinished(nbytes: int, sent: int) -> bytes:
    """The header of a frame with so many bytes, and some of these."""
    return nbytes.to_bytes(HEADER_BYTES, "big") + bytes(sent)


def connect(server: CoordinatorServer, token: str) -> contextlib.AbstractAsyncContextManager[Hub]:
    return tensorhub.connect(server.address, token=token, options=PATIENT)


def registers(name: str, nbytes: int) -> Register:
    """With a manifest of so many bytes."""
    use = (True, False, Medium.DEVICE, Purpose.USE, "", 1, 1, bytes(nbytes), None)
    return Register(1, name, "m", name, 0, 0, 1, *use)


async def test_what_read_only_sessions_have_begun_to_send_is_bounded_and_keeps_no_full_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "READ_ONLY_FRAME_BYTES_MAX", FRAME_BYTES, raising=False)
    monkeypatch.setattr(
        server_module, "READ_ONLY_UNDECODED_BYTES_MAX", 4 * FRAME_BYTES, raising=False
    )
    async with serving() as server, contextlib.AsyncExitStack() as stack:
        greedy = [
            await stack.enter_async_context(await joined(server, number, read_only=True))
            for number in range(SESSIONS)
        ]
        for messages in greedy:
            await messages._stream.send(unfinished(FRAME_BYTES, FRAME_BYTES - 1))
        await until(lambda: undecoded() > 4 * (FRAME_BYTES - 1))
        async with connect(server, SECRET) as trainer, connect(server, READ_ONLY) as reader:
            source = await trainer.register("m", tensors(1))
            await source.publish(1)
            mine = await joined(server, 1000, read_only=False)
            async with mine:  # also what is large
                await mine.send(registers("large", 8 * FRAME_BYTES))
                assert isinstance(await mine.receive(), Registered)
            for _ in range(20):  # and what is small, of other read-only ones
                assert (await reader.describe("m")).mark == 1
        assert undecoded() <= 4 * FRAME_BYTES + SESSIONS * (READ_BYTES_MAX + 4)
        first = [stream for stream in Watched.all if len(stream._decoder._buffer) >= FRAME_BYTES]
        assert len(first) == 4
        for stream in first:
            await stream.aclose()  # now it is the turn of four others
        await until(
            lambda: (
                sum(len(stream._decoder._buffer) >= FRAME_BYTES for stream in Watched.all)
                == 4 + len(first)
            )
        )


async def test_a_read_only_session_that_begins_a_large_frame_is_closed_at_once() -> None:
    """Nothing that it may say is so long."""
    async with serving() as server, await joined(server, 1, read_only=True) as greedy:
        await greedy._stream.send(unfinished(48 * 2**20, 1000))
        with (
            anyio.fail_after(WAIT_S),
            contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError),
        ):
            while await greedy._stream.receive():
                pass


@pytest.mark.heavy
async def test_answers_that_read_only_sessions_do_not_take_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred sessions ask for a part of a manifest and read nothing: each answer is more than
    the kernel holds.
    """
    part, answers_max = bytes(6 * 2**20), 20 * 2**20
    monkeypatch.setattr(server_module, "READ_ONLY_ANSWERS_BYTES_MAX", answers_max)
    async with (
        serving(replace(PATIENT, frame_bytes_max=2**23)) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        core = server._core.cluster
        version = Version(VersionInfo("m", 1, "content", 1, 1), "", OpKey("m", "trainer", 1, 1))
        core.model("m").versions[1] = version
        core.learn(version, version.holdings, 0, part)
        question = GetPart(1, core.manifests.id_of(part))
        reader = await stack.enter_async_context(await joined(server, 1000, read_only=True))
        trainer = await stack.enter_async_context(await joined(server, 1001, read_only=False))
        greedy = [
            await stack.enter_async_context(await joined(server, number, read_only=True))
            for number in range(100)
        ]
        tracemalloc.start()
        try:
            for messages in greedy:
                await messages.send(question)
            await until(lambda: len(server._sessions) <= 5)  # three are left to take their answers
            for messages in (reader, trainer):  # and others are answered
                await messages.send(question)
                assert await messages.receive() == ManifestReply(1, part)
            assert tracemalloc.get_traced_memory()[1] < 4 * answers_max
        finally:
            tracemalloc.stop()
        answers = server._read_only.answers
        assert isinstance(answers, ReadOnlyAnswers)
        assert answers.nbytes <= answers_max
        for messages in greedy:
            await messages.aclose()
        await until(lambda: answers.nbytes == 0)


async def test_a_read_only_session_asks_one_question_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = bytes(15 * 2**20)
    async with (
        serving(replace(PATIENT, frame_bytes_max=2**24)) as server,
        await joined(server, 1, read_only=True) as reader,
    ):
        core = server._core.cluster
        version = Version(VersionInfo("m", 1, "content", 1, 1), "", OpKey("m", "trainer", 1, 1))
        core.model("m").versions[1] = version
        core.learn(version, version.holdings, 0, part)
        for number in range(5):
            await reader.send(GetPart(number, core.manifests.id_of(part)))
        (session,) = server._sessions.values()
        most = 0
        for number in range(5):
            await until(lambda: session.unread > 0)
            most = max(most, session.unread)
            assert await reader.receive() == ManifestReply(number, part)
        assert most == 1


async def test_who_does_not_take_a_long_answer_within_a_lease_is_cut_off() -> None:
    async with (
        serving(Options(lease_s=0.5)) as server,
        await joined(server, 1, read_only=True) as deaf,
    ):
        version = Version(VersionInfo("m", 1, "content", 1, 1), "", OpKey("m", "trainer", 1, 1))
        core = server._core.cluster
        core.model("m").versions[1] = version
        core.learn(version, version.holdings, 0, bytes(15 * 2**20))
        await deaf.send(GetManifest(1, "m", "content", 0))
        number = 0
        while server._sessions:
            number += 1
            with contextlib.suppress(ConnectionLost):
                await deaf.send(Heartbeat(number))
            await anyio.sleep(0.01)
        assert isinstance(server._read_only.answers, ReadOnlyAnswers)
        assert server._read_only.answers.nbytes == 0


async def test_an_answer_that_no_frame_can_carry_is_refused_and_the_session_goes_on() -> None:
    async with (
        serving(replace(PATIENT, frame_bytes_max=65_536)) as server,
        connect(server, SECRET) as hub,
    ):
        await hub.register("m", tensors(1))
        core = server._core
        model = core.cluster.models["m"]
        for number in range(3000):
            info = VersionInfo("m", number, f"content-{number}", 1, 1)
            core._versions.recover(Version(info, "", OpKey("m", "trainer", 1, number)), model)
        with pytest.raises(
            StateError,
            match=r"the answer cannot be sent: it has \d+ bytes, frames have 65536 at most",
        ):
            await hub.describe("m")
        assert server._sessions_minted == 1
        model.versions.clear()
        assert (await hub.describe("m")).model == "m"


class Cut:
    """A read-only session that takes nothing, as far as its answers are counted."""

    def __init__(self) -> None:
        self.is_cut = False

    def cut_off(self, reason: str) -> None:
        self.is_cut = True


async def test_no_more_read_only_sessions_are_cut_off_than_have_to_be_and_room_is_there_once_they_end() -> (
    None
):
    answers, sessions = ReadOnlyAnswers(10), [Cut() for _ in range(3)]
    for session in sessions:
        answers.add(cast(Any, session), 4)
    answers.add(cast(Any, sessions[2]), 2)
    assert [session.is_cut for session in sessions] == [True, False, False]
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answers.wait_room)
            await anyio.wait_all_tasks_blocked()
            answers.ended(cast(Any, sessions[0]))
    assert answers.nbytes == 10
