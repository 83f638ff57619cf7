"""The trainer's side of a fleet with one version on all engines, or on none: see `one_version`.

    fleet = OneVersion(hub, "actor", servers=[engine_url, ...])
    info = weights.publish(version)
    fleet.update(info)                # all engines have it, or StateError: all have the old one

Responsible for carrying the steps out. Not responsible for their order (`one_version.steps`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from tensorhub import sync
from tensorhub.errors import (
    InvalidValue,
    StateError,
    TensorHubError,
    VersionConflict,
    some,
    text_of,
)
from tensorhub.integrations.announced import SEATS, announcements
from tensorhub.integrations.fleet import Calls, FleetReport
from tensorhub.integrations.given import check_info, texts
from tensorhub.integrations.one_version import (
    ATTEMPTS,
    COMMIT,
    VERSION_MAX,
    Answer,
    Decide,
    Fence,
    Flip,
    Settle,
    Stage,
    Step,
    Steps,
    steps,
    version_of,
)
from tensorhub.integrations.one_version_http import Remote
from tensorhub.integrations.one_version_records import RecordLog, check_lease
from tensorhub.logs import get_logger
from tensorhub.runtime.threads import begin
from tensorhub.types import VersionInfo

log = get_logger(__name__)
CLOCK_MARGIN = 1.1  # how much faster this machine's clock may run than an engine's
LOOKS = 2  # of the coordinator's list without an engine, until that is gone


class _Calls(Calls[Remote]):
    """A process that ends waits for none: engines settle it by the records."""

    def _begin(self, call: Callable[[Remote], object], engine: Remote) -> Future[object]:
        return begin("tensorhub-fleet", call, engine)


class OneVersion:
    """Updates a fleet with one version on all engines, or on none.

    `servers`: the URLs of all engines that serve `model`: one that is not here is not kept from
    serving another version. None: all that the coordinator knows, at each update. `lease_s`: as the
    engines have it; below the coordinator's `Options.lease_s`. `timeout_s`: how long each step
    waits for engines. `attempts_max`: of one update; each one leaves out what has failed.

    Serve the coordinator with a `state_dir`. Without one, its restart leaves engines with nothing
    to serve until the next update. Before the first commit with a coordinator an update waits until
    this object is a little older than `lease_s`: an engine may still serve what was committed
    before.

    Raises StateError: another trainer updates the engines of this model. InvalidValue: a lease
    that is not below the coordinator's.
    """

    def __init__(
        self,
        hub: sync.Hub,
        model: str,
        servers: Sequence[str] | None = None,
        *,
        token: str | None = None,
        lease_s: float = 3.0,
        timeout_s: float = 300.0,
        attempts_max: int = 4,
        failures_max: int = 2,
    ) -> None:
        urls = () if servers is None else texts("servers", servers, "http://HOST:PORT")
        check_lease(hub, lease_s)
        self._list = partial(announcements, hub, model, SEATS)
        self._finds = servers is None
        self._looks: dict[str, int] = {}  # at which a listed engine was not there, in a row
        self._is_closed = False
        terms = {"model": model, "lease_s": lease_s}
        self._make = lambda url: Remote(url, token, timeout_s, terms)
        self._called: Mapping[str, str] = {}  # engines by their URLs, where they have another name
        self._seats = Counter[str]()  # engines at each URL, for which this update waits
        self._listed: Future[list[tuple[str, str]]] | None = None  # likewise, after the fence
        self._model, self._lease_s, self._attempts_max = model, lease_s, attempts_max
        self._calls = _Calls(timeout_s=timeout_s, failures_max=failures_max)
        self._calls.follow(urls, self._make)
        self._log = RecordLog(hub, model, timeout_s)
        self._leading = self._log.lead()
        self._next = 0
        self._history, self._alone_at = self._log.history, self._when_alone()
        self._fenced = -1
        # engines that the coordinator lists no more, or that were started anew
        self._gone: Set[str] = frozenset()
        self._errors: dict[str, BaseException] = {}
        self._voted_at = 0.0
        self._current: int | None = None  # the version that was committed last
        self.flip_s = 0.0  # of the last update: from the last vote until all have settled

    def update(self, info: VersionInfo) -> FleetReport:
        """Bring a version to all engines that can take it. The others serve nothing until they have
        taken it, which they do by themselves once they can: `failed` and `excluded` name those that
        the coordinator lists. An engine that has not joined serves outside of the fleet, and is in
        no report: compare `done` with the engines that you have started.

        An engine that does not answer is waited for until the coordinator lists it no more
        (`Options.lease_s` after it stood still), `timeout_s` at most. Then, and where an engine is
        dead, the others wait for `lease_s`.

        StateError: no engine has it, and those that serve go on with the version before. Each
        engine's error is a note, and the first one `__cause__`: a ManifestMismatch says which
        tensors or dtypes to publish otherwise. Repeat the update where `retryable` says so.

        VersionConflict (older than what engines serve), InvalidValue (a number of 2**51 or more, or
        an engine with another model or `lease_s`): engines go on with the version before. Correct
        what it names.

        LeaseLost: the coordinator has lost its state. Engines serve nothing until the next update,
        of any number.

        Whatever `Hub.describe` and `Weights.publish` raise: engines settle it by the records, so
        all serve one version, or none. Update again, with this version or a newer one.
        """
        check_info(info)
        if self._is_closed:
            raise StateError("this OneVersion was closed: make another one to update its engines")
        first = self._first_attempt(info)
        self._errors = {}
        self._log.prepare()
        before = self._calls.names
        listed = self._list()
        if self._finds:
            self._called = dict(listed)
            self._calls.follow(self._called, self._make)
        self._look(listed)
        names = self._calls.names
        self._seats = Counter(url for url, _ in listed)
        self._gone = before - names | {url for url in names if self._seats[url] > 1}
        updated = self._carry_out(steps(first, sorted(names), self._attempts_max))
        if not updated:
            raise self._refusal(info, names) from next(iter(self._errors.values()), None)
        left = {self._name(url): each for url, each in self._errors.items() if url not in updated}
        done, behind = (tuple(sorted(map(self._name, urls))) for urls in (updated, names - updated))
        return FleetReport(done, left, behind)

    def _refusal(self, info: VersionInfo, names: Set[str]) -> StateError:
        reasons = [f"{self._name(url)}: {text_of(each)}" for url, each in self._errors.items()]
        if not names:
            text = (
                f"there is no engine of {info.model!r}: start one with this coordinator, and this "
                f"model"
            )
        else:
            text = f"no engine has taken version {info.version} of {info.model!r}; "
            text += (
                "none was committed before, so none is served"
                if self._current is None
                else f"engines that serve go on with version {self._current}"
            )
        if reasons:
            text += f" ({some(reasons, '; ', most=1)})"
        may_pass = [getattr(each, "retryable", True) for each in self._errors.values()]
        error = StateError(text, retryable=any(may_pass) or not may_pass)
        for reason in reasons:
            error.add_note(reason)
        return error

    def _name(self, url: str) -> str:
        """Two engines that are called alike have their URLs."""
        name = self._called.get(url, url)
        return name if list(self._called.values()).count(name) < 2 else url

    def _carry_out(self, its: Steps) -> frozenset[str]:
        try:
            step = next(its)
            while True:
                self._next = step.attempt + 1
                step = its.send(self._do(step))
        except StopIteration as end:
            updated: frozenset[str] = end.value
            return updated

    def _first_attempt(self, info: VersionInfo) -> int:
        if info.model != self._model:
            raise InvalidValue(
                f"version {info.version} is one of {info.model!r}: these engines serve "
                f"{self._model!r}"
            )
        if info.version >= VERSION_MAX:
            raise InvalidValue(f"version {info.version}: one version for all takes up to 2**51 - 1")
        records = self._log.read()
        if self._history != self._log.history:
            self._history, self._alone_at, self._next = self._log.history, self._when_alone(), 0
            self._fenced = -1
        if records.fence is not None:  # of a trainer that is gone
            self._log.decide(records.fence, False)
            records = self._log.read()
        for number, nbytes in records.known.items():
            if number % 2 and nbytes == COMMIT:
                self._log.note(version_of(number // 2))
        current = self._current = records.current
        if current is not None:
            self._alone_at = -math.inf
        if current is not None and info.version < current:
            raise VersionConflict(
                f"version {info.version} of {info.model!r} is older than the one that the engines "
                f"serve, {current}: publish these weights with a newer number"
            )
        first = max(self._next, info.version * ATTEMPTS, records.newest // 2 + 2)
        if version_of(first + self._attempts_max - 1) != info.version:
            raise VersionConflict(
                f"version {info.version} of {info.model!r} has no attempts left, or a newer one "
                f"was attempted, {version_of(first)}: publish these weights with a newer number"
            )
        return first

    def _do(self, step: Step) -> Answer:
        attempt = step.attempt
        if isinstance(step, Stage):
            if attempt - 1 != self._fenced and not self._log.begin(attempt):
                raise StateError(
                    f"another trainer updates the engines of {self._model!r}", retryable=True
                )
            voted = self._ask(step, lambda engine: engine.stage(attempt))
            self._voted_at = time.monotonic()
            for error in self._errors.values():
                if isinstance(error, InvalidValue):  # perhaps it has a longer lease
                    raise error
            return voted
        if isinstance(step, Fence):
            self._wait_until(self._alone_at)
            if not self._log.fence(attempt):
                return False
            self._fenced = attempt
            if self._finds:
                self._listed = begin("tensorhub-fleet-list", self._list)
            if step.waits or self._gone:
                self._wait_for_leases()
            return True
        if isinstance(step, Flip):
            flipped = self._ask(step, lambda engine: engine.flip(attempt))
            if self._listed and Counter(url for url, _ in self._listed.result()) - self._seats:
                self._wait_for_leases()  # of an engine that began to serve before the fence
            return flipped
        if isinstance(step, Decide):
            return self._log.decide(attempt, step.is_commit)
        is_commit = step.is_commit
        self._ask(step, lambda engine: engine.settle(attempt, is_commit))
        self.flip_s = time.monotonic() - self._voted_at
        if is_commit:
            self._log.note(version_of(attempt))
        log.info("fleet_settled", attempt=attempt, committed=is_commit, seconds=self.flip_s)
        return True

    def _wait_for_leases(self) -> None:
        """An engine that was not asked has then read the fence, or has no lease."""
        self._wait_until(self._when_alone())

    def _when_alone(self) -> float:
        """Engines that have read no records since now have no lease then."""
        return time.monotonic() + self._lease_s * CLOCK_MARGIN

    def _wait_until(self, at: float) -> None:
        if (left := at - time.monotonic()) > 0:
            time.sleep(left)
            self._voted_at = time.monotonic()

    def _ask(self, step: Stage | Flip | Settle, call: Callable[[Remote], None]) -> frozenset[str]:
        report = self._calls.call(call, step.engines, self._find_gone)
        self._errors |= report.failed
        return frozenset(report.done)

    def _find_gone(self) -> Set[str]:
        """Engines that the coordinator lists no more: also those whose machine stands still. One
        that is listed again at the next look has only come back after the coordinator.
        """
        with suppress(TensorHubError):
            self._look(self._list())
        return {name for name, looks in self._looks.items() if looks >= LOOKS}

    def _look(self, listed: Collection[tuple[str, str]]) -> None:
        missed = {name: self._looks[name] + 1 for name in self._looks.keys() & self._calls.names}
        self._looks = missed | {url: 0 for url, _ in listed}

    def close(self) -> None:
        """Update nothing any more. The engines keep what they serve."""
        self._is_closed = True
        self._calls.close()
        self._leading.close()
