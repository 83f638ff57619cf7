"""Bugs in what readers of another layout read, and in what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from tensorhub.coordinator import bridges, source_choice, waiting
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.coverage import Coverage
from tensorhub.coordinator.entities import Holding, Operation, RankPart, Version
from tensorhub.coordinator.handovers import Handovers, Wish
from tensorhub.coordinator.layout_holdings import LayoutHoldings
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.source_choice import SourceChoice
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.scheduler import sources
from tensorhub.testing.sim import handle
from tensorhub.testing.sim.faults import Fault
from tensorhub.worker.filling import Filling
from tensorhub.worker.owner import Owner
from tensorhub.worker.router import Router
from tests.testing.bugs import bug as any_bug, replaced
from tests.testing.bugs.inside import around

bug = partial(any_bug, LAYOUTS_DRAWN=1.0)  # in each seed groups have several layouts, and not only in some


@bug("R7: a rank overwrites what it holds once there is a source for any class of shards that it needs")
def one_class_is_enough() -> Iterator[None]:
    def are_enough(sources: Iterable[bridges.Source], needs: object) -> bool:
        return bool(list(sources))

    with replaced(bridges, "are_enough", are_enough):
        yield


@bug("R7: a group of several ranks overwrites what it holds, although nobody looks whether its ranks read everything")
def nobody_looks_whether_all_is_read() -> Iterator[None]:
    def is_known(self: Coverage, operation: Operation) -> bool:
        operation.covers = True
        return True

    with replaced(Coverage, "is_known", is_known):
        yield


@bug("R7: the rank that is asked whether its group reads everything says so unseen")
def all_is_read_unseen() -> Iterator[None]:
    with replaced(handle, "check", lambda action: None):
        yield


@bug("G7: who bridges is not given another source when one of several is lost")
def bridge_is_not_mended() -> Iterator[None]:
    def lacking(before: Callable[..., list[Any]], part: RankPart, without: Any = None) -> list[Any]:
        return [] if part.leases else before(part, without)

    with around(waiting, "lacking", lacking):
        yield


@bug("R9: who is still filled in another layout than the published one is read by whoever needs selections of it")
def fills_are_origins() -> Iterator[None]:
    anybody = replaced(LayoutHoldings, "has_each_class", lambda self: self.are_whole() or any(self.values()))
    with anybody, around(SourceChoice, "_refusing", lambda before, self, part, need: before(self, part, None)):
        yield


@bug("R8: chunks of one layout are taken for equal, whatever the layout that its selections are cut from", faults=())
def one_grid_for_all_origins() -> Iterator[None]:
    def lay_out(before: Callable[..., Any], self: Cluster, version: Version, group: Any, origins: bytes) -> Any:
        known = [layout for layout in version.others.values() if layout.layout_id == group.layout_id]
        return known[0] if origins and known else before(self, version, group, origins)

    with around(Cluster, "lay_out", lay_out):
        yield


@bug("R8: votes count without the roots of selections", faults=(Fault.LIE,), COUNTS=(2,), LEFT_OUT_DRAWN=0.0)
def roots_of_selections_forgotten() -> Iterator[None]:
    def settle(before: Callable[..., Any], self: Testimonies, part: RankPart, need: Any, root: bytes) -> Any:
        return self._agree(part, need, by_source=False) if need is not None else before(self, part, need, root)

    with around(Testimonies, "_settle_claim", settle):
        yield


@bug("R8: the digests of the sources count, although the publisher has said otherwise or might", faults=())
def sources_are_believed_first() -> Iterator[None]:
    def settle(before: Callable[..., Any], self: Testimonies, part: RankPart, need: Any, root: bytes) -> Any:
        return self._agree(part, need, by_source=True) if need is not None else before(self, part, need, root)

    with around(Testimonies, "_settle_claim", settle):
        yield


@bug(
    "G5: some rank of another layout is taken for a copy of all of a retained version",
    faults=(Fault.CRASH, Fault.RESTART, Fault.COORDINATOR),
    seeds_max=300,
)
def one_rank_of_another_layout_keeps_all() -> Iterator[None]:
    def is_kept(version: Version, stays: Callable[[Holding], bool], but: object) -> bool:
        others = (layout for layout in version.others.values() if layout is not but)
        return any(stays(each) for layout in others for shard in layout for each in layout.of(shard).steady)

    with replaced(Retentions, "is_kept", staticmethod(is_kept)):
        yield


@bug("R5: what the last group of another layout holds is handed over to nobody", faults=(Fault.DELAY,))
def nobody_takes_another_layout_over() -> Iterator[None]:
    def grant(before: Callable[..., None], self: Handovers, model: Any, wish: Wish) -> None:
        if not wish.holding.bridges:
            before(self, model, wish)

    with around(Handovers, "_grant", grant):
        yield


@bug(
    "R2: a rank whose Register was answered does not hear that it shall say it again, once its group's layout is known",
    faults=(Fault.COORDINATOR,),
    COUNTS=(3,),
    LEFT_OUT_DRAWN=0.0,
)
def not_asked_again() -> Iterator[None]:
    with replaced(Router, "_answered", lambda self, request: None):
        yield


@bug(
    "G7: who has let go of what it had begun, to go over to another way, does not say its call again",
    faults=(Fault.CRASH, Fault.RESTART, Fault.SLOW),
    seeds_max=400,
    COUNTS=(3,),
    LEFT_OUT_DRAWN=0.0,
)
def nobody_goes_over() -> Iterator[None]:
    with replaced(Filling, "_call_again", lambda self: None):
        yield


@bug(
    "R9: what a fill has verified is forgotten where it goes on in the chunks of another grid",
    COUNTS=(3,),
    LEFT_OUT_DRAWN=0.0,
    seeds_max=300,
)
def another_grid_is_forgotten() -> Iterator[None]:
    with replaced(Owner, "former", lambda self, registration, generation: []):
        yield


@bug("R9: a source in another site is read where it seems to be faster", faults=(), seeds_max=300)
def sites_do_not_matter() -> Iterator[None]:
    def rank(before: Callable[..., Any], *args: Any) -> Any:
        return False, before(*args)[1]

    with around(sources, "rank", rank), around(source_choice, "rank", rank):
        yield
