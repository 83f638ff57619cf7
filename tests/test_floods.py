"""Floods, and peers that drip, on both planes: whoever does it loses the connection, and the others
notice nothing.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import anyio
import anyio.to_thread
import pytest

from tensorhub.api.hub import Hub
from tensorhub.coordinator import limits
from tensorhub.errors import CoordinatorUnavailable
from tensorhub.messages import NO_REQUEST, Describe, FromWorker, Join, Refused, Register, Watch
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.certificates import TLS_VARIABLES, Certificates
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.secret import read_only_token
from tensorhub.protocol.tls import Tls
from tensorhub.runtime.control import accepting
from tensorhub.types import Location, Medium, Options, Purpose, parse_address
from tests.certificates import usual
from tests.rig import (
    CHUNK_BYTES,
    WAIT_S,
    Cluster,
    cluster,
    connect,
    holds,
    tensors,
    until,
    worker_of,
)
from tests.runtime.data_rig import waited_out_s

# nothing but the bound helps
PATIENT = Options(op_timeout_s=WAIT_S, connect_timeout_s=4 * WAIT_S, chunk_bytes=CHUNK_BYTES)


def data_address(hub: Hub) -> str:
    return next(each.address for each in worker_of(hub)._endpoints if each.transport == "tcp")


def address_of(c: Cluster, where: str) -> tuple[str, int]:
    return parse_address(c.address if where == "coordinator" else data_address(c.hubs[0]))


@contextlib.contextmanager
def proved(
    address: str, role: str = "worker", incarnation: str = "", secret: bytes = b""
) -> Iterator[BlockingConnection]:
    """A connection by hand that has proved itself."""
    with BlockingConnection(
        socket.create_connection(parse_address(address)), stall_timeout_s=WAIT_S
    ) as connection:
        life = incarnation or os.urandom(8).hex()
        connection.handshake(ClientHandshake(role, life, secret, os.urandom(NONCE_BYTES)), WAIT_S)
        yield connection


def is_closed(peer: socket.socket) -> bool:
    """Whether the other side has closed it; waits for that."""
    peer.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while peer.recv(65536):
            pass
    return True


async def fetches(c: Cluster, content: int, transports: Sequence[str] | None = None) -> None:
    """A newcomer comes in and reads it all, without a retry."""
    async with connect(c.address, "late", PATIENT, transports=transports) as late:
        mine = tensors()
        report = await (await late.register("m", mine)).replicate()
        assert holds(mine, content)
        assert (report.retries, len(report.sources)) == (0, 1)


@pytest.mark.parametrize("words", [b"", b"TENSRHUB"], ids=["silent", "half a word"])
@pytest.mark.parametrize("where", ["coordinator", "worker"])
async def test_a_flood_of_pending_connections_closes_its_own_ones(
    where: str, words: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("PENDING_MAX", "PENDING_READERS_MAX"):
        monkeypatch.setattr(accepting, name, 8)
    async with cluster("trainer", options=PATIENT) as c:
        await (await c.hubs[0].register("m", tensors(1))).publish(1)
        with contextlib.ExitStack() as stack:
            flood = []
            for _ in range(60):
                flood.append(
                    stack.enter_context(socket.create_connection(address_of(c, where), WAIT_S))
                )
                flood[-1].sendall(words)
            assert await anyio.to_thread.run_sync(is_closed, flood[0])
            await fetches(c, 1)
            assert await anyio.to_thread.run_sync(is_closed, flood[20])
    told = [
        record.getMessage()
        for record in caplog.records
        if "pending_connection_closed" in record.getMessage()
    ]
    assert 0 < len(told) < 10


def _hello() -> bytes:
    one = Tls(Certificates(usual()), "reader", peer="owner")
    one.handshake()
    return one.data_to_send()


class Flood:
    """Connections from some addresses that say so much of a TLS hello, without an end."""

    def __init__(self, target: tuple[str, int], said: bytes, addresses: int) -> None:
        self.count = 0
        self._target, self._said, self._addresses = target, said, addresses
        self._ends = threading.Event()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            held = collections.deque[socket.socket]()
            while not self._ends.is_set():
                host = f"127.0.1.{1 + self.count % self._addresses}"
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(self._target, WAIT_S, (host, 0)))
                    stack.callback(held[-1].close)
                    held[-1].sendall(self._said)
                self.count += 1
                if len(held) > 20:
                    held.popleft().close()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as pool:
            flooding = pool.submit(self.run)
            try:
                yield
            finally:
                self._ends.set()
            flooding.result(WAIT_S)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["silent", "half", "whole"])
@pytest.mark.parametrize("where", ["coordinator", "worker"])
async def test_a_flood_of_tls_handshakes_from_several_addresses_keeps_no_peer_out(
    where: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENDING_MAX", "PENDING_READERS_MAX"):
        monkeypatch.setattr(accepting, name, 8)
    for name, variable in TLS_VARIABLES.items():
        monkeypatch.setenv(variable, str(getattr(usual(), name)))
    async with cluster("trainer", options=PATIENT, transports=["tcp"]) as c:
        await (await c.hubs[0].register("m", tensors(1))).publish(1)
        hello = _hello()
        flood = Flood(address_of(c, where), hello[: int(share * len(hello))], 3)
        with flood.running():
            await until(lambda: flood.count > 20)
            await fetches(c, 1, ["tcp"])


async def test_sessions_beyond_the_bound_are_refused_and_told_so() -> None:
    options = Options(op_timeout_s=WAIT_S, sessions_max=2, chunk_bytes=CHUNK_BYTES)
    async with cluster("one", "two", options=options) as c:
        with pytest.raises(
            CoordinatorUnavailable, match=r"already \(Options\.sessions_max"
        ) as caught:
            async with connect(
                c.address, "three", replace(options, connect_timeout_s=waited_out_s())
            ):
                pass
        assert caught.value.retryable
        assert await c.hubs[0].describe() == ()


async def test_a_session_that_never_joins_is_closed() -> None:
    options = Options(
        op_timeout_s=WAIT_S, connect_timeout_s=waited_out_s(0.5), chunk_bytes=CHUNK_BYTES
    )
    async with cluster("one", options=options) as c:
        with proved(c.address) as idle:
            assert await anyio.to_thread.run_sync(is_closed, idle._socket)
        assert await c.hubs[0].describe() == ()


def watches(number: int) -> FromWorker:
    return Watch(f"name{number}")


def registers(number: int) -> FromWorker:
    name, use = (
        f"read-only-{number}",
        (False, False, Medium.DEVICE, Purpose.USE, "", 1, 1, b"", None),
    )
    return Register(number + 1, name, f"name{number}", name, 0, 0, 1, *use)


@pytest.mark.parametrize("words", [watches, registers])
async def test_readers_that_take_all_they_can_leave_trainers_and_other_readers_what_they_need(
    words: Callable[[int], FromWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without caps, four sessions of the read-only token used up all names, or all
    registrations.
    """
    for name in ("MODELS_MAX", "REGISTRATIONS_MAX", "WATCHED_MAX"):
        monkeypatch.setattr(limits, name, 64)
    for name in ("READ_ONLY_REGISTRATIONS_MAX", "READ_ONLY_WATCHES_MAX"):
        monkeypatch.setattr(limits, name, 32)
    secret = read_only_token("secret").encode()
    options = Options(op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES)
    async with cluster("trainer", options=options, token="secret") as c:
        with contextlib.ExitStack() as stack:
            for session in range(4):
                peer = stack.enter_context(proved(c.address, secret=secret))
                peer.send(Join("greedy", Location(), (), 1, 0))
                for number in range(16):
                    # it is cut off where it takes too much
                    with contextlib.suppress(ConnectionLost):
                        peer.send(words(session * 100 + number))
                with contextlib.suppress(ConnectionLost):
                    peer.send(Describe(9999, "no such model"))
                    await anyio.to_thread.run_sync(heard_out, peer)
            await (await c.hubs[0].register("m", tensors(1))).publish(1)
            async with connect(c.address, "reader", options, token=secret.decode()) as reader:
                assert (await reader.wait_for("m", at_least=1)).version == 1
                assert holds(
                    {name: tensor.numpy() for name, tensor in (await reader.fetch("m")).items()}, 1
                )


