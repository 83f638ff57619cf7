"""Machines that get another address, as network namespaces do here: who was there before is found."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import Any

import pytest

from benches.chaos import namespaces
from benches.chaos.namespaces import Namespaces
from benches.child_processes import Process

WAIT_S = 60.0
OPTIONS = {"lease_s": 2.0, "drain_grace_s": 0.5, "op_timeout_s": WAIT_S}


class World:
    """Processes, each on a machine of its own."""

    def __init__(self, stack: ExitStack, backend: str) -> None:
        self._stack, self._backend = stack, backend
        self._network = stack.enter_context(Namespaces(["trainer", "reader", "late"]))
        coordinator = self._start("coordinator")
        host, port = self._network.coordinators["coordinator"]
        coordinator.do("serve", host=host, port=port, state_dir=None, ha=None, options=OPTIONS)

    def _start(self, name: str) -> Process:
        made = Process(
            name,
            "benches.chaos.bench_process",
            self._backend,
            prefix=self._network.prefix(name),
            environment={"TENSORHUB_TOKEN": "of this test"},
        )
        self._stack.callback(made.end)
        return made

    def join(self, name: str) -> Process:
        """A worker, and a group, of that name."""
        made = self._start(name)
        made.do(
            "connect",
            address=self._network.address(name),
            name=name,
            location={"site": "here", "host": self._network.location(name)},
            prefetch=False,
            transports=["tcp"],
            options={"op_timeout_s": WAIT_S, "direct": []},
        )
        sizes = {"nbytes": 2**20, "rank": 0, "world_size": 1}
        assert made.do("register", group=name, spot=False, shared=False, **sizes)["outcome"] == "ok"
        return made

    def move(self, name: str) -> None:
        """To the address 100 beyond."""
        host, _, number = self._network.host(name).rpartition(".")
        for words in ("flush dev eth0", f"add {host}.{int(number) + 100}/24 dev eth0"):
            command = [*self._network.prefix(name), "ip", "address", *words.split()]
            subprocess.run(command, check=True, timeout=WAIT_S)


def publish(process: Process, version: int) -> None:
    said = process.do("mutate", rank=0, version=version, content=version, timeout=WAIT_S)
    assert said["outcome"] == "ok", said


def read(process: Process, version: int) -> None:
    """Again, if its machine was away for longer than a lease meanwhile."""
    said: dict[str, Any] = {"outcome": "GroupAborted"}
    while said["outcome"] == "GroupAborted":
        said = process.do("update", rank=0, at_least=version, timeout=WAIT_S)
    assert (said["outcome"], said.get("version"), said["contents"]) == ("ok", version, [version])


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def test_peers_that_come_back_under_another_address_are_found(backend: str) -> None:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        world = World(stack, backend)
        trainer, reader = world.join("trainer"), world.join("reader")
        publish(trainer, 1)
        read(reader, 1)
        trainer.kill()
        world.move("trainer")
        trainer = world.join("trainer")
        publish(trainer, 2)
        read(reader, 2)
        world.move("reader")  # while it is connected
        publish(trainer, 3)
        read(reader, 3)
        trainer.kill()
        read(world.join("late"), 3)  # which only the reader has
