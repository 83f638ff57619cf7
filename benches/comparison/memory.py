"""The tensors of one process of a benchmark, in pages that have been touched. Imports torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

import torch
import xxhash

ALIGNMENT = 64


class Memory:
    """Named float32 tensors on the CPU, and what a benchmark does with their bytes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, random: bool) -> None:
        """Touches every page: with random bytes, or with ones."""
        self.tensors = dict(tensors)
        for tensor in self.tensors.values():
            words = tensor.view(torch.int32)
            words.random_() if random else words.fill_(1)
        self.raw = [tensor.view(torch.uint8) for tensor in self.tensors.values()]
        self.views = [_view(tensor) for tensor in self.tensors.values()]
        self.nbytes = sum(len(view) for view in self.views)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Address and bytes of each tensor."""
        return [(raw.data_ptr(), raw.nbytes) for raw in self.raw]

    def change(self) -> None:
        """Another content: one byte of every tensor is another."""
        for raw in self.raw:
            raw[0] += 1

    def clear(self) -> None:
        for raw in self.raw:
            raw.zero_()

    def sample(self) -> str:
        """The byte of every tensor that `change` changes, and its last one."""
        return bytes(view[at] for view in self.views for at in (0, -1)).hex()

    def digest(self) -> str:
        """Of all bytes. (Not the function that TensorHub checks with.)"""
        total = xxhash.xxh3_128(seed=1)
        for view in self.views:
            total.update(view)
        return total.hexdigest()


def private(sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Tensors of so many bytes each, in memory of this process alone."""
    return {
        name_of(number): torch.empty(size // 4, dtype=torch.float32)
        for number, size in enumerate(sizes)
    }


def create(path: str, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Such tensors in a new file, mapped."""
    nbytes = sum(map(aligned, sizes))
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return mapped(path, sizes)


def mapped(path: str, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """The tensors of such a file."""
    whole = torch.from_file(path, shared=True, size=sum(map(aligned, sizes)), dtype=torch.uint8)
    tensors, at = {}, 0
    for number, size in enumerate(sizes):
        tensors[name_of(number)] = whole[at : at + size].view(torch.float32)
        at += aligned(size)
    return tensors


def aligned(size: int) -> int:
    """What a tensor takes in such a file."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def name_of(number: int) -> str:
    return f"tensor.{number:03}"


def _view(tensor: torch.Tensor) -> memoryview:
    """The tensor's own bytes; valid while the tensor lives."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
