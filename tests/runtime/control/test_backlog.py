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

from tensorhub.coordinator import Action, Coordinator, Event, Received
from tensorhub.messages import (
    Dismissed,
    FromCoordinator,
    FromWorker,
    Heartbeat,
    HeartbeatAck,
    Join,
    Welcome,
)
from tensorhub.protocol import codec
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
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
    await messages.handshake(
        ClientHandshake("worker", f"life{number}", b"", bytes(NONCE_BYTES)), WAIT_S
    )
    return messages


def say_at_once(messages: MessageStream[FromCoordinator], *words: FromWorker) -> None:
    """So that the server has no turn meanwhile."""
    data = b"".join(messages._encoder.frames(codec.encode(word)) for word in words)
    assert os.write(
        messages._stream.extra(anyio.abc.SocketAttribute.raw_socket).fileno(), data
    ) == len(data)


async def test_in_a_burst_that_lasts_longer_than_the_lease_nobody_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each heartbeat takes the coordinator so long that others' lie unread for two leases. Then all
    fall silent.
    """
    step = Coordinator.step

    def slow(self: Coordinator, event: Event, now: float) -> list[Action]:
        if isinstance(event, Received) and isinstance(event.message, Heartbeat):
            time.sleep(STEP_S)
        return step(self, event, now)

    async with (
        nothing_left(),
        serving(Options(lease_s=LEASE_S)) as server,
        AsyncExitStack() as stack,
    ):
        workers = [
            await stack.enter_async_context(await thin_worker(server, number))
            for number in range(WORKERS)
        ]
        monkeypatch.setattr(Coordinator, "step", slow)
        for number, worker in enumerate(workers):
            say_at_once(
                worker, Join(f"w{number}", Location(), (), 1, 0), *map(Heartbeat, range(BEATS))
            )
        for worker in workers:
            assert isinstance(await worker.receive(), Welcome)
            for sequence in range(BEATS):
                said = await worker.receive()
                assert isinstance(said, HeartbeatAck)
                assert said.sequence == sequence
        await until(lambda: not server._core.cluster.workers)
        for worker in workers:
            assert isinstance(await worker.receive(), Dismissed)
