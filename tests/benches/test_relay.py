"""The relay of chaos: what is held goes on, what is cut is over, and nothing is lost or changed on the way."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from benches.chaos.relay import CLEAR, Path, Relay, Weather
from tests.rig import open_files

WAIT_S = 20.0
HOST = "127.0.0.1"


class Ends:
    """A path, its target, and both ends of connections through it."""

    def __init__(self, relay: Relay, target: socket.socket) -> None:
        self._target = target
        self.relay = relay
        self.path: Path = relay.add((HOST, 0), target.getsockname())
        self._opened = list[socket.socket]()

    def near(self) -> socket.socket:
        made = socket.create_connection(self.path.listener.getsockname(), WAIT_S)
        self._opened.append(made)
        return made

    def far(self) -> socket.socket:
        made, _ = self._target.accept()
        made.settimeout(WAIT_S)
        self._opened.append(made)
        return made

    def both(self) -> tuple[socket.socket, socket.socket]:
        return self.near(), self.far()

    def close(self) -> None:
        for sock in self._opened:
            sock.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    before = open_files()
    with socket.create_server((HOST, 0)) as target, Relay() as relay:
        target.settimeout(WAIT_S)
        made = Ends(relay, target)
        yield made
        made.close()
    assert relay.failure is None
    assert not [thread for thread in threading.enumerate() if thread.name == "relay"]
    assert [name for number, name in open_files().items() if before.get(number) != name] == []


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, f"the connection ended after {len(data)} of {size} bytes"
        data += part
    return data


def is_silent(sock: socket.socket) -> bool:
    """Whether nothing has come. (What may not come must not come later either: who calls this looks again at the end.)"""
    sock.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            return not sock.recv(1, socket.MSG_PEEK)
        return True
    finally:
        sock.settimeout(WAIT_S)


def test_bytes_pass_both_ways_and_so_does_an_end(ends: Ends) -> None:
    near, far = ends.both()
    near.sendall(b"up")
    far.sendall(b"down")
    assert (receive(far, 2), receive(near, 4)) == (b"up", b"down")
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    far.sendall(b"still")
    assert receive(near, 5) == b"still"
    far.shutdown(socket.SHUT_WR)
    assert near.recv(1) == b""


def test_what_is_held_goes_on_when_it_heals(ends: Ends) -> None:
    near, far = ends.both()
    ends.path.set(Weather(hold=frozenset({"up"})))
    near.sendall(b"held")
    near.shutdown(socket.SHUT_WR)
    far.sendall(b"the other way")
    assert receive(near, 13) == b"the other way"  # so the relay has had its turns
    assert is_silent(far)
    ends.path.set(CLEAR)
    assert receive(far, 4) == b"held"
    assert far.recv(1) == b""


def test_nobody_hears_of_a_reset_beyond_a_partition(ends: Ends) -> None:
    near, far = ends.both()
    near.sendall(b"x")
    receive(far, 1)
    ends.path.set(Weather(hold=frozenset({"up", "down"})))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    beside = ends.relay.add((HOST, 0), ends.path.target)
    with socket.create_connection(beside.listener.getsockname(), WAIT_S) as other:  # so the relay has had its turns
        other.sendall(b"y")
        assert receive(ends.far(), 1) == b"y"
    assert is_silent(far)
    ends.path.set(CLEAR)
    with pytest.raises(ConnectionResetError):
        far.recv(1)


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_ends_what_is_open_and_nothing_else(ends: Ends, reset: bool) -> None:
    near, far = ends.both()
    near.sendall(b"x")
    receive(far, 1)
    ends.path.cut(reset=reset)
    for end in (near, far):
        if reset:
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        else:
            assert end.recv(1) == b""
    near, far = ends.both()
    near.sendall(b"y")
    assert receive(far, 1) == b"y"


@pytest.mark.parametrize("weather", [Weather(bytes_per_s=100_000.0), Weather(delay_s=0.2)])
def test_slow_and_late_bytes_are_all_there(ends: Ends, weather: Weather) -> None:
    """Not faster than that: a lower bound of time holds on any machine."""
    near, far = ends.both()
    ends.path.set(weather)
    began = time.monotonic()
    sent = os.urandom(30_000)
    near.sendall(sent)
    assert receive(far, len(sent)) == sent
    assert time.monotonic() - began >= 0.2


def test_an_end_with_connections_open_and_waiting() -> None:
    with socket.create_server((HOST, 0)) as target, Relay() as relay:
        path = relay.add((HOST, 0), target.getsockname())
        path.set(Weather(hold=frozenset({"up"})))
        near = socket.create_connection(path.listener.getsockname(), WAIT_S)
    with near, contextlib.suppress(ConnectionResetError):
        assert near.recv(1) == b""
