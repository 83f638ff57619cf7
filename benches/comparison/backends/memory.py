"""The ceilings within one host: memcpy out of a mapping of the source's memory, and bare
process_vm_readv.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorhub.transport import cma
from tensorhub.transport.one_sided import Piece, cut_up

from ..backends.base import Setting, Side
from ..memory import Memory, create, mapped, private
from ..threads import in_threads


def versions() -> dict[str, str]:
    return {}


class Source(Side):
    @classmethod
    def tensors(cls, setting: Setting) -> dict[str, torch.Tensor]:
        if setting.options["copy"] == "mapped":
            return create(str(setting.scratch / "weights"), setting.sizes)
        return private(setting.sizes)

    def hello(self) -> Any:
        return {"pid": os.getpid(), "places": self.memory.places}


class Receiver(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._calls: list[list[Piece]] = []
        self._copy: Callable[[Sequence[Piece]], None] = _memcpy
        self._there: dict[str, torch.Tensor] = {}

    def meet(self, hellos: Sequence[Any]) -> None:
        if self.setting.options["copy"] == "mapped":
            self._there = mapped(str(self.setting.scratch / "weights"), self.setting.sizes)
            there = [tensor.data_ptr() for tensor in self._there.values()]
            for tensor in self._there.values():  # pages are mapped before the time runs
                tensor.view(torch.uint8)[::4096].sum()
        else:
            pid, there = hellos[0]["pid"], [address for address, _ in hellos[0]["places"]]
            self._copy = lambda call: cma.copy(pid, call)
        pieces = [
            Piece(here, at, size)
            for (here, size), at in zip(self.memory.places, there, strict=True)
        ]
        self._calls = list(cut_up(pieces))

    def take(self, offered: Any) -> None:
        count = self.setting.options["threads"]

        def work(part: int) -> None:
            for call in self._calls[part::count]:
                self._copy(call)

        in_threads(count, work)


def _memcpy(call: Sequence[Piece]) -> None:
    for piece in call:
        ctypes.memmove(piece.here, piece.there, piece.nbytes)
