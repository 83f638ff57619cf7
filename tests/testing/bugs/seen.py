"""Bugs in what callers see: calls end with the wrong version, or are refused without a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensorhub.coordinator.entities import Model, Operation, PendingWrite, Version
from tensorhub.coordinator.publishes import Lineages
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.versions import Versions
from tensorhub.testing import Fault
from tensorhub.types import LATEST, PREVIOUS, Selector
from tests.testing.bugs import bug, replaced
from tests.testing.bugs.inside import around

Resolve = Callable[..., Version | None]
FEW = (Fault.CUT, Fault.DELAY, Fault.CANCEL)


@bug("R12: `latest` is the version before the newest one, where there is one", faults=FEW)
def latest_one_behind() -> Iterator[None]:
    def resolve(
        before: Resolve, self: Versions, model: Model, selector: Selector, *more: Any
    ) -> Version | None:
        older = before(self, model, PREVIOUS, *more) if selector == LATEST else None
        return older or before(self, model, selector, *more)

    with around(Versions, "resolve", resolve):
        yield


@bug("R12: `latest-1` is two versions before the newest one, where there is that", faults=FEW)
def previous_skips_one() -> Iterator[None]:
    def resolve(
        before: Resolve, self: Versions, model: Model, selector: Selector, *more: Any
    ) -> Version | None:
        older = model.newest_visible(skip=2) if selector == PREVIOUS else None
        return older or before(self, model, selector, *more)

    with around(Versions, "resolve", resolve):
        yield


@bug("R12: `at_least` is not looked at", faults=FEW)
def at_least_ignored() -> Iterator[None]:
    def resolve(
        before: Resolve, self: Versions, model: Model, selector: Selector, *more: Any
    ) -> Version | None:
        return before(self, model, selector, None, *more[1:])

    with around(Versions, "resolve", resolve):
        yield


@bug(
    "R12: `available` is the newest version, also where nobody holds it",
    faults=(Fault.CRASH, Fault.RESTART, Fault.CANCEL),
)
def available_that_nobody_holds() -> Iterator[None]:
    def available(
        before: Callable[..., Any], self: Versions, operation: Operation, at_least: int | None
    ) -> Version | None:
        return operation.group.model.newest_visible() or before(self, operation, at_least)

    with around(Versions, "available", available):
        yield


@bug("R12: a number that is asked for, and was overtaken, is the newest one", faults=FEW)
def number_is_the_newest() -> Iterator[None]:
    def resolve(
        before: Resolve, self: Versions, model: Model, selector: Selector, *more: Any
    ) -> Version | None:
        found = before(self, model, selector, *more)
        return model.newest_visible() if isinstance(selector, int) else found

    with around(Versions, "resolve", resolve):
        yield


@bug(
    "G3: the newest version that is announced is the newest that somebody holds: it goes back when "
    "holders are lost"
)
def newest_goes_back() -> Iterator[None]:
    def refresh(before: Callable[..., None], self: Versions, model: Model) -> None:
        def held(model: Model, skip: int = 0) -> Version | None:
            live = [v for v in model.versions.values() if v.visible and v.has_live_source()]
            return max(live, key=lambda version: version.number, default=None)

        with replaced(Model, "newest_visible", held):
            before(self, model)

    with around(Versions, "refresh", refresh):
        yield


@bug("R1: a number that was never used is published, though larger ones were", faults=FEW)
def lower_number_accepted() -> Iterator[None]:
    def overtaken(before: Callable[..., Any], self: Versions, model: Model, number: int) -> Any:
        version = model.versions.get(number)
        return before(self, model, number) if version is not None and version.visible else None

    with around(Versions, "overtaken", overtaken):
        yield


@bug("R2: after a rollback the numbers that it has freed can not be published", faults=FEW)
def mark_not_lowered() -> Iterator[None]:
    def recorded(before: Callable[..., None], self: Lineages, pending: PendingWrite) -> None:
        mark = pending.model.mark
        before(self, pending)
        pending.model.mark = mark

    with around(Lineages, "recorded", recorded):
        yield


@bug("G5: a pin keeps nothing: the last holder of what is pinned may leave", faults=FEW)
def pinned_is_let_go() -> Iterator[None]:
    def retained(self: Model) -> set[int]:
        visible = sorted((v.number for v in self.versions.values() if v.visible), reverse=True)
        return set(visible[: self.retain])

    with replaced(Model, "retained", retained):
        yield


@bug("G5: a version that must stay is forgotten with its last holder, when newer ones are there")
def retained_is_forgotten() -> Iterator[None]:
    def is_old(model: Model, version: Version) -> bool:
        return sum(v.visible and v.number > version.number for v in model.versions.values()) >= 1

    with replaced(Versions, "_is_old", staticmethod(is_old)):
        yield


@bug("R4: what was retained once can be lowered, and never be raised again", faults=FEW)
def larger_retain_is_ignored() -> Iterator[None]:
    def recorded(before: Callable[..., None], self: Retentions, pending: PendingWrite) -> None:
        retain = pending.model.retain
        before(self, pending)
        pending.model.retain = min(retain, pending.model.retain) if retain else pending.model.retain

    with around(Retentions, "recorded", recorded):
        yield
