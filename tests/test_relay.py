"""A relay that knows no token puts frames in, changes them or repeats them between a real worker
and a real coordinator.

That costs the connection, is logged, and changes nothing else. The fuzz target `relays` does more
to frames.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from tensorhub import logs
from tensorhub.messages import Dismissed, Message, Rollback
from tensorhub.protocol import codec
from tensorhub.protocol.frames import HEADER_BYTES, MAC_BYTES, PREFACE, frame
from tensorhub.transport import sockets
from tensorhub.types import Options, format_address, parse_address
from tests.rig import CHUNK_BYTES, WAIT_S, cluster, connect, tensors, until, worker_of


@pytest.fixture(autouse=True)
def every_event_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TALLY_S", 0.0)


Way = Literal["up", "down"]  # to the server, to the client
HANDSHAKE_FRAMES = 2
SAID = "not the next frame that this peer sent"
# a heartbeat every half second
OPTIONS = Options(op_timeout_s=WAIT_S, lease_s=2.0, chunk_bytes=CHUNK_BYTES)


Meddle = Callable[[bytes], bytes]  # what goes on instead of a frame


class Relay:
    """Passes connections on, and cuts what passes into frames; it knows their form and no
    secret.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.connections = 0
        self.meddling: tuple[Way, Meddle] | None = None
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._start(self._accept)

    def meddle(self, way: Way, how: Meddle) -> None:
        """Do that to the next frame on this way."""
        self.meddling = (way, how)

    def close(self) -> None:
        sockets.shutdown(self._listener)
        with self._lock:
            for each in self._open:
                sockets.shutdown(each)
        while self._threads:
            self._threads.pop(0).join()
        for each in [self._listener, *self._open]:
            each.close()

    def _start(self, what: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=what, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                with self._lock:
                    self._open.append(client)
                server = socket.create_connection(self.target, WAIT_S)
                server.settimeout(None)
                with self._lock:
                    self._open.append(server)
                self.connections += 1
                self._start(self._pass_on, client, server, "up")
                self._start(self._pass_on, server, client, "down")

    def _pass_on(self, source: socket.socket, target: socket.socket, way: Way) -> None:
        with contextlib.suppress(OSError, EOFError):
            target.sendall(_exactly(source, len(PREFACE)))
            for _ in range(HANDSHAKE_FRAMES):
                target.sendall(_frame(source, 0))
            while True:
                one = _frame(source, MAC_BYTES)
                if self.meddling is not None and self.meddling[0] == way:
                    one, self.meddling = self.meddling[1](one), None
                target.sendall(one)
        sockets.shutdown(source)
        sockets.shutdown(target)


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _frame(source: socket.socket, mac_bytes: int) -> bytes:
    head = _exactly(source, HEADER_BYTES)
    return head + _exactly(source, int.from_bytes(head, "big") + mac_bytes)


@contextlib.contextmanager
def relay(target: tuple[str, int]) -> Iterator[Relay]:
    made = Relay(target)
    try:
        yield made
    finally:
        made.close()


# --------------------------------------------------------------------------------------------------
# what it may try


def puts_in(message: Message) -> Meddle:
    return lambda one: frame(codec.encode(message), 2**20) + bytes(MAC_BYTES) + one


def repeats(one: bytes) -> bytes:
    return one + one


def changes(one: bytes) -> bytes:
    place = len(one) - MAC_BYTES - 1
    return one[:place] + bytes([one[place] ^ 1]) + one[place + 1 :]


@pytest.mark.parametrize("token", ["secret", ""], ids=["token", "open"])
@pytest.mark.parametrize("way", ["up", "down"])
async def test_between_a_worker_and_its_coordinator(
    way: Way, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster("other", token=token, options=OPTIONS) as c:
        with relay(parse_address(c.address)) as between:
            async with connect(
                format_address(*between.address), "trainer", OPTIONS, token
            ) as trainer:
                source = await trainer.register("m", tensors(1))
                life, number = worker_of(trainer).incarnation, 2
                await source.publish(1)
                async with source.mutate(2):
                    pass
                forged = Rollback(1, "forged", "m", 1) if way == "up" else Dismissed("forged")
                for how in (puts_in(forged), repeats, changes):
                    caplog.clear()
                    logs.repeats.forget()
                    connections = between.connections
                    between.meddle(way, how)
                    while between.meddling is not None:
                        await trainer.describe("m")  # else the next frame would be a heartbeat's
                    await until(lambda: SAID in caplog.text)
                    await until(lambda connections=connections: between.connections > connections)  # type: ignore[misc]
                    number += 1
                    async with source.mutate(number):  # it goes on, as who it was
                        pass
                    assert worker_of(trainer).incarnation == life
                    assert (await c.hubs[0].wait_for("m", at_least=number)).version == number
                    assert "forged" not in caplog.text
