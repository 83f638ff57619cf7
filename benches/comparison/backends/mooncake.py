"""Mooncake's transfer engine over TCP: memory registered once, one batch of reads by each receiver
for each copy.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from mooncake.engine import TransferEngine

from ..backends.base import Setting, Side
from ..memory import Memory


def versions() -> dict[str, str]:
    return {"mooncake": importlib.metadata.version("mooncake-transfer-engine-non-cuda")}


class Source(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self.engine = TransferEngine()
        _check("initialize", self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self.addresses = [address for address, _ in memory.places]
        self.lengths = [nbytes for _, nbytes in memory.places]
        _check(
            "batch_register_memory", self.engine.batch_register_memory(self.addresses, self.lengths)
        )

    def hello(self) -> Any:
        return {"session": f"127.0.0.1:{self.engine.get_rpc_port()}", "addresses": self.addresses}

    def close(self) -> None:
        self.engine.batch_unregister_memory(self.addresses)


class Receiver(Source):
    def meet(self, hellos: Sequence[Any]) -> None:
        self._session, self._there = hellos[0]["session"], hellos[0]["addresses"]

    def take(self, offered: Any) -> None:
        done = self.engine.batch_transfer_sync_read(
            self._session, self.addresses, self._there, self.lengths
        )
        _check("batch_transfer_sync_read", done)


def _check(call: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"Mooncake's {call} returned {code}")
