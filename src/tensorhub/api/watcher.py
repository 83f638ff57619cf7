"""Newest versions of one model, for a caller that iterates at its own pace."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Self

from tensorhub.api.opening import Unpicklable, wrong_use
from tensorhub.errors import LeaseLost
from tensorhub.runtime.loop_thread import Waiter
from tensorhub.runtime.worker.ports import ThreadPort
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.types import VersionInfo


class Watcher(Unpicklable):
    """Newest versions of one model, conflated. Iterate with `async for`; ends when the hub is
    closed.

    Raises LeaseLost once if the coordinator loses its state; iterate again for what the new cluster
    has.
    """

    def __init__(
        self, worker: CallersWorker, thread: ThreadPort, model: str, keeps: object
    ) -> None:
        """`keeps`: stays open as long as this watcher is referenced."""
        self._keeps = keeps
        self._wakeup = thread.mode.waiter()
        self._box: list[VersionInfo | None] = [None]
        self._last: VersionInfo | None = None
        self._has_ended = False
        self._losses: list[LeaseLost] = []
        listener = _Listener(self._box, self._losses, self._wakeup)
        worker.version_watches.check_room(model)
        thread.post(partial(worker.version_watches.listen, model, listener, listener.lost))
        weakref.finalize(
            self,
            thread.post,
            partial(worker.version_watches.unlisten, model, listener, listener.lost),
        )
        thread.tell_end(self)

    if not TYPE_CHECKING:
        __iter__ = wrong_use(
            "write `async for info in hub.watch(...)`; without an event loop: tensorhub.sync"
        )
        __await__ = wrong_use(
            "hub.watch() is iterated: write `async for info in hub.watch(...)`, or await "
            "hub.wait_for(...)"
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> VersionInfo:
        while not self._has_ended:
            if self._losses:
                raise self._losses.pop()
            info = self._box[0]
            if info is not None and info != self._last:
                self._last = info
                return info
            await self._wakeup.wait()
        raise StopAsyncIteration

    def end(self) -> None:
        """Let the iteration end, also one that waits; the end of the hub does it too. From the
        caller's thread.
        """
        self._has_ended = True
        self._wakeup.set()


class _Listener:
    """Holds no reference to its watcher, so that a watcher that is no longer iterated is freed."""

    def __init__(
        self, box: list[VersionInfo | None], losses: list[LeaseLost], wakeup: Waiter
    ) -> None:
        self._box = box
        self._losses = losses
        self._wakeup = wakeup

    def __call__(self, info: VersionInfo | None) -> None:
        self._box[0] = info
        self._wakeup.set()

    def lost(self, error: LeaseLost) -> None:
        """The coordinator has lost its state: versions begin anew, and the iteration raises `error`
        first.
        """
        self._box[0] = None
        self._losses[:] = [error]
        self._wakeup.set()
