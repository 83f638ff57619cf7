"""Somebody in the way who knows no token: what it puts in, keeps back, changes, repeats, reorders or sends back.

Between a real worker and a real coordinator, and between two workers, that costs the connection, is said loudly, and changes
nothing else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest

import tensorhub
from tensorhub import logs
from tensorhub.messages import Dismissed, Message, ReadRefused, Rollback
from tensorhub.protocol import codec
from tensorhub.protocol.frames import HEADER_BYTES, MAC_BYTES, PREFACE, frame
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.transport import sockets
from tensorhub.types import Options, format_address, parse_address
from tests.rig import CHUNK_BYTES, WAIT_S, cluster, connect, holds, published, tensors, until, worker_of
from tests.test_floods import data_address


@pytest.fixture(autouse=True)
def every_event_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TALLY_S", 0.0)


Way = Literal["up", "down"]  # to the server, to the client
HANDSHAKE_FRAMES = 2
SAID = "not the next frame that this peer sent"
OPTIONS = Options(op_timeout_s=WAIT_S, lease_s=2.0, chunk_bytes=CHUNK_BYTES)  # a heartbeat every half second


@dataclass
class Passed:
    """One connection that the relay has passed on: the frames after its handshake, as they were sent."""

    up: list[bytes] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)

    def of(self, way: Way) -> list[bytes]:
        return self.up if way == "up" else self.down


# What goes on instead of this frame, and whether that was all of it.
Meddle = Callable[["Relay", Passed, Way, bytes], tuple[bytes, bool]]


class Relay:
    """Passes connections on, and cuts what passes into frames; it knows their form and no secret.

    `frames_down_max`: that it looks at on the way to the client; then payload follows.
    """

    def __init__(self, target: tuple[str, int], frames_down_max: int = 2**30) -> None:
        self.target = target
        self.frames_down_max = frames_down_max
        self.passed: list[Passed] = []
        self.done = threading.Event()  # what was wanted is done
        self._meddling: tuple[Way, Meddle] | None = None
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._start(self._accept)

    def meddle(self, way: Way, how: Meddle) -> None:
        """Do that to the next frames on this way, once."""
        self.done.clear()
        self._meddling = (way, how)

    def has_passed(self, connections: int) -> bool:
        return len(self.passed) >= connections

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
                passed = Passed()
                self.passed.append(passed)
                self._start(self._pass_on, client, server, passed, "up")
                self._start(self._pass_on, server, client, passed, "down")

    def _pass_on(self, source: socket.socket, target: socket.socket, passed: Passed, way: Way) -> None:
        with contextlib.suppress(OSError, EOFError):
            target.sendall(_exactly(source, len(PREFACE)))
            for _ in range(HANDSHAKE_FRAMES):
                target.sendall(_frame(source, 0))
            while way == "up" or len(passed.down) < self.frames_down_max:
                one = _frame(source, MAC_BYTES)
                instead = self._instead_of(one, passed, way)
                passed.of(way).append(one)  # before its answer comes
                target.sendall(instead)
            while data := source.recv(65536):
                target.sendall(data)
        sockets.shutdown(source)
        sockets.shutdown(target)

    def _instead_of(self, one: bytes, passed: Passed, way: Way) -> bytes:
        if self._meddling is None or self._meddling[0] != way:
            return one
        instead, is_done = self._meddling[1](self, passed, way, one)
        if is_done:
            self._meddling = None
            self.done.set()
        return instead


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
def relay(target: tuple[str, int], frames_down_max: int = 2**30) -> Iterator[Relay]:
    made = Relay(target, frames_down_max)
    try:
        yield made
    finally:
        made.close()


# ---------------------------------------------------------------------------------------------------- what it may try


def forged(message: Message, mac: bytes = bytes(MAC_BYTES)) -> bytes:
    return frame(codec.encode(message), 2**20) + mac


def puts_in(message: Message) -> Meddle:
    return lambda relay, passed, way, one: (forged(message) + one, True)


def puts_in_with_a_mac_that_was_heard(message: Message) -> Meddle:
    return lambda relay, passed, way, one: (forged(message, one[len(one) - MAC_BYTES :]) + one, True)


def keeps_back(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
    return b"", True


def repeats(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
    return one + one, True


def repeats_an_old_one(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
    return (passed.of(way)[0] + one, True) if passed.of(way) else (one, False)


def sends_back(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
    others = passed.of("down" if way == "up" else "up")
    return (others[-1], True) if others else (one, False)


def changes(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
    place = len(one) - MAC_BYTES - 1
    return one[:place] + bytes([one[place] ^ 1]) + one[place + 1 :], True


def changes_the_mac(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
    return one[:-1] + bytes([one[-1] ^ 1]), True


def takes_another_connections(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
    """The frame of the same number."""
    number = len(passed.of(way))
    before = [each.of(way) for each in relay.passed if each is not passed]
    found = next((each[number] for each in before if len(each) > number), None)
    return (one, False) if found is None else (found, True)


def swaps() -> Meddle:
    """The next two, the other way round."""
    held: list[tuple[Passed, bytes]] = []

    def swap(relay: Relay, passed: Passed, way: Way, one: bytes) -> tuple[bytes, bool]:
        if held and held[0][0] is passed:
            return one + held[0][1], True
        held[:] = [(passed, one)]
        return b"", False

    return swap


def attacks(*messages: Message) -> dict[str, Meddle]:
    """Each for one connection; `messages`: what somebody would like to have said."""
    made: dict[str, Meddle] = {}
    for message in messages:
        name = type(message).__name__
        made[f"puts a {name} in"] = puts_in(message)
        made[f"puts a {name} in with a mac that was heard"] = puts_in_with_a_mac_that_was_heard(message)
    return made | {
        "keeps one back": keeps_back,
        "repeats one": repeats,
        "repeats an old one": repeats_an_old_one,
        "swaps two": swaps(),
        "sends one back": sends_back,
        "changes one": changes,
        "changes a mac": changes_the_mac,
        "takes another connection's": takes_another_connections,
    }


# ------------------------------------------------------------------------------------- a worker and its coordinator


@pytest.mark.parametrize("token", ["secret", ""], ids=["token", "open"])
@pytest.mark.parametrize("way", ["up", "down"])
async def test_between_a_worker_and_its_coordinator(way: Way, token: str, caplog: pytest.LogCaptureFixture) -> None:
    tried = attacks(Rollback(1, "forged", "m", 1) if way == "up" else Dismissed("forged"))
    if not token:  # whoever listens knows the keys, too: accidents are noticed
        tried = {name: tried[name] for name in ("keeps one back", "repeats one", "changes one")}
    async with cluster("other", token=token, options=OPTIONS) as c:
        with relay(parse_address(c.address)) as between:
            address = format_address(*between.address)
            async with connect(address, "trainer", OPTIONS, token) as trainer:
                source = await trainer.register("m", tensors(1))
                life, number = worker_of(trainer).incarnation, 2
                await source.publish(1)
                async with source.mutate(2):
                    pass
                for name, how in tried.items():
                    caplog.clear()
                    logs.repeats.forget()
                    sessions = len(between.passed)
                    between.meddle(way, how)
                    while not between.done.is_set():
                        await trainer.describe("m")  # else the next frame would be a heartbeat's
                    await until(lambda: SAID in caplog.text)
                    await until(partial(between.has_passed, sessions + 1))
                    number += 1
                    async with source.mutate(number):  # it goes on, as who it was
                        pass
                    assert worker_of(trainer).incarnation == life, name
                    assert (await c.hubs[0].wait_for("m", at_least=number)).version == number, name
                    assert "forged" not in caplog.text, name
                assert await nobody_rolled_back(c.hubs[0], number)


async def nobody_rolled_back(hub: tensorhub.Hub, number: int) -> bool:
    mine = tensors()
    weights = await hub.register("m", mine)
    report = await weights.replicate()
    return report.version == number and holds(mine, 1)


# --------------------------------------------------------------------------------------------------- between workers


@pytest.mark.parametrize("way", ["up", "down"])
async def test_between_two_workers(way: Way, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PullRunner.__init__.__kwdefaults__ or {}, "batch_bytes", CHUNK_BYTES)  # many requests
    wanted = ReadRefused(0, "forged")
    tried = attacks(*([wanted] if way == "down" else []))
    if way == "down":  # what is behind the first frame is payload: there is no other frame to repeat or to swap it with
        for name in ("repeats an old one", "repeats one", "swaps two", "keeps one back"):
            del tried[name]
    async with cluster("trainer", token="secret", transports=["tcp"], options=OPTIONS) as c:
        await published(c.hubs[0])
        with relay(parse_address(data_address(c.hubs[0])), frames_down_max=1) as between:
            straight = sockets.connect
            monkeypatch.setattr(sockets, "connect", lambda address, *rest: straight(format_address(*between.address), *rest))
            await reads(c.address, 0)
            for name, how in tried.items():
                caplog.clear()
                between.meddle(way, how)
                await reads(c.address, 1)
                assert between.done.is_set(), name
                assert SAID in caplog.text, name


async def reads(address: str, retries_min: int) -> None:
    """A new worker reads all of it, over connections that are new."""
    mine = tensors()
    async with connect(address, "reader", OPTIONS, "secret", ["tcp"]) as hub:
        report = await (await hub.register("m", mine)).replicate()
    assert holds(mine, 1)
    assert report.retries >= retries_min
    assert {source.name for source in report.sources} == {"trainer"}
