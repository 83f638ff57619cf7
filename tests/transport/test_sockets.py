"""Sockets of the data plane: connecting can be cut, and local paths are tuned."""

from __future__ import annotations

import errno
import socket
import threading
from types import SimpleNamespace

import pytest

from tensorhub.errors import StateError
from tensorhub.transport import sockets
from tensorhub.transport.base import Cutter, ReadFailure
from tests.runtime.data_rig import WAIT_S


def test_a_local_connection_is_tuned_and_blocking() -> None:
    cutter = Cutter()
    with (
        sockets.listen("127.0.0.1") as listener,
        sockets.connect(sockets.address_of(listener), WAIT_S, cutter) as connection,
    ):
        assert sockets.is_local(connection)
        assert connection.getblocking()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert (
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
            == b"reno"
        )
        cutter.detach()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "127.0.0.1:1", "tcp://host.invalid:1"])
def test_what_cannot_be_reached_says_so(address: str) -> None:
    with pytest.raises(ReadFailure) as caught:
        sockets.connect(address, WAIT_S, Cutter())
    assert caught.value.reason == "unreachable"


@pytest.mark.parametrize("cut_first", [True, False])
def test_a_connect_that_hangs_can_be_cut(cut_first: bool) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = []
        for _ in range(3):  # a full backlog: further attempts are not answered
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        cutter, attached = Cutter(), threading.Event()
        attach = cutter.attach

        class Watched(Cutter):
            def attach(self, end: object) -> None:
                attach(end)  # type: ignore[arg-type]
                attached.set()

            @property
            def is_cut(self) -> bool:
                return cutter.is_cut

        if cut_first:
            cutter.cut()

        def cut_once_attached() -> None:
            if attached.wait(WAIT_S):
                cutter.cut()

        cut = threading.Thread(target=cut_once_attached)
        cut.start()
        with pytest.raises(ReadFailure):
            sockets.connect(sockets.address_of(full), 10 * WAIT_S, Watched())
        cut.join()
        for filler in fillers:
            filler.close()


def test_a_connect_ends_at_its_deadline() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        with pytest.raises(ReadFailure, match="no answer in time"):
            sockets.connect(sockets.address_of(full), 0.01, Cutter())
        for filler in fillers:
            filler.close()


def test_a_cutter_does_not_touch_what_was_detached() -> None:
    calls: list[str] = []
    cutter = Cutter()
    cutter.attach(lambda: calls.append("first"))
    cutter.detach()
    cutter.cut()
    assert (calls, cutter.is_cut) == ([], True)
    cutter.attach(lambda: calls.append("late"))
    assert calls == ["late"]


def test_the_first_of_some_ports_that_is_free_is_listened_at() -> None:
    with sockets.listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        listener, nth = sockets.listen_at_one("127.0.0.1", [port, port, 0])
        listener.close()
        assert nth == 2
        with pytest.raises(OSError, match="in use") as caught:
            sockets.listen_at_one("127.0.0.1", [port, port])
        assert caught.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError, match="assign") as caught:
            sockets.listen_at_one("192.0.2.1", [0, port])  # another port would help as little
        assert caught.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(StateError, match="no port"):
        sockets.listen_at_one("127.0.0.1", [])
    assert sockets.is_here("127.0.0.1")
    assert not sockets.is_here("192.0.2.1")


def test_a_connect_waits_up_to_its_deadline_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = 100.0, list[float]()

    class Poll:
        def register(self, connection: object, events: int) -> None:
            """Nothing will happen there."""

        def poll(self, timeout_ms: float) -> list[object]:
            nonlocal now
            waited.append(timeout_ms)
            now += timeout_ms / 1000
            return []

    monkeypatch.setattr(sockets, "select", SimpleNamespace(poll=Poll, POLLOUT=0))
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: now))
    for left_s in (0.25, 0.0, -1.0):
        waited.clear()
        with socket.socket() as connection, pytest.raises(OSError, match="in time") as caught:
            sockets._wait_connected(connection, now + left_s)
        assert caught.value.errno == errno.ETIMEDOUT
        assert sum(waited) == pytest.approx(max(0.0, 1000 * left_s))
