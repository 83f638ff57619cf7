"""Several engines that take a trainer's versions at the same time.

Each engine is paused, updated and resumed in a thread of its own, so a dead or slow engine leaves
no other one paused. After `failures_max` failures in a row an engine is *excluded*: later updates
try it, and wait for it only where all engines are excluded. The first success makes it a member
again.

Responsible for which engines are waited for. Not responsible for one engine's update
(`vllm_session`), nor for one version on all engines at any time (`one_version`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tensorhub.errors import InvalidValue, OperationTimeout, some, text_of
from tensorhub.integrations.given import check_info
from tensorhub.logs import get_logger
from tensorhub.types import VersionInfo

log = get_logger(__name__)
ENGINES_MAX = 1024  # that are called at the same time
LOOK_S = 1.0  # how often it is looked which engines are gone


class Named(Protocol):
    """An engine. Each call to it has a deadline of its own, and raises what has failed."""

    @property
    def name(self) -> str: ...


class Engine(Named, Protocol):
    def get_ready(self, version: int | None = None) -> None:
        """Join the cluster; the engine goes on generating."""

    def update(self, info: VersionInfo) -> None:
        """Pause, take the version, resume."""

    def check(self, published: VersionInfo | None = None) -> None:
        """Compare the engine's weights with the version that it took last, or with this one, of a
        model that was published to be compared with.
        """


@dataclass(frozen=True)
class FleetReport:
    """What a call has come to, by engines' names. `excluded`: they were not waited for."""

    done: tuple[str, ...]
    failed: dict[str, BaseException]
    excluded: tuple[str, ...]


E = TypeVar("E", bound=Named)


@dataclass(eq=False)
class _Member(Generic[E]):
    engine: E
    running: Future[object] | None = None  # the last call, until its outcome was counted
    failures: int = 0  # in a row
    is_excluded: bool = False


