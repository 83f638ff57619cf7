"""The trainer of the point-to-point baselines never writes what is being read, and never waits where it may grow."""

from __future__ import annotations

import socket
import threading

import pytest

from benches.testbed.systems import sockets
from benches.testbed.systems.base import receive_into
from benches.testbed.systems.sockets import HEADER, Copies


class Reader:
    """One that is served by a thread, and takes its time."""

    def __init__(self, copies: Copies) -> None:
        self._end, theirs = socket.socketpair()
        self._end.settimeout(10)
        self._thread = threading.Thread(target=copies.serve, args=(theirs,))
        self._thread.start()

    def begin(self) -> int:
        """The version."""
        self._end.sendall(b"?")
        header = bytearray(HEADER.size)
        receive_into(self._end, memoryview(header))
        return int(HEADER.unpack(header)[0])

    def finish(self) -> bytes:
        content = bytearray(4)
        receive_into(self._end, memoryview(content))
        self._end.sendall(b"!")
        return bytes(content)

    def close(self) -> None:
        self._end.close()
        self._thread.join(10)


def publish(copies: Copies, version: int) -> None:
    copies.take(version, [memoryview(bytearray([version] * 4))])


def test_a_reader_has_one_version_whatever_is_published_meanwhile() -> None:
    copies = Copies([memoryview(bytearray(4))])
    publish(copies, 1)
    readers = [Reader(copies) for _ in range(3)]
    for version, reader in enumerate(readers, 1):
        assert reader.begin() == version
        publish(copies, version + 1)
    assert len(copies.copies) == 4  # one is published, three are read
    for version, reader in enumerate(readers, 1):
        assert reader.finish() == bytes([version] * 4)
        reader.close()
    publish(copies, 5)
    assert len(copies.copies) == 4


def test_a_fixed_number_of_copies_waits_for_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "WAIT_S", 0.0)
    copies = Copies([memoryview(bytearray(4))], grows=False)
    publish(copies, 1)
    reader = Reader(copies)
    reader.begin()
    publish(copies, 2)
    with pytest.raises(TimeoutError, match="a reader does not end"):
        publish(copies, 3)
    assert reader.finish() == bytes([1] * 4)
    reader.close()
    publish(copies, 3)
