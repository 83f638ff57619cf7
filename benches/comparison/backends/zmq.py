"""pyzmq: a PUSH to each receiver's PULL, a message for each tensor, sent without a copy; received
frames are copied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from ..backends.base import Setting, Side
from ..memory import Memory

AHEAD = 32  # messages that may wait on either side: the memory that this takes is bounded


def versions() -> dict[str, str]:
    return {"pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()}


class Source(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._context = zmq.Context(io_threads=2)
        self._sockets = []
        self._ports = []
        for _ in range(setting.receivers):
            push = self._context.socket(zmq.PUSH)
            push.set_hwm(AHEAD)
            self._ports.append(push.bind_to_random_port("tcp://127.0.0.1"))
            self._sockets.append(push)

    def hello(self) -> Any:
        return self._ports

    def give(self) -> None:
        for view in self.memory.views:
            for push in self._sockets:
                push.send(view, copy=False)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Receiver(Side):
    def meet(self, hellos: Sequence[Any]) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set_hwm(AHEAD)
        self._socket.connect(f"tcp://127.0.0.1:{hellos[0][self.setting.number - 1]}")

    def take(self, offered: Any) -> None:
        for view in self.memory.views:
            view[:] = self._socket.recv(copy=False).buffer

    def close(self) -> None:
        self._context.destroy(linger=0)