class Calls(Generic[E]):
    """Calls to several engines. `timeout_s`: how long a call waits for all of them together.
    `failures_max`: see the module.
    """

    def __init__(
        self, engines: Sequence[E] = (), *, timeout_s: float = 300.0, failures_max: int = 2
    ) -> None:
        _check_once([engine.name for engine in engines])
        self._members = [_Member(engine) for engine in engines]
        self._left: list[_Member[E]] = []  # they are members no more, and a call goes on
        self._timeout_s, self._failures_max = timeout_s, failures_max
        self._threads = ThreadPoolExecutor(ENGINES_MAX, thread_name_prefix="tensorhub-fleet")

    @property
    def names(self) -> Set[str]:
        return frozenset(each.engine.name for each in self._members)

    def follow(self, names: Collection[str], make: Callable[[str], E]) -> None:
        """Have the engines with these names from now on, and no other ones; new ones are made. One
        that comes back while a call goes on there is the one that it was.
        """
        known = {each.engine.name: each for each in (*self._members, *self._left)}
        asked = [name.rstrip("/") for name in names]
        _check_once(asked)
        for name in sorted(self.names - set(asked)):
            log.warning("engine_not_listed", engine=name)
        self._members = [known.get(name) or _Member(make(name)) for name in asked]
        left = [each for name, each in known.items() if name not in asked]
        self._left = [each for each in left if each.running and not each.running.done()]

    def close(self) -> None:
        """Begin no call any more. The engines keep what they serve."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def call(
        self,
        call: Callable[[E], object],
        only: Set[str] | None = None,
        find_gone: Callable[[], Set[str]] | None = None,
    ) -> FleetReport:
        """Make a call to all engines, or to those with these names, at the same time. `find_gone`:
        asked once in `LOOK_S`; engines with the names that it returns are not waited for.
        """
        members = [each for each in self._members if only is None or each.engine.name in only]
        asked = []
        for each in members:
            if each.running is not None and each.running.done():  # it was not waited for
                late = each.running.exception()
                if late is not None:
                    log.warning("engine_not_updated", engine=each.engine.name, reason=text_of(late))
                self._count(each, late)
            if each.running is None:
                each.running = self._begin(call, each.engine)
                asked.append(each)
        waited_for = [each for each in members if not each.is_excluded] or members
        gone = self._wait(waited_for, find_gone)
        done, failed = [], dict[str, BaseException]()
        for each in members:
            error: BaseException | None
            if each.running is not None and each in asked and each.running.done():
                error = each.running.exception()
                self._count(each, error)
            elif each in waited_for:
                name = each.engine.name
                error = OperationTimeout(
                    f"{name} does not answer, and the coordinator does not list it any more: its "
                    f"process or machine stands still, or is gone"
                    if name in gone
                    else f"{name} was not done after {self._timeout_s:.0f} s"
                )
                self._count_failure(each)
            else:
                continue
            if error is None:
                done.append(each.engine.name)
            else:
                failed[each.engine.name] = error
        for name, error in failed.items():
            # without a success the caller raises all errors, with their lists
            reason = text_of(error) if done else type(error).__name__
            log.warning("engine_not_updated", engine=name, reason=reason)
        excluded = tuple(each.engine.name for each in members if each.is_excluded)
        return FleetReport(tuple(done), failed, excluded)

    def _begin(self, call: Callable[[E], object], engine: E) -> Future[object]:
        """In a thread for which a process waits at its end: an engine that it has paused would stay
        so.
        """
        return self._threads.submit(call, engine)

    def _wait(
        self, members: Iterable[_Member[E]], find_gone: Callable[[], Set[str]] | None
    ) -> Set[str]:
        """Wait for their calls. Returns the names that `find_gone` has returned last."""
        deadline, gone = time.monotonic() + self._timeout_s, frozenset[str]()
        while True:
            running = [each.running for each in members if each.engine.name not in gone]
            left = deadline - time.monotonic()
            late = wait(filter(None, running), left if find_gone is None else min(left, LOOK_S))[1]
            if not late or find_gone is None or time.monotonic() >= deadline:
                return gone
            gone = frozenset(find_gone())

    def _count(self, member: _Member[E], error: BaseException | None) -> None:
        member.running = None
        if error is not None:
            self._count_failure(member)
            return
        if member.is_excluded:
            log.info("engine_returned", engine=member.engine.name)
        member.failures, member.is_excluded = 0, False

    def _count_failure(self, member: _Member[E]) -> None:
        member.failures += 1
        if member.failures >= self._failures_max and not member.is_excluded:
            member.is_excluded = True
            log.warning("engine_excluded", engine=member.engine.name, failures=member.failures)


def _check_once(names: Sequence[str]) -> None:
    """Two updates of one engine at the same time would resume it while it is written."""
    if twice := [
        name for name, count in Counter(each.rstrip("/") for each in names).items() if count > 1
    ]:
        raise InvalidValue(f"{some(twice)}: give each engine once")


class Fleet(Calls[Engine]):
    """Engines that are updated one by one, and at the same time. `find`: asked before each update
    for the names of all engines, of which `make` makes those that are new (`announced`).
    """

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        find: Callable[[], Collection[str]] | None = None,
        make: Callable[[str], Engine] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(engines, **settings)
        self._find, self._make = find, make

    def call(
        self,
        call: Callable[[Engine], object],
        only: Set[str] | None = None,
        find_gone: Callable[[], Set[str]] | None = None,
    ) -> FleetReport:
        if self._find is not None and self._make is not None:
            self.follow(self._find(), self._make)
        return super().call(call, only, find_gone)

    def join(self) -> FleetReport:
        """Have all engines join the cluster. Raises as `update`."""
        return self._raising(self.call(lambda engine: engine.get_ready()))

    def update(self, info: VersionInfo) -> FleetReport:
        """Have all engines take a version.

        Raises if no engine has taken it: the first engine's error, with a note for each other one.
        OperationTimeout is such an error where `timeout_s` is over: that engine's call goes on, and
        no other one is begun there before it has ended.
        """
        check_info(info)
        return self._raising(self.call(lambda engine: engine.update(info)))

    @staticmethod
    def _raising(report: FleetReport) -> FleetReport:
        if report.failed and not report.done:
            raise together(report.failed)
        return report

    def check(self, published: VersionInfo | None = None) -> None:
        """Have all engines compare their weights. Raises the first error, with a note for each
        other one.
        """
        if failed := self.call(lambda engine: engine.check(published)).failed:
            raise together(failed)


def together(failed: dict[str, BaseException]) -> BaseException:
    first, *others = failed.items()
    for name, other in others:
        first[1].add_note(f"{name}: {text_of(other)}")
    return first[1]
