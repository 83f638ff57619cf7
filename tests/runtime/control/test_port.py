"""A port that a coordinator holds while it does not listen there."""

from __future__ import annotations

import contextlib
import errno
import socket

import pytest

from tensorhub.runtime.control.port import bound, listening
from tests.rig import WAIT_S


def listens(address: tuple[str, int]) -> bool:
    """Whether another process could listen there."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(address)
            other.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


async def test_no_other_process_listens_there_before_between_and_during_terms() -> None:
    with await bound("127.0.0.1", 0, WAIT_S) as holder, contextlib.ExitStack() as stack:
        address = holder.getsockname()
        for _ in range(2):
            assert not listens(address)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, WAIT_S)
            with listening(holder) as listener:
                assert not listens(address)
                stack.enter_context(socket.create_connection(address, WAIT_S))
                stack.enter_context(listener.accept()[0])  # it outlives its listener
    assert listens(address)
