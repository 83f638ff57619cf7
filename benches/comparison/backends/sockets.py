"""The ceiling through TCP: bare blocking sockets. Each copy makes new connections; on loopback they
cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import bare
from ..backends.base import Setting, Side
from ..memory import Memory


def versions() -> dict[str, str]:
    return {}


class Source(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._listener = bare.listen()

    def hello(self) -> Any:
        return self._listener.getsockname()[1]

    def give(self) -> None:
        bare.send_all(
            self._listener,
            self.setting.receivers,
            self.memory.views,
            self.setting.options["digests"],
        )

    def close(self) -> None:
        self._listener.close()


class Receiver(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._port = 0

    def meet(self, hellos: Sequence[Any]) -> None:
        self._port = hellos[0]

    def take(self, offered: Any) -> None:
        bare.receive_all(
            ("127.0.0.1", self._port), self.memory.views, self.setting.options["digests"]
        )
