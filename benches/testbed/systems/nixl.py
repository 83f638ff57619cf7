"""Point to point by NIXL with UCX over tcp: every rollout reads the trainer's copy, one-sided, when
the trainer lets it.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
import time
from typing import Any

import anyio.to_thread
import numpy as np

from benches.testbed.systems import sockets
from benches.testbed.systems.base import connect

METADATA_PORT = 7105
POLL_S = 0.001
COPIES = 4  # registered once


class System(sockets.System):
    SENDS_BYTES = False

    async def open(self) -> None:
        os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="eth0")
        await super().open()
        await anyio.to_thread.run_sync(self._prepare)

    def copies(self) -> sockets.Copies:
        return sockets.Copies(self.views, COPIES, grows=False)

    # lines
    def _prepare(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found, unused-ignore]

        self._agent: Any = nixl_agent(
            self.setting.name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        )
        if self.setting.role == "trainer":
            copies = [[_place(view) for view in copy] for copy in self._copies.copies]
            self._agent.register_memory([(*place, "") for copy in copies for place in copy], "DRAM")
            told = [base64.b64encode(self._agent.get_agent_metadata()).decode(), copies]
            _tell(self.setting.addresses["trainer"], json.dumps(told).encode())
            return
        mine = [_place(view) for view in self.views]
        self._agent.register_memory([(*place, "") for place in mine], "DRAM")
        metadata, copies = json.loads(_ask(self.setting.addresses["trainer"]))
        remote = self._agent.add_remote_agent(base64.b64decode(metadata))
        into = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM")
        every = list(range(len(mine)))
        self._transfers = []
        for copy in copies:
            there = self._agent.prep_xfer_dlist(remote, [tuple(place) for place in copy], "DRAM")
            self._transfers.append(self._agent.make_prepped_xfer("READ", into, every, there, every))

    def _read(self, place: int) -> None:
        transfer = self._transfers[place]
        state = self._agent.transfer(transfer)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended as {state}")

    # end of lines


def _place(view: memoryview) -> tuple[int, int, int]:
    return int(np.frombuffer(view, np.uint8).ctypes.data), len(view), 0


def _tell(host: str, what: bytes) -> None:
    listener = socket.create_server((host, METADATA_PORT), backlog=64)

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(what)

    threading.Thread(target=serve, daemon=True).start()


def _ask(host: str) -> str:
    with connect(host, METADATA_PORT) as connection:
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
