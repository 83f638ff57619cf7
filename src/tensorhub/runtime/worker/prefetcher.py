"""`connect(prefetch=True)`: each new version is prefetched in the background, for the handles that
follow their model.

Responsible for the time of a prefetch: when a version is announced, one at a time, the newest
first, and never while another call runs on the handle. Not responsible for prefetching itself
(`host_copies`). A failed prefetch is logged, and the next version is tried.
"""

from __future__ import annotations

import anyio

from tensorhub.errors import TensorHubError
from tensorhub.logs import get_logger
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.runtime.worker.ports import CallersCopies
from tensorhub.runtime.worker.version_watches import VersionWatches
from tensorhub.types import LATEST, HandleState, VersionInfo

log = get_logger("tensorhub.worker")


class Prefetcher:
    """Follows one handle's model for it; `run` until cancelled."""

    def __init__(
        self,
        handle: CallersHandle,
        version_watches: VersionWatches,
        copies: CallersCopies,
        timeout_s: float,
    ) -> None:
        self._handle = handle
        self._version_watches = version_watches
        self._copies = copies
        self._timeout_s = timeout_s
        self._changed = anyio.Event()
        self._tried = ""  # the content that was prefetched last, whatever came of it

    def __repr__(self) -> str:
        return f"<Prefetcher of {self._handle!r}>"

    async def run(self) -> None:
        model = self._handle.member.shard.model
        self._handle.call_ended = self._wake
        self._version_watches.listen(model, self._heard)
        try:
            while self._handle.member.state is not HandleState.CLOSED:
                self._changed = anyio.Event()
                newest = self._version_watches.newest(model)
                if newest is not None and self._is_wanted(newest):
                    await self._prefetch(newest)
                else:
                    await self._changed.wait()
        finally:
            self._version_watches.unlisten(model, self._heard)

    def _heard(self, newest: VersionInfo | None) -> None:
        self._wake()

    def _wake(self) -> None:
        self._changed.set()

    def _is_wanted(self, newest: VersionInfo) -> bool:
        """The handle follows its model (it was filled last, not published), is idle, and holds
        another version.
        """
        member = self._handle.member
        if (
            not self._handle.was_filled
            or member.running is not None
            or newest.content_id == self._tried
        ):
            return False
        if member.is_loss_unreported:
            return False  # its caller is to be told, by a call of its own
        return member.content is None or member.content.version.content_id != newest.content_id

    async def _prefetch(self, newest: VersionInfo) -> None:
        self._tried = newest.content_id
        try:
            await self._copies.prefetch(self._handle, LATEST, self._timeout_s)
        except TensorHubError as error:
            log.warning(
                "prefetch_failed", model=newest.model, version=newest.version, reason=str(error)
            )
