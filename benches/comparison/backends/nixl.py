"""NIXL with its UCX backend: memory registered and transfers prepared once, a read posted by each
receiver for each copy.
"""

from __future__ import annotations

import base64
import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from ..backends.base import Setting, Side
from ..memory import Memory

POLL_S = 0.0002


def versions() -> dict[str, str]:
    return {"nixl": importlib.metadata.version("nixl")}


class Source(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self.name = f"agent-{setting.number}"
        self.agent = nixl_agent(
            self.name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        )
        self.places = [(address, nbytes, 0) for address, nbytes in memory.places]
        self.registered = self.agent.register_memory(
            [(*place, "") for place in self.places], "DRAM"
        )

    def hello(self) -> Any:
        return {
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "places": self.places,
        }

    def close(self) -> None:
        self.agent.deregister_memory(self.registered)


class Receiver(Source):
    def meet(self, hellos: Sequence[Any]) -> None:
        remote = self.agent.add_remote_agent(base64.b64decode(hellos[0]["metadata"]))
        there = [tuple(place) for place in hellos[0]["places"]]
        mine = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.places, "DRAM")
        theirs = self.agent.prep_xfer_dlist(remote, there, "DRAM")
        every = list(range(len(there)))
        self._transfer = self.agent.make_prepped_xfer("READ", mine, every, theirs, every)

    def hello(self) -> Any:
        return None

    def take(self, offered: Any) -> None:
        state = self.agent.transfer(self._transfer)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self.agent.check_xfer_state(self._transfer)
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended as {state}")

    def close(self) -> None:
        self.agent.release_xfer_handle(self._transfer)
        super().close()
