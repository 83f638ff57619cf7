"""A reference model of the versions that callers may see: it judges each return by the earlier
calls and returns.

Theory of operation. There is one line of published versions, and each call that succeeds takes
effect at one moment between its begin and its end (it is linearizable: Herlihy and Wing, 1990). No
caller sees that moment, so the model knows of each version when it *may* have been visible (since
its publish had begun, and until a rollback past it had returned) and when it *surely* was (since
some call had returned it, and until a rollback past it had begun). A return is possible if there is
a moment between its call's begin and its end at which no version that surely was visible
contradicts it, and enough that may have been explain it. A call that has not returned, or was left
in doubt, may take effect at any time.

Moments are counted, not timed: each begin and each end is a tick, and moment `t` follows tick `t`.
Whatever can be told of a moment changes at an *edge*, so only edges are looked at.

Independent of the coordinator's and the worker's code. Not responsible for what memory holds
(`guarantees`), nor for whether what must stay does (`retention`): it says only what must.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from tensorhub.testing.sim.assertion import demand
from tensorhub.types import AVAILABLE, LATEST, PREVIOUS, Selector, VersionInfo

OLD = 2  # so many newer versions, and one that nothing keeps may be forgotten


@dataclass(eq=False)
class Call:
    """A caller's call; this plain class if the call shows no version, like `unpublish`."""

    who: str
    began = 0
    ended = inf  # it may take effect until then


@dataclass(eq=False)
class Publishing(Call):
    """A rank's publish; `who` names its group."""

    number: int
    left = False  # nobody will hear what has become of it


@dataclass(eq=False)
class Reading(Call):
    """Whatever ends with a version: replicate, update, prefetch, fetch. `holds`: what its memory
    held.
    """

    selector: Selector
    at_least: int | None = None
    holds: VersionInfo | None = None


@dataclass(eq=False)
class RollingBack(Call):
    to: int


@dataclass(eq=False)
class Retaining(Call):
    latest: int
    done = False  # it has taken effect


@dataclass(eq=False)
class Pinning(Call):
    number: int
    kept: _Version | None = None  # what it surely keeps, from `done` on
    done = inf


@dataclass(eq=False)
class _Version:
    info: VersionInfo
    may: int  # it may be visible from here on
    first: int  # somebody has seen it here
    since: int  # it was visible at a moment between this
    # and this, and surely is from then on, but for rollbacks that were not over at `since`
    seen: float
    gone = inf  # it surely is visible no more
    undone = inf  # the first rollback past it that was not over at `since` began here
    restored = 0  # it was visible again from here on, whatever had been decided

    @property
    def number(self) -> int:
        return self.info.version

    def may_be_there(self, t: int) -> bool:
        return self.may <= t < self.gone


