"""A safetensors file in memory: written by the source for each version, mapped by the receivers,
who copy out of it.
"""

from __future__ import annotations

import os
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file

from ..backends.base import Side


def versions() -> dict[str, str]:
    return {"safetensors": safetensors.__version__}


class Source(Side):
    def offer(self, number: int) -> Any:
        path = self.setting.scratch / "weights.safetensors"
        save_file(self.memory.tensors, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        return str(path)


class Receiver(Side):
    def take(self, offered: Any) -> None:
        for name, tensor in load_file(offered).items():
            self.memory.tensors[name].copy_(tensor)
