"""The coordinator's shell: restarts with and without its state, a disk that fails, and peers that
do not listen.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import msgpack
import pytest

import tensorhub
from tensorhub import logs
from tensorhub.coordinator import Entry, Event
from tensorhub.coordinator.views import Answers
from tensorhub.errors import CoordinatorUnavailable, StateError
from tensorhub.messages import (
    Announce,
    Describe,
    Description,
    Join,
    ReaderCut,
    Refused,
    Register,
    Watch,
    Welcome,
)
from tensorhub.protocol import codec
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.stream import UNKNOWN_MAX, MessageStream
from tensorhub.runtime.control import hearing
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.port import bound
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.runtime.control.store import MemoryStore
from tensorhub.types import Location, Medium, Options, Purpose, parse_address
from tests.rig import OPTIONS, WAIT_S, cluster, connect, nothing_left, tensors, until


async def test_a_coordinator_that_cannot_listen_lets_go_of_its_state(tmp_path: Path) -> None:
    async with cluster() as c:
        with pytest.raises(StateError, match="is in use"):
            async with tensorhub.serve(
                port=parse_address(c.address)[1], token="", state_dir=tmp_path
            ):
                pass
        async with tensorhub.serve(token="", state_dir=tmp_path):
            pass


class FailingStore(MemoryStore):
    broken = False

    def write(self, entries: Sequence[Entry]) -> None:
        if self.broken:
            raise OSError("no space left on device")


@contextlib.asynccontextmanager
async def serving(
    options: Options,
    store: MemoryStore | None = None,
    left_s: Callable[[], float] = lambda: math.inf,
) -> AsyncIterator[CoordinatorServer]:
    """A server in this very loop."""
    server = CoordinatorServer(
        options=options, secrets_accepted=(b"",), store=store or MemoryStore(), left_s=left_s
    )
    listening = anyio.Event()
    with await bound("127.0.0.1", 0, 5.0) as holder:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run, holder, listening.set)
            await listening.wait()
            yield server
            tasks.cancel_scope.cancel()


async def test_a_publication_that_cannot_be_recorded_is_none() -> None:
    store = FailingStore()
    async with nothing_left(), serving(OPTIONS, store) as server, connect(server.address) as hub:
        source = await hub.register("m", tensors(1))
        store.broken = True
        with pytest.raises(
            CoordinatorUnavailable, match="durable: no space left on device; see its state_dir"
        ) as caught:
            await source.publish(1)
        assert (caught.value.retryable, caught.value.memory) == (True, "intact")
        assert source.state == "empty"
        assert hub.newest("m") is None
        store.broken = False
        await source.publish(1)


async def talk(
    server: CoordinatorServer, *words: Any, incarnation: str = "by-hand"
) -> MessageStream[Any]:
    """A worker by hand, that has proved itself and said `words`."""
    host, port = parse_address(server.address)
    messages = MessageStream(await anyio.connect_tcp(host, port), FROM_COORDINATOR, 2**20)
    await messages.handshake(
        ClientHandshake("worker", incarnation, b"", bytes(NONCE_BYTES)), WAIT_S
    )
    for word in words:
        await messages.send(word)
    return messages


JOIN = Join("by hand", Location(), (), 1, 0)


async def test_a_leader_whose_term_is_over_answers_nothing_that_it_finds_unread() -> None:
    left_s = [1.0]
    with pytest.RaisesGroup(Deposed, flatten_subgroups=True):
        async with (
            serving(OPTIONS, left_s=lambda: left_s[0]) as server,
            await talk(server, JOIN, Describe(7, None)) as messages,
        ):
            heard = [type(await messages.receive()) for _ in range(2)]
            assert heard == [Welcome, Description]
            left_s[0] = 0.0
            await messages.send(Describe(8, None))
            with contextlib.suppress(ConnectionLost):
                pytest.fail(f"it answers {await messages.receive()}")


async def test_messages_of_a_younger_release_are_refused_by_number_or_passed_over_and_bounded() -> (
    None
):
    async with serving(OPTIONS) as server, await talk(server, JOIN) as messages:
        welcome: Any = await messages.receive()
        assert welcome.release == tensorhub.__version__
        question, other = msgpack.packb([150, 7, "x"]), msgpack.packb([63, "y"])
        await messages.send_encoded(question, other)
        await messages.send(Watch("m"), Describe(8, None))
        told: list[Any] = [await messages.receive() for _ in range(3)]
        assert [type(each) for each in told] == [Refused, Announce, Description]
        assert told[0].request == 7
        assert "upgrade this side" in str(told[0].error.error())
        await messages.send_encoded(*[other] * UNKNOWN_MAX)
        with contextlib.suppress(ConnectionLost):
            assert await messages.receive() is None


async def test_a_flood_of_messages_leaves_others_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one read brings are thousands of them; each is a step, and nothing in between waits by
    itself.
    """
    monkeypatch.setattr(hearing, "TURNS_S", -1.0)
    steps, runs = 0, [0]
    step = CoordinatorServer._step

    def counting(self: CoordinatorServer, event: Event) -> None:
        nonlocal steps
        steps += 1
        step(self, event)

    async def others_turn() -> None:
        while True:
            before = steps
            await anyio.lowlevel.checkpoint()
            runs.append(steps - before)

    monkeypatch.setattr(CoordinatorServer, "_step", counting)
    async with (
        nothing_left(),
        serving(OPTIONS) as server,
        await talk(server, JOIN) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(others_turn)
        body = codec.encode(ReaderCut("unknown"))
        await messages._stream.send(b"".join([messages._encoder.frames(body) for _ in range(5000)]))
        await until(lambda: steps > 5000)
        tasks.cancel_scope.cancel()
    assert max(runs) < 10  # a message each, and what timers have due


async def test_who_asks_and_does_not_read_is_not_heard_on_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has hundreds of large answers made, and leaves them in the coordinator's memory."""
    asked: list[int] = []
    describe = Answers.describe

    def counting(self: Answers, session: int, message: Describe) -> None:
        asked.append(message.request)
        describe(self, session, message)

    monkeypatch.setattr(Answers, "describe", counting)
    # a description of them is a megabyte
    names = ["\U0001f40c" * 500 + str(number) for number in range(500)]
    use = ("g", 0, 0, 1, True, False, Medium.DEVICE, Purpose.USE, "", 1, 1, b"manifest", None)
    async with (
        nothing_left(),
        serving(OPTIONS) as server,
        connect(server.address) as hub,
        await talk(server, JOIN) as messages,
    ):
        for number, name in enumerate(names):
            await messages.send(Register(number, f"r{number}", name, *use))
            await messages.receive()
        for request in range(1000, 1030):
            await messages.send(Describe(request, None))
        for _ in range(5):
            await hub.describe(names[0])  # the others are heard
        assert len([request for request in asked if request >= 1000]) < 20
        messages.limit_received(2**26)
        answers = 0
        while answers < 30:
            answers += isinstance(await messages.receive(), Description)


async def test_if_descriptors_are_short_whoever_fits_is_served_and_the_log_says_how_to_help(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tensorhub.coordinator")
    monkeypatch.setattr(logs, "TALLY_S", 60.0)
    monkeypatch.setattr(
        resource, "getrlimit", lambda _: (32, 32)
    )  # of which 8 are for pending connections, and 8 for everything else
    async with nothing_left(), serving(OPTIONS) as server, contextlib.AsyncExitStack() as stack:
        served = [
            await stack.enter_async_context(await talk(server, JOIN, incarnation=f"w{n}"))
            for n in range(16)
        ]
        assert {type(await each.receive()) for each in served} == {Welcome}
        assert "no_descriptors" not in caplog.text
        for _ in range(3):
            async with await talk(server, JOIN, incarnation="late") as late:
                refused = await late.receive()
                assert isinstance(refused, Refused)
                assert (
                    "has 16 connections already (Options.sessions_max, or its `ulimit -n`)"
                    in refused.error.message
                )
                assert refused.error.retryable
        # of several in a second; they come again and again
        assert caplog.text.count("event='session_refused'") == 1
        assert "session_closed" not in caplog.text
        assert "no_descriptors_for_more_sessions" in caplog.text
        assert f"raise `ulimit -n` to {OPTIONS.sessions_max + 4096 + 128}" in caplog.text
        await served[0].aclose()
        await until(lambda: "sessions=15" in repr(server))
        async with await talk(server, JOIN, incarnation="next") as next_one:
            assert isinstance(await next_one.receive(), Welcome)
