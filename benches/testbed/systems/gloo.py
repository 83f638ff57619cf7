"""A collective: torch.distributed with gloo, in a fixed group that stops together. The trainer
waits for it, too.

`options["how"]`: "broadcast" is torch's own, of pieces that are all under way at once, along gloo's
tree; "chain" passes each piece on from rank to rank as soon as it is there, which is what a well
pipelined collective does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist

from benches.testbed.systems.base import WAIT_S, Baseline, Got, Phases

PORT = 7102
PIECE_BYTES = 2**20


class System(Baseline):
    async def open(self) -> None:
        await super().open()
        self._newest = 0
        await anyio.to_thread.run_sync(self._join)
        self.stack.callback(dist.destroy_process_group)

    # lines
    def _join(self) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        where = f"tcp://{self.setting.addresses['trainer']}:{PORT}"
        timeout = timedelta(seconds=WAIT_S)
        dist.init_process_group(
            "gloo", where, rank=self.setting.rank, world_size=self.setting.workers, timeout=timeout
        )
        tensors = [torch.frombuffer(view, dtype=torch.uint8) for view in self.views]
        self._pieces = [
            tensor[at : at + PIECE_BYTES]
            for tensor in tensors
            for at in range(0, len(tensor), PIECE_BYTES)
        ]

    def _collect(self) -> Phases:
        began_s = time.monotonic()
        dist.barrier()
        together_s = time.monotonic()
        if self.setting.options["how"] == "broadcast":
            _wait([dist.broadcast(piece, 0, async_op=True) for piece in self._pieces])
        else:
            self._pass_on()
        return {"stragglers": together_s - began_s, "transfer": time.monotonic() - together_s}

    def _pass_on(self) -> None:
        rank, sent = self.setting.rank, list[Any]()
        received = [dist.irecv(piece, rank - 1) for piece in self._pieces] if rank else []
        for number, piece in enumerate(self._pieces):
            if received:
                _wait(received[number : number + 1])
            if rank + 1 < self.setting.workers:
                sent.append(dist.isend(piece, rank + 1))
        _wait(sent)

    # end of lines

    async def publish(self, version: int, write: Callable[[], None]) -> Phases:
        await anyio.to_thread.run_sync(write)
        self.news.announce(version)
        return await anyio.to_thread.run_sync(self._collect)

    async def update(self) -> Got:
        version = self.newest()  # no other is announced before all have joined
        phases = await anyio.to_thread.run_sync(self._collect)
        return Got(version, phases, {"trainer": self.setting.nbytes})


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
