"""Redis on loopback: SET of each tensor by the source, GET by the receivers (hiredis), both in
pipelines; copied out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import hiredis
import redis

from ..backends.base import Setting, Side, free_port, patience, start, stop
from ..environments import program
from ..memory import Memory

BATCH = 16  # tensors of one pipeline: of GETs, all answers are there before they are copied out


def versions() -> dict[str, str]:
    done = subprocess.run(
        [program("redis-server"), "--version"], capture_output=True, text=True, timeout=10
    )
    server = done.stdout.split("v=")[1].split()[0]
    return {"redis-server": server, "redis": redis.__version__, "hiredis": hiredis.__version__}


class Source(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._port = free_port()
        options = (
            f"--bind 127.0.0.1 --port {self._port} --appendonly no --protected-mode no".split()
        )
        self._process = start(
            [program("redis-server"), *options, "--save", ""], setting.scratch / "redis.log"
        )
        self._client = _connected(self._port)

    def hello(self) -> Any:
        return self._port

    def offer(self, number: int) -> Any:
        tensors = list(zip(self.memory.tensors, self.memory.views, strict=True))
        for at in range(0, len(tensors), BATCH):
            with self._client.pipeline(transaction=False) as pipeline:
                for name, view in tensors[at : at + BATCH]:
                    pipeline.set(name, view)
                pipeline.execute()

    def close(self) -> None:
        self._client.close()
        stop(self._process)


class Receiver(Side):
    def meet(self, hellos: Sequence[Any]) -> None:
        self._client = _connected(hellos[0])

    def take(self, offered: Any) -> None:
        names, views = list(self.memory.tensors), self.memory.views
        for at in range(0, len(names), BATCH):
            with self._client.pipeline(transaction=False) as pipeline:
                for name in names[at : at + BATCH]:
                    pipeline.get(name)
                for view, value in zip(views[at : at + BATCH], pipeline.execute(), strict=True):
                    view[:] = value

    def close(self) -> None:
        self._client.close()


def _connected(port: int) -> Any:
    client = redis.Redis(host="127.0.0.1", port=port)
    for _ in patience():
        try:
            client.ping()
        except redis.ConnectionError:
            continue
        return client
    raise TimeoutError("redis-server does not answer; its log is in its standard output")