async def test_a_reader_that_wants_nothing_is_disconnected_and_is_back_when_it_wants_something(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gone = "no registration, watch or call came"
    options = Options(op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES, lease_s=2)
    async with cluster("trainer", options=options, token="secret") as c:
        await (await c.hubs[0].register("m", tensors(1))).publish(1)
        async with connect(c.address, "reader", options, token=read_only_token("secret")) as reader:
            life = worker_of(reader).incarnation
            for times in (1, 2):
                monkeypatch.setattr(limits, "IDLE_S", 0.2)
                await until(lambda times=times: caplog.text.count(gone) >= times)  # type: ignore[misc]
                # else, on a busy machine, it is gone again while it asks
                monkeypatch.setattr(limits, "IDLE_S", 60.0)
                await until(
                    lambda: caplog.text.count("worker_welcomed") == 2 + caplog.text.count(gone)
                )
                fetched = await reader.fetch("m")
                assert holds({name: tensor.numpy() for name, tensor in fetched.items()}, 1)
            assert worker_of(reader).incarnation == life
            assert (await reader.wait_for("m", at_least=1)).version == 1
            assert "coordinator_lost" not in caplog.text


def heard_out(peer: BlockingConnection) -> None:
    """Until all that it has said is answered, or it is cut off."""
    while (message := peer.receive(FROM_COORDINATOR)) is not None:
        if isinstance(message, Refused) and message.request in (9999, NO_REQUEST):
            return


@pytest.mark.parametrize("drips", [False, True])
async def test_a_reader_in_the_midst_of_a_message_is_given_up(drips: bool) -> None:
    options = Options(
        op_timeout_s=WAIT_S, stall_timeout_s=waited_out_s(0.3), chunk_bytes=CHUNK_BYTES
    )
    async with cluster("trainer", options=options) as c:
        await (await c.hubs[0].register("m", tensors(1))).publish(1)
        with proved(data_address(c.hubs[0]), "reader") as reader:
            reader._socket.sendall((1000).to_bytes(4, "big"))
            owner = worker_of(c.hubs[0])._owner
            await until(lambda: "1 lanes" in repr(owner))

            def drip() -> None:
                with contextlib.suppress(OSError):
                    while drips:
                        reader._socket.sendall(b"x")
                        reader._socket.settimeout(0.05)
                        with contextlib.suppress(TimeoutError):
                            if not reader._socket.recv(1):
                                return

            await anyio.to_thread.run_sync(drip)
            await until(lambda: "0 lanes" in repr(owner))
