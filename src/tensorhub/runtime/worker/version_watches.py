"""Each watched model's newest version, as the coordinator announces it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import anyio

from tensorhub.errors import LeaseLost, OperationTimeout, StateError, unreachable
from tensorhub.logs import get_logger
from tensorhub.messages import WATCHES_MAX, Announce, Unwatch
from tensorhub.runtime.worker.coordinator_client import MessageSink
from tensorhub.types import VersionInfo
from tensorhub.worker.newest_told import NewestTold

log = get_logger("tensorhub.worker")

NewestListener = Callable[[VersionInfo | None], None]
"""Called in the library's loop with each newest version; after a rollback with an older one than
before, or None.
"""

T = TypeVar("T")
LossListener = Callable[[LeaseLost], None]
"""Called in the library's loop when the coordinator has lost its state: what is newest begins
anew.
"""


# models without a version and without a listener that are watched on; the oldest are dropped first
IDLE_NAMES_MAX = 1024
NO_NEWEST = (
    "nothing is published under this name yet, or no worker holds what a rollback has made the "
    "newest"
)


# how the coordinator has come back
NEW_CLUSTER = "without its state, as a new cluster"
OLDER_COPY = "on an older copy of its state"


class VersionWatches:
    """`newest`, `watches`, `check_room` and `report_loss` are for any thread, the rest for the
    library's loop.
    """

    def __init__(self, link: MessageSink) -> None:
        self._link = link
        self._told = NewestTold()
        self._newest: dict[str, VersionInfo | None] = {}  # of the watched models
        # watched models without a version and without listeners, IDLE_NAMES_MAX at most
        self._idle: dict[str, None] = {}
        self._listeners: dict[str, list[NewestListener]] = {}  # no list is empty; so below
        self._loss_listeners: dict[str, list[LossListener]] = {}
        self._heard_of: set[str] = set()  # models of which this worker was told a version otherwise
        # watched models of which there is no version; whether the log says so
        self._unpublished: dict[str, bool] = {}
        self._patient: set[NewestListener] = set()  # that wait for the first version on purpose
        # models whose history is lost, of which no caller that asked was told yet, and how
        self._lost: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<VersionWatches of {len(self._newest)} models>"

    def newest(self, model: str) -> VersionInfo | None:
        """The last known newest version."""
        return self._newest.get(model)

    def watches(self, model: str) -> bool:
        """Whether this model's newest version is kept known."""
        return model in self._newest

    def listeners(self, model: str) -> int:
        """How many hear of it."""
        return len(self._listeners.get(model, ()))

    def check_room(self, model: str) -> None:
        """Raise StateError if this would be one model too many to follow. (The coordinator bears
        twice as many.)
        """
        if model not in self._newest and len(self._newest) >= WATCHES_MAX:
            raise StateError(
                f"{model!r}: this hub follows {WATCHES_MAX} models already (WATCHES_MAX); use "
                f"another hub"
            )

    def watch(self, model: str) -> None:
        """From now on, know this model's newest version."""
        if model not in self._newest:
            self._newest[model] = None
            self._link.say(self._told.watch(model))
            self._rest(model)

    def _rest(self, model: str) -> None:
        """Keep watching a name without a listener and without a version only while it is among the
        newest IDLE_NAMES_MAX: such names may be unused.
        """
        if model in self._listeners or self._newest.get(model) is not None:
            return
        self._idle[model] = None
        if len(self._idle) > IDLE_NAMES_MAX:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._newest[oldest]
            self._unpublished.pop(oldest, None)
            self._told.forget(oldest)
            self._link.say(Unwatch(oldest))

    def welcomed(self) -> None:
        """A session is up: ask for everything anew."""
        for model in self._newest:
            self._link.say(self._told.watch(model))

    def heard_of(self, model: str) -> None:
        """Note that a caller was told of a version: if the version is lost, the next caller that
        asks is told of the loss.
        """
        self._heard_of.add(model)

    def state_lost(self, models: Iterable[str]) -> None:
        """The coordinator has lost its state: forget the newest versions. `models`: in use here."""
        known = {model for model, newest in self._newest.items() if newest is not None}
        self._lost |= dict.fromkeys(known | self._heard_of | set(models), NEW_CLUSTER)
        self._heard_of.clear()
        self._told.forget()
        self._newest = dict.fromkeys(self._newest)
        self._unpublished.clear()
        for model in list(self._loss_listeners):
            self._tell_loss(model, NEW_CLUSTER)

    def _tell_loss(self, model: str, how: str) -> None:
        for listener in list(self._loss_listeners.get(model, ())):
            listener(_lost(model, how))

    def report_loss(self, model: str) -> None:
        """Raise LeaseLost, once, if this model's history was lost with its coordinator's state
        (G3).
        """
        how = self._lost.pop(model, "")
        if how:
            raise _lost(model, how)

    def announced(self, message: Announce) -> None:
        if message.model not in self._newest:
            return  # it was said before the coordinator heard that this name is watched no more
        if self._told.goes_back(message):
            self._lost[message.model] = OLDER_COPY
            self._tell_loss(message.model, OLDER_COPY)
        self._newest[message.model] = message.newest
        if message.newest is not None:
            self._idle.pop(message.model, None)
            self._unpublished.pop(message.model, None)
        else:
            self._unpublished.setdefault(message.model, False)
            self._tell_waiting(message.model)
        for listener in list(self._listeners.get(message.model, ())):
            listener(message.newest)

    def listen(
        self,
        model: str,
        listener: NewestListener,
        lost: LossListener | None = None,
        *,
        on_purpose: bool = False,
    ) -> None:
        """Call `listener` with each newest version from now on; at once with the known one.
        `on_purpose`: it is no surprise that there is none yet.
        """
        self.watch(model)
        self._listeners.setdefault(model, []).append(listener)
        if lost is not None:
            self._loss_listeners.setdefault(model, []).append(lost)
        if on_purpose:
            self._patient.add(listener)
        self._idle.pop(model, None)
        known = self._newest.get(model)
        if known is not None:
            listener(known)
        self._tell_waiting(model)

    def _tell_waiting(self, model: str) -> None:
        """Warn, once, if a caller waits for a version of a name that has none, perhaps a mistyped
        name.
        """
        waits = any(each not in self._patient for each in self._listeners.get(model, ()))
        if waits and not self._unpublished.get(model, True):
            self._unpublished[model] = True
            hint = f"{NO_NEWEST}: it waits for the next version. Is the name right?"
            log.warning("call_waits", model=model, call="wait_for or watch", hint=hint)

    def unlisten(
        self, model: str, listener: NewestListener, lost: LossListener | None = None
    ) -> None:
        _remove(self._listeners, model, listener)
        self._patient.discard(listener)
        if lost is not None:
            _remove(self._loss_listeners, model, lost)
        self._rest(model)

    async def wait_for(self, model: str, at_least: int, timeout_s: float) -> VersionInfo:
        """The newest version of `model` once it is `at_least`. Raises StateError for one model too
        many.
        """
        self.report_loss(model)
        self.check_room(model)
        found, losses, reached = list[VersionInfo](), list[LeaseLost](), anyio.Event()

        def listener(info: VersionInfo | None) -> None:
            if info is None or info.version < at_least:
                found.clear()  # rolled back before it was seen
            else:
                found[:] = [info]
                reached.set()

        def lost(error: LeaseLost) -> None:
            losses.append(error)
            reached.set()

        self.listen(model, listener, lost)
        try:
            with anyio.move_on_after(timeout_s):
                while not found and not losses:
                    reached = anyio.Event()
                    await reached.wait()
        finally:
            self.unlisten(model, listener, lost)
        if losses:
            raise losses[0]
        if not found:
            newest = self._newest.get(model)
            known = NO_NEWEST if newest is None else f"the newest is {newest.version}"
            text = (
                f"version {at_least} of {model!r} was not published within {timeout_s:g} s; {known}"
            )
            if not self._link.online:
                raise unreachable(f"{text}; the coordinator cannot be reached", self._link.fault)
            raise OperationTimeout(text)
        return found[0]


def _remove(listeners: dict[str, list[T]], model: str, listener: T) -> None:
    mine = listeners.get(model, [])
    if listener in mine:
        mine.remove(listener)
        if not mine:
            del listeners[model]


def _lost(model: str, how: str) -> LeaseLost:
    return LeaseLost(
        f"{model!r}: the coordinator has come back {how}: the versions that were known before "
        "are not its, and its newest one may be older. Ask again for what it has (a state_dir "
        "keeps a coordinator's state)"
    )
