"""Bugs in archives: what is loaded, what comes back, and what a bucket may give up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tensorhub.coordinator import Restoration
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import PendingWrite
from tensorhub.coordinator.restoring import Restorations
from tensorhub.testing import Fault
from tensorhub.testing.drivers.archiving import ArchivedCopy, SimArchive
from tensorhub.testing.sim.handle import HandleShell
from tensorhub.worker.owner import Owner
from tests.testing.bugs import bug, replaced
from tests.testing.bugs.inside import around

FEW = (Fault.CUT, Fault.DELAY, Fault.CRASH)
AWAY = (Fault.PARTITION, Fault.DROP, Fault.PAUSE)
ALL: dict[str, Any] = {"ARCHIVES_DRAWN": 1.0, "LAYOUTS_DRAWN": 0.0}


@bug("G1: chunks of an archived copy may be read before they are loaded", **ALL)
def available_before_it_is_loaded() -> Iterator[None]:
    def adopt(
        before: Callable[..., None], self: Any, content: Any, digests: Any, *more: Any
    ) -> None:
        before(self, content, digests, *more)
        self.do_next()
        named = [*enumerate(digests)]
        self.worker.owner.mark_available(self.id, self.member.content.generation, named)

    with around(HandleShell, "adopt", adopt):
        yield


@bug("G1: what was loaded gives its room back, and may still be read", **ALL)
def unloaded_and_still_available() -> Iterator[None]:
    with replaced(Owner, "unload", Owner.accesses_to):
        yield


@bug("R2: a version that a rollback has ended is restored", faults=FEW, **ALL)
def rolled_back_comes_back() -> Iterator[None]:
    with replaced(Restorations, "_counts", staticmethod(lambda model, each: True)):
        yield


@bug("R1: restored versions do not raise the mark", faults=FEW, **ALL)
def mark_is_forgotten() -> Iterator[None]:
    def recorded(before: Callable[..., None], self: Restorations, write: PendingWrite) -> None:
        mark = write.model.mark
        before(self, write)
        write.model.mark = mark if mark is not None else 0

    with around(Restorations, "recorded", recorded):
        yield


@bug(
    "R2: a restored version is not durable: it is forgotten with the coordinator", faults=FEW, **ALL
)
def restored_without_a_record() -> Iterator[None]:
    def record(before: Callable[..., None], self: Cluster, write: PendingWrite, entry: Any) -> None:
        if isinstance(entry, Restoration):
            entry = replace(entry, publications=(), roots=())
        before(self, write, entry)

    with around(Cluster, "record", record):
        yield


@bug("G5: objects are removed while copies of them are promised", faults=FEW, **ALL)
def removed_before_its_copies_leave() -> Iterator[None]:
    def remove(before: Callable[..., None], self: SimArchive, key: Any) -> None:
        copies, self._copies = self._copies, {}
        before(self, key)
        self._copies = {its: copy for its, copy in copies.items() if its[0] != key}

    with around(SimArchive, "_remove", remove):
        yield


@bug(
    "G5: an archive that lost its connection does not announce its copies again", faults=FEW, **ALL
)
def copies_are_not_announced_again() -> Iterator[None]:
    with replaced(ArchivedCopy, "is_there", True):
        yield


@bug(
    "R2: a lost version of an older lineage is removed, though it may only be forgotten",
    faults=AWAY,
    **ALL,
)
def forgotten_is_taken_for_rolled_back() -> Iterator[None]:
    def restore(before: Callable[..., None], self: SimArchive, versions: list[Any]) -> None:
        model = self._world.coordinator.cluster.models.get("actor")
        if model is not None and self.cluster == self._world.ident:
            known = {each.info.content_id for each in model.versions.values()}
            for each in versions[:]:
                is_old = each.key.lineage < model.history.lineage
                if each.info.content_id not in known and is_old:
                    self._forget(each.key, unwanted=False)
                    versions.remove(each)
        before(self, versions)

    with around(SimArchive, "_restore", restore):
        yield
