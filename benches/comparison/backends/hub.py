"""TensorHub, by its public API alone: the source embeds the coordinator, publishes, and the
receivers update in place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import torch
from anyio.from_thread import start_blocking_portal

import tensorhub

from ..backends.base import Setting, Side
from ..memory import Memory, private

MODEL = "bench"


def versions() -> dict[str, str]:
    return {"tensorhub": tensorhub.__version__}


class _Worker(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._weights: tensorhub.Weights | None = None

    @property
    def weights(self) -> tensorhub.Weights:
        if self._weights is None:
            raise RuntimeError("the handle is made when all meet")
        return self._weights

    def join(self, address: str) -> None:
        transports = (self.setting.options["transport"],)
        options = tensorhub.Options(integrity=self.setting.options["integrity"])
        joined = partial(
            _joined,
            address,
            f"worker-{self.setting.number}",
            transports,
            options,
            self.memory.tensors,
        )
        entered: AbstractContextManager[tensorhub.Weights] = (
            self._portal.wrap_async_context_manager(joined())
        )
        self._weights = self._stack.enter_context(entered)

    def close(self) -> None:
        self._stack.close()


@asynccontextmanager
async def _joined(
    address: str,
    name: str,
    transports: Sequence[str],
    options: tensorhub.Options,
    tensors: dict[str, torch.Tensor],
) -> AsyncIterator[tensorhub.Weights]:
    async with tensorhub.connect(address, name=name, transports=transports, options=options) as hub:
        yield await hub.register(MODEL, tensors)


class Source(_Worker):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._coordinator = self._stack.enter_context(
            self._portal.wrap_async_context_manager(tensorhub.serve())
        )
        self._published = False

    @classmethod
    def tensors(cls, setting: Setting) -> dict[str, torch.Tensor]:
        plain = private(setting.sizes)
        return (
            tensorhub.shared_empty_like(plain) if setting.options["transport"] == "shm" else plain
        )

    def hello(self) -> Any:
        return self._coordinator.address

    def meet(self, hellos: Sequence[Any]) -> None:
        self.join(hellos[0])

    def retire(self) -> None:
        if self._published:
            self._portal.call(self.weights.unpublish)

    def offer(self, number: int) -> Any:
        self._portal.call(self.weights.publish, number)
        self._published = True
        return number


class Receiver(_Worker):
    def meet(self, hellos: Sequence[Any]) -> None:
        self.join(hellos[0])

    def take(self, offered: Any) -> None:
        report = self._portal.call(self.weights.update, offered)
        wanted = self.setting.options["transport"]
        used = {source.transport for source in report.sources if source.bytes_read}
        if used - {wanted}:
            raise RuntimeError(
                f"it read by {', '.join(sorted(used))}, not by {wanted}: see tensorhub doctor"
            )
