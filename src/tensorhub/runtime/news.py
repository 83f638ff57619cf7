"""Each watched model's newest version, as the coordinator announces it."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from tensorhub.errors import CoordinatorUnavailable, OperationTimeout
from tensorhub.messages import Announce, Watch
from tensorhub.runtime.link import CoordinatorLink
from tensorhub.types import VersionInfo

NewestListener = Callable[[VersionInfo | None], None]
"""Called in the library's loop with each newest version; after a rollback with an older one than before, or None."""


class News:
    """`newest` and `watches` may be called from any thread, everything else from the library's loop."""

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._newest: dict[str, VersionInfo | None] = {}  # of the watched models
        self._listeners: dict[str, list[NewestListener]] = {}

    def __repr__(self) -> str:
        return f"<News of {len(self._newest)} models>"

    def newest(self, model: str) -> VersionInfo | None:
        """The last known newest version."""
        return self._newest.get(model)

    def watches(self, model: str) -> bool:
        """Whether this model's newest version is kept known."""
        return model in self._newest

    def listeners(self, model: str) -> int:
        """How many hear of it."""
        return len(self._listeners.get(model, ()))

    def watch(self, model: str) -> None:
        """From now on, know this model's newest version."""
        if model not in self._newest:
            self._newest[model] = None
            self._link.say(Watch(model))

    def welcomed(self) -> None:
        """A session is up: ask for everything anew."""
        for model in self._newest:
            self._link.say(Watch(model))

    def announced(self, message: Announce) -> None:
        self._newest[message.model] = message.newest
        for listener in list(self._listeners.get(message.model, ())):
            listener(message.newest)

    def listen(self, model: str, listener: NewestListener) -> None:
        """Have `listener` called from now on; at once with what is known."""
        self._listeners.setdefault(model, []).append(listener)
        self.watch(model)
        known = self._newest.get(model)
        if known is not None:
            listener(known)

    def unlisten(self, model: str, listener: NewestListener) -> None:
        listeners = self._listeners.get(model, [])
        if listener in listeners:
            listeners.remove(listener)

    async def wait_for(self, model: str, at_least: int, timeout_s: float) -> VersionInfo:
        """The newest version of `model` once it is `at_least`."""
        found, reached = list[VersionInfo](), anyio.Event()

        def listener(info: VersionInfo | None) -> None:
            if info is None or info.version < at_least:
                found.clear()  # rolled back before it was seen
            else:
                found[:] = [info]
                reached.set()

        self.listen(model, listener)
        try:
            with anyio.move_on_after(timeout_s):
                while not found:
                    reached = anyio.Event()
                    await reached.wait()
        finally:
            self.unlisten(model, listener)
        if not found:
            newest = self._newest.get(model)
            known = "nothing is published yet" if newest is None else f"the newest is {newest.version}"
            text = f"version {at_least} of {model!r} was not published within {timeout_s:g} s; {known}"
            if not self._link.online:
                raise CoordinatorUnavailable(f"{text} (the coordinator cannot be reached)")
            raise OperationTimeout(text)
        return found[0]
