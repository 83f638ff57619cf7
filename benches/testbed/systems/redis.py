"""Storage: a Redis on a host of its own. Pieces of 1 MiB: SET one by one, GET in pipelines
(hiredis).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benches.testbed.systems.base import connect
from benches.testbed.systems.storage import END_WITH_ME, Stored

PORT = 7103
PIECE_BYTES = 2**20
BATCH = 4  # pieces of one pipeline


class System(Stored):
    def serve(self, host: str, directory: Path) -> subprocess.Popen[bytes]:
        options = (
            f"--bind {host} --port {PORT} --appendonly no --protected-mode no --dir {directory}"
        ).split()
        command = [sys.executable, "-c", END_WITH_ME, "redis-server", *options, "--save", ""]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def connect(self) -> None:
        import redis

        connect(self.setting.addresses["store"], PORT).close()
        self._client: Any = redis.Redis(host=self.setting.addresses["store"], port=PORT)

    # lines
    def put(self, version: int, views: list[memoryview]) -> None:
        for number, piece in enumerate(pieces(views)):
            self._client.set(f"{version}:{number}", piece)

    def get(self, version: int, views: list[memoryview]) -> bool:
        into = pieces(views)
        for at in range(0, len(into), BATCH):
            with self._client.pipeline(transaction=False) as pipeline:
                for number in range(at, min(at + BATCH, len(into))):
                    pipeline.get(f"{version}:{number}")
                for view, value in zip(into[at : at + BATCH], pipeline.execute(), strict=True):
                    if value is None:
                        return False
                    view[:] = value
        return True

    def delete(self, version: int) -> None:
        self._client.unlink(*(f"{version}:{number}" for number in range(len(pieces(self.views)))))

    # end of lines


def pieces(views: list[memoryview]) -> list[memoryview]:
    return [
        view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES)
    ]
