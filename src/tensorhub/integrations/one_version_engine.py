"""An engine in a loop of your own, one of a fleet with one version: see `one_version`.

It has two sets of tensors: the one that is in place, and the one that the next version is staged
in. Both are replicas that other engines read.

    engine = Engine(hub, "actor", module, token=token)
    engine.url                        # for the trainer's OneVersion(servers=[...])
    with engine.use() as version:     # StateError: no version may be served now
        generate(module)
    engine.close()

Responsible for what the engine does when the trainer calls, and for its lease. Not responsible for
the states (`one_version`), nor for HTTP (`one_version_http`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tensorhub import shared_empty_like, sync
from tensorhub.errors import LeaseLost, OperationTimeout, StateError, text_of
from tensorhub.integrations.announced import SEATS, announce
from tensorhub.integrations.one_version import EngineState, Records, Seat, version_of
from tensorhub.integrations.one_version_http import Listener
from tensorhub.integrations.one_version_records import RecordLog, check_lease
from tensorhub.logs import get_logger
from tensorhub.runtime.clock import boot_time

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors = Mapping[str, "torch.Tensor"]
log = get_logger(__name__)
now_s = boot_time  # of leases: an engine that wakes must not serve what the others have left


@runtime_checkable
class Slots(Protocol):
    """Two slots, 0 and 1, that hold a version each, which other engines read."""

    def holding(self, version: int) -> int | None:
        """The slot that has the version."""

    def fill(self, slot: int, version: int) -> None:
        """Fetch the version into the slot, which is not in place; the engine may go on."""

    def put(self, slot: int) -> None:
        """Put what the slot holds in place, while nothing uses the weights; quick, and callable
        with the same slot again.
        """

    def close(self) -> None: ...


def fill(weights: sync.Weights, version: int, timeout_s: float) -> None:
    """Have a slot's memory hold a version, whatever it has held."""
    try:
        weights.update(version, timeout=timeout_s)
    except LeaseLost:  # it says so once; nothing relies on what is lost
        weights.update(version, timeout=timeout_s)


class TensorSlots:
    """Of tensors in a loop of your own: see `Engine`."""

    def __init__(
        self,
        hub: sync.Hub,
        model: str,
        tensors: nn.Module | Tensors,
        put: Callable[[Tensors], object] | None,
        timeout_s: float,
    ) -> None:
        self._put, first = _parts(tensors, put)
        self._timeout_s = timeout_s
        self._tensors: list[Tensors] = [first, shared_empty_like(first)]
        self._weights = [hub.register(model, each, spot=True) for each in self._tensors]

    def holding(self, version: int) -> int | None:
        return next((n for n in (0, 1) if self._weights[n].version == version), None)

    def fill(self, slot: int, version: int) -> None:
        fill(self._weights[slot], version, self._timeout_s)

    def put(self, slot: int) -> None:
        self._put(self._tensors[slot])

    def close(self) -> None:
        for each in self._weights:
            each.close(abandon=True)