class ReferenceModel:
    """All calls and returns. Each impossible return raises GuaranteeBroken."""

    def __init__(self) -> None:
        self._tick = 0
        self._edges: list[int] = []
        self._versions: dict[str, _Version] = {}  # by content id: all that were ever seen
        self._publishes: list[Publishing] = []  # but those that have returned
        self._rollbacks: list[RollingBack] = []  # but those that were refused; so below
        self._retains: list[Retaining] = []
        self._pins: list[Pinning] = []  # that are not over
        self._listens: dict[str, int] = {}  # by listener: since when
        # by listener: the number of its last news, and when they were so
        self._heard: dict[str, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"<ReferenceModel of {len(self._versions)} versions, {self._tick} ticks>"

    # -- calls begin

    def begins(self, call: Call) -> None:
        call.began = self._next(edge=not isinstance(call, Reading))
        match call:
            case Publishing():
                self._publishes.append(call)
            case RollingBack():
                self._rollbacks.append(call)
                for version in self._versions.values():
                    if version.number > call.to:
                        version.undone = min(version.undone, call.began)
            case Retaining():
                self._retains.append(call)
            case Pinning():
                self._pins.append(call)
            case _:
                pass

    @property
    def moment(self) -> int:
        """The present one."""
        return self._tick

    def listens(self, who: str) -> None:
        """What it hears from now on is not older than this."""
        self._listens[who] = self._next()

    # -- calls end

    def published(self, call: Publishing, info: VersionInfo) -> None:
        call.ended = self._next()
        demand(
            info.version == call.number,
            "publication numbers: {} has published {}, and was told {}",
            call.who,
            call.number,
            info,
        )
        self._publishes.remove(call)
        self._check_number(self._see(info, call.began, call.began), call.began)

    def not_published(self, call: Publishing, *, taken: bool = False) -> None:
        """It has failed, and will not take effect any more. `taken`: since its number can never be
        published.
        """
        call.ended = self._next(edge=True)

        def is_taken(t: int) -> bool:  # by a rollback, or a number, but for what its own ranks call
            rollbacks = (each for each in self._rollbacks if each.began <= t)
            if any(each.ended > t or each.to >= call.number for each in rollbacks):
                return True
            return max(self._may_be_there(t, but=call.who), default=-1) >= call.number

        if taken:
            demand(
                self._at_some_moment(call, is_taken),
                "publication numbers: {} may not publish {}, and nothing stands in its way",
                call.who,
                call.number,
            )

    def read(self, call: Reading, info: VersionInfo) -> None:
        call.ended = self._next()
        wanted, told = call.selector, (call.who, call.selector, info.version)
        if isinstance(wanted, int):
            ok = info.version == wanted
            demand(ok, "selectors: {} asked for {}, and got {}, another number", *told)
        demand(
            info.version >= (call.at_least or 0),
            "selectors: {} asked for {}, and got {}, not at least {}",
            *told,
            call.at_least,
        )
        version = self._see(info, call.began)
        if wanted in (LATEST, PREVIOUS):
            skip = 0 if wanted == LATEST else 1
            demand(
                self._at_some_moment(call, lambda t: self._may_be_newest(version, t, skip)),
                "selectors: {} asked for {}, and got {}",
                *told,
            )
        else:
            demand(
                self._at_some_moment(call, version.may_be_there),
                "visibility: {} asked for {}, and got {}, which was not there",
                *told,
            )
        held = self._versions.get(call.holds.content_id) if call.holds is not None else None
        if wanted == AVAILABLE and held is not None:
            demand(
                held.number <= info.version
                or self._at_some_moment(call, lambda t: not self._is_there(held, t)),
                "selectors: {} asked for {}, and got {}, and held {}",
                *told,
                held.number,
            )

    def denied(self, call: Reading | Pinning, number: int) -> None:
        """It is said that this number is not published, or not any more."""
        call.ended = self._next()

        # since it was old once, and nothing kept it
        def may_be_forgotten(version: _Version) -> bool:
            moments = self._moments(version.may, call.ended)
            return any(
                self._newer(version, t) >= OLD and not self._that_stay([version], t)
                for t in moments
            )

        def is_not_there(t: int) -> bool:
            return all(
                may_be_forgotten(version)
                for version in self._all_there(t)
                if version.number == number
            )

        demand(
            self._at_some_moment(call, is_not_there),
            "selectors: {} was told that there is no {}, which there is",
            call.who,
            number,
        )

    def announced(self, who: str, info: VersionInfo | None, since: float = inf) -> None:
        """A caller is told that this is the newest version now, or was not long ago (`since`);
        None: there is none.
        """
        (last, then), now = self._heard.get(who, (-1, 0)), self._next()
        began = max(then, int(min(since, self._listens.get(who, 0))))
        version, number = (None, -1) if info is None else (self._see(info, began), info.version)

        # a rollback alone makes an older one the newest, or one that nobody remembers
        def is_newest(t: int) -> bool:
            rollbacks = [each for each in self._rollbacks if each.began <= t]
            back = [each for each in rollbacks if each.ended > then and each.to < last]
            # what nobody remembers may be newer than all that this listener has heard of
            if version is None:
                back += [each for each in rollbacks if each.began > then]
            if number < last and not back:
                return False
            if version is None:
                return bool(rollbacks) or not any(self._all_there(t))
            return self._may_be_newest(version, t, 0)

        t = next(filter(is_newest, self._moments(began, now)), None)
        demand(
            t is not None,
            "visibility: {} was told that {} is the newest, which it is not, or is no more",
            who,
            info,
        )
        self._heard[who] = number, t or began

    def restored(self, info: VersionInfo) -> None:
        """An archive had it: it is visible again."""
        now = self._next(edge=True)
        # a new one is not there yet: a rollback that is not over may strike it, too
        version = self._versions.setdefault(info.content_id, _Version(info, now, now, now, inf))
        version.gone, version.restored = inf, now
        if not self._is_there(version, now):
            version.since = version.seen = now
            version.undone = self._undone(version)

    def rolled_back(self, call: RollingBack) -> None:
        call.ended = self._next(edge=True)
        for version in self._versions.values():
            known = max(version.first, version.restored)
            if version.number > call.to and known <= call.began:
                version.gone = min(version.gone, call.ended)

    def not_rolled_back(self, call: RollingBack, *, beyond: bool = False) -> None:
        """It was refused. `beyond`: since that number was never reached."""
        call.ended = self._next(edge=True)
        self._rollbacks.remove(call)
        for version in self._versions.values():
            version.undone = self._undone(version)
        if beyond:

            def is_beyond(t: int) -> bool:
                return not any(version.number >= call.to for version in self._all_there(t))

            demand(
                self._at_some_moment(call, is_beyond),
                "durable mark: {} may not roll back to {}, which was published",
                call.who,
                call.to,
            )

    def retained(self, call: Retaining) -> None:
        call.ended, call.done = self._next(edge=True), True

    def not_retained(self, call: Retaining, *, unknown: bool) -> None:
        """It was refused; `unknown`: it has no answer, and will not take effect any more if it has
        not yet.
        """
        call.ended = self._next(edge=True)
        if not unknown:
            self._retains.remove(call)

    def pinned(self, call: Pinning) -> None:
        now = self._next(edge=True)
        call.kept = next(
            (
                v
                for v in self._all_there(now)
                if v.number == call.number and self._is_there(v, call.began)
            ),
            None,
        )
        call.done = now

    def unpinned(self, call: Pinning) -> None:
        """Its caller ends it, or has lost the connection over which it was said: the pin protects
        nothing any more.
        """
        self._pins.remove(call)

    def state_lost(self) -> None:
        """The coordinator will be back without its state, as a new cluster (R2)."""
        rollback, retain = RollingBack("a new cluster", -1), Retaining("a new cluster", 0)
        self.begins(rollback)
        self.rolled_back(rollback)
        for each in self._retains:
            each.ended = min(each.ended, self._tick)
        self.begins(retain)
        self.retained(retain)
        self._pins.clear()

    # -- what must stay

    def must_stay(self, since: Call) -> frozenset[str]:
        """Content ids that have had to stay fetchable ever since that call began: the newest, and
        pinned ones (R4, G5).
        """
        stay = list(self._versions.values())
        for t in self._moments(since.began, self._tick + 1):
            stay = self._that_stay(stay, t) if stay else []
        return frozenset(version.info.content_id for version in stay)

    def _that_stay(self, versions: Iterable[_Version], t: int) -> list[_Version]:
        numbers, least = sorted(self._may_be_there(t)), self._least_retained(t)
        kept = {id(pin.kept) for pin in self._pins if pin.done <= t}
        there = [version for version in versions if self._is_there(version, t)]
        return [
            v
            for v in there
            if id(v) in kept or len(numbers) - bisect_right(numbers, v.number) < least
        ]

    def _least_retained(self, t: int) -> int:
        """By the last `retain` that is done then, or whatever was called since it began."""
        last = max(
            (call.began for call in self._retains if call.done and call.ended <= t), default=0
        )
        may = [call.latest for call in self._retains if call.began <= t and call.ended > last]
        return min(may if last else [0, *may])

    # -- moments

    def _next(self, *, edge: bool = False) -> int:
        self._tick += 1
        if edge:
            self._edges.append(self._tick)
        return self._tick

    def _moments(self, began: int, ended: float) -> Iterator[int]:
        yield began
        yield from self._edges[bisect_right(self._edges, began) : bisect_left(self._edges, ended)]

    def _at_some_moment(self, call: Call, holds: Callable[[int], bool]) -> bool:
        return any(map(holds, self._moments(call.began, call.ended)))

    def _see(self, info: VersionInfo, began: int, published: int | None = None) -> _Version:
        """A call that began then is told of it now: the version was visible in between."""
        now, version = self._tick, self._versions.get(info.content_id)
        if version is None:
            if published is None:  # by somebody who has not heard so yet, if ever
                begun = [
                    each.began
                    for each in self._publishes
                    if each.number == info.version and each.ended > began
                ]
                demand(
                    bool(begun),
                    "publication numbers: {} is seen, and nobody has published it",
                    info,
                )
                published = min(begun)
            version = self._versions[info.content_id] = _Version(info, published, now, began, now)
            version.undone = self._undone(version)
            self._check_number(version, published)
        if not self._is_there(version, now):
            version.since, version.seen = began, now
            version.undone = self._undone(version)
        if version.seen == now:
            self._edges.append(now)
        return version

    def _check_number(self, version: _Version, published: int) -> None:
        """R1: before it was seen first there was a moment at which nothing had its number, or a
        larger one.
        """
        others = [
            other
            for other in self._versions.values()
            if other.number >= version.number and other is not version
        ]
        moments = self._moments(published, version.first)
        free = any(not any(self._is_there(other, t) for other in others) for t in moments)
        demand(
            free,
            "publication numbers: {} was published although its number was not the largest: {}",
            version.info,
            others,
        )

    def _is_there(self, version: _Version, t: int) -> bool:
        """Whether it surely was visible then."""
        return version.seen <= t < version.undone

    def _undone(self, version: _Version) -> float:
        """What `undone` is."""
        past = (
            each
            for each in self._rollbacks
            if each.to < version.number and each.ended > version.since
        )
        return min((each.began for each in past), default=inf)

    def _all_there(self, t: int) -> Iterator[_Version]:
        return (version for version in self._versions.values() if self._is_there(version, t))

    def _may_be_there(self, t: int, but: str = "") -> set[int]:
        """Numbers that may have been visible then, also of unseen publishes, unless `but` still
        makes them.
        """
        unseen = {
            p.number for p in self._publishes if p.began <= t < p.ended and (p.who != but or p.left)
        }
        return unseen | {
            version.number for version in self._versions.values() if version.may_be_there(t)
        }

    def _newer(self, version: _Version, t: int) -> int:
        """How many newer ones there may have been."""
        return sum(number > version.number for number in self._may_be_there(t))

    def _may_be_newest(self, version: _Version, t: int, skip: int) -> bool:
        """Whether it may have been the newest then; `skip`: but for so many."""
        if not version.may_be_there(t):
            return False
        newer = {other.number for other in self._all_there(t) if other.number > version.number}
        return len(newer) <= skip <= self._newer(version, t)
