"""What storages have in common: the trainer pushes each version to a host of its own, and each
rollout pulls it from there.

The trainer pushes a copy in the background, so that it trains on meanwhile.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread

from benches.testbed.systems.base import WAIT_S, Baseline, Got, Phases

KEPT = 3  # versions: a slow rollout may still read the last but one
# A program that gets SIGKILL (9) when the process that started it dies (PR_SET_PDEATHSIG, 1).
END_WITH_ME = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Stored(Baseline):
    """`put`, `get` and `delete` a version; `serve` them."""

    async def open(self) -> None:
        if self.setting.role == "store":
            process = self.serve(self.setting.addresses["store"], Path(self.setting.scratch))
            self.stack.callback(process.wait)
            self.stack.callback(process.kill)
            return
        await super().open()
        await anyio.to_thread.run_sync(self.connect)
        if self.setting.role == "trainer":
            self._copy = [memoryview(bytearray(view)) for view in self.views]
            self._is_pushed = threading.Event()
            self._is_pushed.set()
            self._failure: BaseException | None = None

    # lines
    async def publish(self, version: int, write: Callable[[], None]) -> Phases:
        await anyio.to_thread.run_sync(write)
        began_s = time.monotonic()
        if not await anyio.to_thread.run_sync(self._is_pushed.wait, WAIT_S):
            raise TimeoutError("the version before is not stored yet")
        if self._failure is not None:
            raise self._failure
        waited_s = time.monotonic()
        for copy, view in zip(self._copy, self.views, strict=True):
            copy[:] = view
        self._is_pushed.clear()
        threading.Thread(target=self._push, args=(version,), daemon=True).start()
        return {"wait": waited_s - began_s, "copy": time.monotonic() - waited_s}

    def _push(self, version: int) -> None:
        try:
            self.put(version, self._copy)
            self.news.announce(version)
            self.delete(version - KEPT)
        except BaseException as error:
            self._failure = error
        finally:
            self._is_pushed.set()

    async def update(self) -> Got:
        return await anyio.to_thread.run_sync(self._pull)

    def _pull(self) -> Got:
        began_s = time.monotonic()
        while not self.get(version := self.newest(), self.views):
            if time.monotonic() > began_s + WAIT_S:
                raise TimeoutError("every version is deleted before it has arrived")
        return Got(
            version, {"transfer": time.monotonic() - began_s}, {"store": self.setting.nbytes}
        )

    # end of lines

    def serve(self, host: str, directory: Path) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def connect(self) -> None:
        raise NotImplementedError

    def put(self, version: int, views: list[memoryview]) -> None:
        raise NotImplementedError

    def get(self, version: int, views: list[memoryview]) -> bool:
        """False: it was deleted meanwhile."""
        raise NotImplementedError

    def delete(self, version: int) -> None:
        raise NotImplementedError
