"""A burst that takes the server longer than a lease, over real sockets: nobody is lost.

Covers `runtime.control.server` (what lies unread), with `coordinator.membership`.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack

import anyio
import anyio.abc
import pytest

from tensorhub.coordinator import DOOR, Action, Coordinator, Event, Received, Silent, Tick
from tensorhub.messages import Dismissed, FromCoordinator, FromWorker, Heartbeat, HeartbeatAck, Join, Welcome
from tensorhub.protocol import codec
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.polled_stream import PolledStream
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.types import Location, Options, parse_address
from tests.rig import WAIT_S, nothing_left, until
from tests.runtime.control.test_server import serving

LEASE_S = 0.4
WORKERS = 40
BEATS = 6  # more than one turn of the session
STEP_S = 0.01  # so all workers' turns take some leases


async def thin_worker(server: CoordinatorServer, number: int) -> MessageStream[FromCoordinator]:
    host, port = parse_address(server.address)
    messages = MessageStream(await anyio.connect_tcp(host, port), FROM_COORDINATOR, 2**20)
    await messages.handshake(ClientHandshake("worker", f"life{number}", b"", bytes(NONCE_BYTES)), WAIT_S)
    return messages


def say_at_once(messages: MessageStream[FromCoordinator], *words: FromWorker) -> None:
    """So that the server has no turn meanwhile."""
    data = b"".join(messages._encoder.frames(codec.encode(word)) for word in words)
    assert os.write(messages._stream.extra(anyio.abc.SocketAttribute.raw_socket).fileno(), data) == len(data)


async def test_in_a_burst_that_lasts_longer_than_the_lease_nobody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each heartbeat takes the coordinator so long that others' lie unread for two leases. Then all fall silent."""
    step = Coordinator.step

    def slow(self: Coordinator, event: Event, now: float) -> list[Action]:
        if isinstance(event, Received) and isinstance(event.message, Heartbeat):
            time.sleep(STEP_S)
        return step(self, event, now)

    async with nothing_left(), serving(Options(lease_s=LEASE_S)) as server, AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(await thin_worker(server, number)) for number in range(WORKERS)]
        monkeypatch.setattr(Coordinator, "step", slow)
        for number, worker in enumerate(workers):
            say_at_once(worker, Join(f"w{number}", Location(), (), 1, 0), *map(Heartbeat, range(BEATS)))
        for worker in workers:
            assert isinstance(await worker.receive(), Welcome)
            for sequence in range(BEATS):
                said = await worker.receive()
                assert isinstance(said, HeartbeatAck)
                assert said.sequence == sequence
        await until(lambda: not server._core.cluster.workers)
        for worker in workers:
            assert isinstance(await worker.receive(), Dismissed)


@pytest.mark.parametrize("pending", [False, True])
async def test_who_is_away_has_a_second_lease_while_somebody_waits_to_be_let_in(
    pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the very worker that comes back. Pending connections that never say anything keep nobody for longer."""
    lost: list[tuple[Event, float]] = []  # in which step, and how long after it was heard last
    step = Coordinator.step

    def watched(self: Coordinator, event: Event, now: float) -> list[Action]:
        heard = [worker.heard_at for worker in self.cluster.workers.values()]
        actions = step(self, event, now)
        if heard and not self.cluster.workers:
            lost.append((event, now - heard[0]))
        return actions

    monkeypatch.setattr(Coordinator, "step", watched)
    options = Options(lease_s=LEASE_S, connect_timeout_s=2 * WAIT_S)
    async with nothing_left(), serving(options) as server, AsyncExitStack() as stack:
        if pending:
            await stack.enter_async_context(await anyio.connect_tcp(*parse_address(server.address)))
            await until(lambda: server._accept_loop is not None and not server._accept_loop.is_empty)
        async with await thin_worker(server, 1) as worker:
            say_at_once(worker, Join("w1", Location(), (), 1, 0))
            assert isinstance(await worker.receive(), Welcome)
        await until(lambda: bool(lost))
        event, seconds = lost[0]
        if pending:
            assert isinstance(event, Tick)
            assert seconds >= 2 * LEASE_S
        else:
            assert event == Silent((DOOR,))


async def test_whose_words_come_between_the_question_and_the_verdict_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator with much to do gives its verdict long after it has asked the kernel."""
    async with nothing_left(), serving(Options(lease_s=LEASE_S)) as server, await thin_worker(server, 1) as worker:
        say_at_once(worker, Join("w1", Location(), (), 1, 0))
        assert isinstance(await worker.receive(), Welcome)
        ask, asked, verdicts = CoordinatorServer._has_nothing_unread, list[bool](), list[Silent]()
        step = CoordinatorServer._step

        def asks(self: CoordinatorServer, number: int) -> bool:
            asked.append(ask(self, number))
            if len(asked) == 1:
                monkeypatch.setattr(PolledStream, "receive_nowait", lambda *_: None)  # nobody is heard for now
                say_at_once(worker, Heartbeat(1))
            return asked[-1]

        def notes(self: CoordinatorServer, event: Event) -> None:
            if isinstance(event, Silent) and not verdicts:
                verdicts.append(event)
                monkeypatch.undo()
                say_at_once(worker, Heartbeat(2))
            step(self, event)

        monkeypatch.setattr(CoordinatorServer, "_has_nothing_unread", asks)
        monkeypatch.setattr(CoordinatorServer, "_step", notes)
        said = await worker.receive()
        assert isinstance(said, HeartbeatAck)
        assert verdicts == [Silent(())]
