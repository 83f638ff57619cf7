"""Tensors of a device that stands in for a GPU."""

from __future__ import annotations

import torch

from tensorhub.api.hub import Hub
from tensorhub.api.tools import register_memory
from tensorhub.api.weights import Weights
from tensorhub.memory.tensors import RegisteredMemory
from tests.cuda.double import Double

SIZES = {"large": 150_000, "small": 3, "none": 0, **{f"tiny.{number}": 40 for number in range(20)}}


class Own:
    """Tensors in one allocation of a device, as torch's allocator gives them out."""

    def __init__(self, device: Double, value: int) -> None:
        self.device = device
        self._bytes = bytearray(sum(SIZES.values()) + 64 * len(SIZES))
        device.bytes_of(self._bytes)
        whole, at = torch.frombuffer(self._bytes, dtype=torch.uint8), 0
        self.tensors: dict[str, torch.Tensor] = {}
        for name, size in SIZES.items():
            self.tensors[name] = whole[at : at + size]
            at += -(-size // 64) * 64
        self.fill(value)

    def fill(self, value: int) -> None:
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def holds(self, value: int) -> bool:
        return all(bool(tensor.eq(value).all()) for tensor in self.tensors.values())

    async def register(self, hub: Hub, *, on_host: bool = False) -> Weights:
        memory = RegisteredMemory(self.tensors)
        memory.device = None if on_host else self.device
        return await register_memory(hub, "m", memory)
