"""Ray's object store: put once by the source, got by each receiver as views into the store, copied
out of them.

An actor holds the reference, which is how drivers share one so that Ray frees the object with the
next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from ..backends.base import Setting, Side
from ..memory import Memory

NAMESPACE, HOLDER = "bench", "holder"
VERSIONS_KEPT = 3  # of what the store has room for


def versions() -> dict[str, str]:
    return {"ray": ray.__version__}


class Holder:
    """An actor with the reference to the newest version."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def keep(self, references: list[Any]) -> None:
        self._kept = references

    def newest(self) -> list[Any]:
        return self._kept


class Source(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._arrays = [tensor.numpy() for tensor in memory.tensors.values()]
        context = ray.init(
            num_cpus=1,
            object_store_memory=VERSIONS_KEPT * memory.nbytes + 256 * 2**20,
            include_dashboard=False,
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(setting.scratch / "r"),
        )
        self._address = context.address_info["address"]
        self._holder = ray.remote(num_cpus=0)(Holder).options(name=HOLDER).remote()

    def hello(self) -> Any:
        return self._address

    def offer(self, number: int) -> Any:
        reference = ray.put(self._arrays)
        ray.get(self._holder.keep.remote([reference]))

    def close(self) -> None:
        ray.shutdown()


class Receiver(Side):
    def meet(self, hellos: Sequence[Any]) -> None:
        ray.init(hellos[0], namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
        self._holder = ray.get_actor(HOLDER)
        self._arrays = [tensor.numpy() for tensor in self.memory.tensors.values()]

    def take(self, offered: Any) -> None:
        (reference,) = ray.get(self._holder.newest.remote())
        for mine, theirs in zip(self._arrays, ray.get(reference), strict=True):
            np.copyto(mine, theirs)

    def close(self) -> None:
        ray.shutdown()