class Engine:
    """One engine of a fleet with one version.

    `tensors`: the engine's, by their published names. `put`: called with tensors to put in their
    place, while nothing uses them; quick, and callable with the same ones again. Of a module it
    need not be given: then its parameters and buffers point at them, and nothing is copied.
    `Slots` do both in their own way.

    `host`, `port`: where the trainer's calls are taken. `token`: what they must bear; without one,
    `host` has to be this machine alone. `lease_s`: the engine serves nothing once it has not read
    the records for so long; a shorter loss of the coordinator stops nothing. `decide_s`: how long a
    flipped engine waits for the trainer before it records "abort". `timeout_s`: of staging.
    `called`: what the trainer's reports call it, where the coordinator lists it; "": by its URL.

    Raises StateError (a mapping without `put`, a port in use), InvalidValue (a host that other
    machines reach, without a token, or a lease that is not below the coordinator's), and as
    `Hub.register`.
    """

    def __init__(
        self,
        hub: sync.Hub,
        model: str,
        tensors: nn.Module | Tensors | Slots,
        *,
        put: Callable[[Tensors], object] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        lease_s: float = 3.0,
        decide_s: float = 10.0,
        timeout_s: float = 300.0,
        called: str = "",
    ) -> None:
        check_lease(hub, lease_s)
        self._log = RecordLog(hub, model, min(timeout_s, lease_s))
        self._slots: Slots = (
            tensors
            if isinstance(tensors, Slots)
            else TensorSlots(hub, model, tensors, put, timeout_s)
        )
        self._current = self._staged = 0
        self._lock = threading.Condition()  # of all above, and of the seat
        self._filling = threading.Lock()  # of the slot that is not in place
        self._uses = 0
        self._fault: Exception | None = None  # of the flip
        self._fence_seen: tuple[int, float] | None = None
        self.seat = Seat(lease_s, decide_s)
        self._history = self._log.history  # of which the seat is
        self.terms: Mapping[str, Any] = {"model": model, "lease_s": lease_s}
        self._closed = threading.Event()
        self._poll_thread = threading.Thread(
            target=self._poll_all, name="tensorhub-lease", daemon=True
        )
        with ExitStack() as undo:
            undo.callback(self._slots.close)
            self._listener = Listener(self, host, port, token)
            undo.callback(self._listener.close)
            self.url = self._listener.url
            # before it has a lease: a trainer that does not find it waits for none
            self._announced = announce(hub, model, SEATS, self.url, called=called)
            undo.pop_all()
        self._poll_thread.start()

    # -- what the engine's own loop calls

    @property
    def version(self) -> int | None:
        """The version that may be served at this moment; None: none."""
        with self._lock:
            return self._served()

    def _served(self) -> int | None:
        return None if self._closed.is_set() else self.seat.serves(now_s())

    @contextmanager
    def use(self, wait_s: float = 0.0) -> Iterator[int]:
        """The tensors in place stay, and are this version's. Keep it short: a flip waits for it.

        Raises StateError: no version may be served now, nor in `wait_s`; ask again. Or, when the
        use ends: it has outlasted the lease, as where this process stood still, and others may have
        served a newer version meanwhile; discard what was computed.
        """
        with self._use(wait_s) as version:
            yield version
            with self._lock:
                # where a flip waits for this use, the lease goes on
                is_over = self._closed.is_set() or now_s() >= self.seat.lease_until
                if is_over or self.seat.version != version:
                    raise StateError(
                        f"version {version} was in use for longer than it might be served: discard "
                        f"what was computed",
                        retryable=True,
                    )

    @contextmanager
    def _use(self, wait_s: float) -> Iterator[int]:
        """The same, also where it ends too late."""
        with self._lock:
            version = self._wait(wait_s)
            if version is None:
                raise StateError(
                    f"no version may be served now: the engine is {self.seat.state} with "
                    f"{self.seat.version}, or waits for the coordinator",
                    retryable=True,
                )
            self._uses += 1
        try:
            yield version
        finally:
            with self._lock:
                self._uses -= 1
                self._lock.notify_all()

    def wait_until_served(self, timeout_s: float) -> int:
        """Return the version once one may be served: an engine that joins late takes the newest
        committed one from its peers before it accepts requests. Raises OperationTimeout.
        """
        with self._lock:
            version = self._wait(timeout_s)
        if version is None:
            raise OperationTimeout(
                f"no version was committed, or could be read, in {timeout_s:.0f} s"
            )
        return version

    def _wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while (version := self._served()) is None:
            if not self._lock.wait(max(0.0, deadline - time.monotonic())):
                break
        return version

    def start(self, timeout_s: float) -> int | None:
        """Wait until the version that was committed is served, if one was. Raises OperationTimeout,
        and as `Hub.describe`.
        """
        return None if self._log.read().current is None else self.wait_until_served(timeout_s)

    def lost(self) -> None:
        """The weights in place are gone: serve none until they were put in place anew."""
        with self._lock:
            self.seat.version = None

    def close(self) -> None:
        """Serve nothing, and leave the cluster."""
        self._closed.set()  # first: another engine may be made at this URL from now on
        self._listener.close()
        self._poll_thread.join()
        self._announced.close()
        self._slots.close()

    @contextmanager
    def _seated(self) -> Iterator[None]:
        """With the lock, and a seat of the history that the coordinator has at this moment."""
        with self._lock:
            if self._history != self._log.current_history:
                self._history, self._fence_seen = self._log.current_history, None
                self.seat.forget(now_s())
                self._lock.notify_all()
                log.warning("engine_history_lost", engine=self.url)
            yield

    # -- what the trainer calls; each may be repeated

    def stage(self, attempt: int) -> None:
        """Vote: the attempt's version is here, beside the one in place."""
        with self._filling:
            with self._seated():
                self.seat.begin(attempt, now_s())
            found = self._slots.holding(version_of(attempt))
            slot = 1 - self._current if found is None else found
            if found is None:
                self._slots.fill(slot, version_of(attempt))
            with self._seated():
                self.seat.vote(attempt, now_s())
                self._staged = slot

    def flip(self, attempt: int) -> None:
        """Stop serving, and put the staged version in place."""
        with self._seated():
            if self.seat.flip(attempt, now_s()):
                self._fault = OperationTimeout("the weights are still being used")
                if self._lock.wait_for(
                    lambda: not (self._uses and self._is_flipped(attempt)), self.seat.decide_s
                ):
                    if not self._is_flipped(attempt):  # the weights in place are served again
                        raise StateError(
                            f"attempt {attempt} was decided while the weights were being used",
                            retryable=True,
                        )
                    self._fault = self._try_put(self._staged)
            if self._fault is not None:
                raise self._fault

    def _is_flipped(self, attempt: int) -> bool:
        return attempt == self.seat.attempt and self.seat.state is EngineState.FLIPPED

    def settle(self, attempt: int, is_commit: bool) -> None:
        """Serve again: the staged version, or the old one."""
        with self._seated():
            self._settle(attempt, is_commit)

    def _settle(self, attempt: int, is_commit: bool) -> None:
        is_needed = self._fault is not None if is_commit else self.seat.version is not None
        if self._is_flipped(attempt) and is_needed:
            # a commit: the others have taken the version in a later attempt
            if is_commit and self._uses:
                raise StateError("the weights are still being used", retryable=True)
            fault = self._try_put(self._staged if is_commit else self._current)
            if fault is not None:
                self.seat.version = None  # what it would put there may be lost: it takes it anew
                self.seat.settle(attempt, False, now_s())
                raise fault
        if self.seat.settle(attempt, is_commit, now_s()):
            self._current = self._staged
        self._lock.notify_all()

    def _try_put(self, slot: int) -> Exception | None:
        try:
            self._slots.put(slot)
        except Exception as error:
            log.error("engine_not_flipped", reason=text_of(error))
            return error
        return None

    # -- the lease

    def _poll_all(self) -> None:
        while not self._closed.is_set():
            try:
                self._poll()
            except Exception as error:
                log.warning("lease_not_renewed", reason=text_of(error))
            self._closed.wait(self.seat.lease_s / 4)

    def _poll(self) -> None:
        self._announced.renew(self.seat.lease_s)
        with self._seated():
            pass
        asked_at = now_s()
        records = self._log.read()
        overdue = self._overdue(records)
        if overdue is not None:
            self._log.decide(overdue, False)
            asked_at, records = now_s(), self._log.read()
        with self._seated():
            if self.seat.is_outdated(asked_at) or not self._announced.is_known:
                return
            if self.seat.state is EngineState.FLIPPED:
                decision = records.decision(self.seat.attempt)
                if decision is not None:
                    self._settle(self.seat.attempt, decision)
            self.seat.heard(records, asked_at)
            self._lock.notify_all()
            is_behind = self.seat.is_behind(records)
        if is_behind and records.current is not None:
            self._catch_up(records.current)

    def _overdue(self, records: Records) -> int | None:
        """An attempt that has waited for its trainer long enough."""
        now, fence = now_s(), records.fence
        if fence is None:
            self._fence_seen = None
        elif self._fence_seen is None or self._fence_seen[0] != fence:
            self._fence_seen = fence, now
        elif now >= self._fence_seen[1] + self.seat.decide_s:
            return fence
        with self._lock:
            is_overdue = self.seat.is_overdue(now)
            undecided = records.decision(self.seat.attempt) is None
            return self.seat.attempt if is_overdue and undecided else None

    def _catch_up(self, version: int) -> None:
        """Take the committed version from peers, or the trainer, and serve it."""
        if not self._filling.acquire(blocking=False):
            return  # it is being staged
        try:
            found = self._slots.holding(version)
            with self._lock:
                if self.seat.version is not None:
                    return  # it was updated meanwhile
                # otherwise the one in place is free: it serves nothing
                slot = self._current if found is None else found
                if not self._lock.wait_for(lambda: not self._uses, self.seat.lease_s):
                    return
            if found is None:
                self._slots.fill(slot, version)
            asked_at = now_s()
            records = self._log.read()
            with self._seated():
                is_in_use = self.seat.state is EngineState.FLIPPED or self._uses
                is_lost = self._slots.holding(version) is None
                if is_in_use or is_lost or self.seat.is_outdated(asked_at):
                    return
                if fault := self._try_put(slot):
                    raise fault
                self._current = slot
                self.seat.caught_up(version, records, asked_at)
                self._lock.notify_all()
        except Exception as error:
            log.warning("engine_not_updated", engine=self.url, reason=text_of(error))
        finally:
            self._filling.release()


def _parts(
    tensors: nn.Module | Tensors, put: Callable[[Tensors], object] | None
) -> tuple[Callable[[Tensors], object], Tensors]:
    if isinstance(tensors, Mapping):
        if put is None:
            raise StateError("tensors= is a mapping: give put=, which puts others in their place")
        return put, tensors
    import torch

    named = {
        name: each
        for name, each in tensors.state_dict(keep_vars=True).items()
        if isinstance(each, torch.Tensor)
    }

    def point(others: Tensors) -> None:
        for name, each in named.items():
            each.data = others[name]

    return put or point, {name: each.data for name, each in named.items()}
