"""Bugs in what readers of another layout read, and in what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from tensorhub.coordinator import source_choice, waiting, ways
from tensorhub.coordinator.coverage import Coverage
from tensorhub.coordinator.entities import Operation, RankPart
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.layouts.joining import publication_of
from tensorhub.scheduler import sources
from tensorhub.testing.sim import handle
from tensorhub.testing.sim.faults import Fault
from tensorhub.worker.coverage import Found
from tensorhub.worker.router import Router
from tests.testing.bugs import bug as any_bug, replaced
from tests.testing.bugs.inside import around

# in each seed groups have several layouts, and not only in some
bug = partial(any_bug, LAYOUTS_DRAWN=1.0)


@bug(
    "R7: a rank overwrites what it holds once there is a source for any "
    "class of shards that it needs"
)
def one_class_is_enough() -> Iterator[None]:
    def are_enough(sources: Iterable[ways.Source], needs: object) -> bool:
        return bool(list(sources))

    with replaced(ways, "are_enough", are_enough):
        yield


@bug(
    "R7: a group of several ranks overwrites what it holds, although nobody looks whether its "
    "ranks read everything"
)
def nobody_looks_whether_all_is_read() -> Iterator[None]:
    def is_known(self: Coverage, operation: Operation) -> bool:
        operation.covers = True
        return True

    with replaced(Coverage, "is_known", is_known):
        yield


@bug("R7: the rank that is asked whether its group reads everything says so unseen")
def all_is_read_unseen() -> Iterator[None]:
    def check(action: Any, digest: Any) -> Found:
        return Found(action.publication or publication_of(action.published, action.parts))

    with replaced(handle, "check", check):
        yield


@bug("G7: who bridges is not given another source when one of several is lost")
def bridge_is_not_mended() -> Iterator[None]:
    def lacking(before: Callable[..., list[Any]], part: RankPart, without: Any = None) -> list[Any]:
        return [] if part.leases else before(part, without)

    with around(waiting, "lacking", lacking):
        yield


@bug(
    "R8: votes count without the roots of selections",
    faults=(Fault.LIE,),
    COUNTS=(2,),
    LEFT_OUT_DRAWN=0.0,
)
def roots_of_selections_forgotten() -> Iterator[None]:
    def settle(
        before: Callable[..., Any], self: Testimonies, part: RankPart, need: Any, root: bytes
    ) -> Any:
        return (
            self._agree(part, need, by_source=False)
            if need is not None
            else before(self, part, need, root)
        )

    with around(Testimonies, "_settle_claim", settle):
        yield


@bug(
    "R8: the digests of the sources count, although the publisher has said otherwise or might",
    faults=(),
)
def sources_are_believed_first() -> Iterator[None]:
    def settle(
        before: Callable[..., Any], self: Testimonies, part: RankPart, need: Any, root: bytes
    ) -> Any:
        return (
            self._agree(part, need, by_source=True)
            if need is not None
            else before(self, part, need, root)
        )

    with around(Testimonies, "_settle_claim", settle):
        yield


@bug(
    "R2: a rank whose Register was answered does not hear that it shall say it again, once its "
    "group's layout is known",
    faults=(Fault.COORDINATOR,),
    COUNTS=(3,),
    LEFT_OUT_DRAWN=0.0,
)
def not_asked_again() -> Iterator[None]:
    with replaced(Router, "_answered", lambda self, request: None):
        yield


@bug("R9: a source in another site is read where it seems to be faster", faults=(), seeds_max=600)
def sites_do_not_matter() -> Iterator[None]:
    def rank(before: Callable[..., Any], *args: Any) -> Any:
        return False, before(*args)[1]

    with around(sources, "rank", rank), around(source_choice, "rank", rank):
        yield
