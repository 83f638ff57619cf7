"""torch.distributed with gloo, into the own tensors: a broadcast of each, or a send to each
receiver; all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..backends.base import Side

TIMEOUT = timedelta(seconds=120)


def versions() -> dict[str, str]:
    if not dist.is_gloo_available():
        raise RuntimeError("this torch is built without gloo")
    return {}


class Source(Side):
    def meet(self, hellos: Sequence[Any]) -> None:
        world, file = self.setting.receivers + 1, self.setting.scratch / "rendezvous"
        dist.init_process_group(
            "gloo", f"file://{file}", rank=self.setting.number, world_size=world, timeout=TIMEOUT
        )
        dist.barrier()

    def give(self) -> None:
        if self.setting.options["broadcast"]:
            self._broadcast()
        else:
            ranks = range(1, self.setting.receivers + 1)
            _wait(
                [
                    dist.isend(tensor, rank)
                    for tensor in self.memory.tensors.values()
                    for rank in ranks
                ]
            )

    def _broadcast(self) -> None:
        _wait([dist.broadcast(tensor, 0, async_op=True) for tensor in self.memory.tensors.values()])

    def close(self) -> None:
        dist.destroy_process_group()


class Receiver(Source):
    def take(self, offered: Any) -> None:
        if self.setting.options["broadcast"]:
            self._broadcast()
        else:
            _wait([dist.irecv(tensor, 0) for tensor in self.memory.tensors.values()])


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
