"""UCX through ucxx: an endpoint for each receiver, a tagged message for each tensor, into the own
tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import ucxx

from ..backends.base import WAIT_S, Setting, Side
from ..memory import Memory


def versions() -> dict[str, str]:
    return {"ucxx": ucxx.__version__, "ucx": ".".join(map(str, ucxx.get_ucx_version()))}


class _Worker(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._endpoints: list[Any] = []
        self._arrays = [tensor.numpy() for tensor in memory.tensors.values()]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)


class Source(_Worker):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self.run(self._listen())

    async def _listen(self) -> None:
        self._complete = asyncio.Event()

        async def accepted(endpoint: Any) -> None:
            self._endpoints.append(endpoint)
            if len(self._endpoints) == self.setting.receivers:
                self._complete.set()

        self._listener = ucxx.create_listener(accepted)

    def hello(self) -> Any:
        return self._listener.port

    def meet(self, hellos: Sequence[Any]) -> None:
        async def wait() -> None:
            await asyncio.wait_for(self._complete.wait(), WAIT_S)

        self.run(wait())

    def give(self) -> None:
        async def send() -> None:
            await asyncio.gather(
                *(endpoint.send(array) for array in self._arrays for endpoint in self._endpoints)
            )

        self.run(send())


class Receiver(_Worker):
    def meet(self, hellos: Sequence[Any]) -> None:
        async def join() -> None:
            self._endpoints.append(await ucxx.create_endpoint("127.0.0.1", hellos[0]))

        self.run(join())

    def take(self, offered: Any) -> None:
        async def receive() -> None:
            await asyncio.gather(*(self._endpoints[0].recv(array) for array in self._arrays))

        self.run(receive())
