"""A NIXL without NIXL: agents of this process, as far as TensorHub uses them, which read where a
test lets them.

What it promises is what the real one does: an address that is not registered is not read, metadata
begins with its agent's name, a read that is released before its end may write later.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any

import pytest

Descs = list[tuple[int, int, str, int]]
"""(address, bytes, kind of memory, number of the device)."""


class Fabric:
    """All agents that there are, and what becomes of their reads."""

    def __init__(self) -> None:
        self.agents: dict[str, Shown] = {}
        self.holds = False  # reads that are posted stay under way
        self.fails = False  # they end as errors
        self.knows_gpus = True  # its UCX has CUDA
        # of each read: what it went to, and what it came from
        self.kinds: list[tuple[str, int, str, int]] = []
        self.held: list[Handle] = []
        self.lock = threading.Lock()

    def let_go(self) -> None:
        """All that is under way is done, whoever waits for it."""
        self.holds = False
        with self.lock:
            held, self.held = self.held, []
        for handle in held:
            handle.run()


class Sync(Enum):
    NIXL_THREAD_SYNC_RW = 2


class Inside:
    """nixlBind.nixlAgent: its end is the agent's."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self._fabric = fabric
        self._name = name

    def __del__(self) -> None:
        self._fabric.agents.pop(self._name, None)


class Handle:
    def __init__(self, mine: Descs, theirs: Descs) -> None:
        self.mine = mine
        self.theirs = theirs
        self.state = "PROC"
        self.is_released = False

    def run(self) -> None:
        for (here, nbytes, _, _), (there, _, _, _) in zip(self.mine, self.theirs, strict=True):
            ctypes.memmove(here, there, nbytes)
        self.state = "DONE"

    def release(self) -> None:
        self.is_released = True


class Agent:
    def __init__(self, fabric: Fabric, name: str) -> None:
        self.name = name
        self.agent: object = None
        self.places: Descs = []
        self.known: set[str] = set()
        self._fabric = fabric

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def create_backend(self, name: str) -> None:
        assert isinstance(self.agent, Inside)
        self._fabric.agents[self.name] = Shown(self)  # which does not keep the agent

    def register_memory(self, places: Sequence[tuple[int, int, int, str]], kind: str) -> object:
        assert kind in ("DRAM", "VRAM")
        if kind == "VRAM" and not self._fabric.knows_gpus:
            raise RuntimeError("NIXL_ERR_BACKEND")
        made = [(address, nbytes, kind, number) for address, nbytes, number, _ in places]
        self.places += made
        return made

    def deregister_memory(self, registered: Descs) -> None:
        for each in registered:
            self.places.remove(each)

    def get_agent_metadata(self) -> bytes:
        named = self.name.encode()
        return (
            b"nixlSerDes|Agent"
            + len(named).to_bytes(8, sys.byteorder)
            + named
            + b"|Conns"
            + b"x" * len(self.places)
        )

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = metadata[24 : metadata.index(b"|Conns")].decode()
        if name not in self._fabric.agents:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.known.add(name)
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, places: Sequence[tuple[int, int, int]], kind: str) -> Descs:
        return [(address, nbytes, kind, number) for address, nbytes, number in places]

    def initialize_xfer(self, way: str, mine: Descs, theirs: Descs, name: str) -> Handle:
        assert (way, name in self.known) == ("READ", True)
        for descs, places in ((mine, self.places), (theirs, self._fabric.agents[name].places)):
            for address, nbytes, *memory in descs:
                if not any(
                    start <= address and address + nbytes <= start + size and memory == held
                    for start, size, *held in places
                ):
                    raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self._fabric.kinds.append((*mine[0][2:], *theirs[0][2:]))
        return Handle(mine, theirs)

    def transfer(self, handle: Handle) -> str:
        if self._fabric.fails:
            handle.state = "ERR"
        elif self._fabric.holds:
            with self._fabric.lock:
                self._fabric.held.append(handle)
        else:
            handle.run()
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        assert not handle.is_released
        return handle.state


class Shown:
    """What others see of an agent."""

    def __init__(self, agent: Agent) -> None:
        self.name = agent.name
        self.places = agent.places


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """NIXL is this one."""
    made = Fabric()
    api: Any = types.ModuleType("nixl._api")
    api.nixl_agent = lambda name, config: Agent(made, name)
    api.nixl_agent_config = lambda **settings: None
    api.nixl_thread_sync_t = Sync
    api.nixlBind = types.SimpleNamespace(
        nixlAgentConfig=types.SimpleNamespace, nixlAgent=lambda name, config: Inside(made, name)
    )
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return made
