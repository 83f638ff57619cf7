"""R12 of the selector "available", judged at the moment at which the coordinator says what it has
decided.

What can be read is judged by what memory holds; the coordinator's books are asked only whether it
has heard of a holder, and hears of its worker now. Partial copies are not judged here.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub.coordinator import Decision, Publication
from tensorhub.coordinator.states import WorkerState
from tensorhub.messages import Outcome, Start
from tensorhub.testing.sim.assertion import HOLDING, NO_AVAILABLE, demand
from tensorhub.testing.sim.judges.contents import Contents
from tensorhub.testing.sim.judges.ports import JudgedCall, JudgedHandle, JudgedWorld
from tensorhub.testing.sim.judges.reference_model import Reading
from tensorhub.testing.sim.layouts import is_of_other_layout
from tensorhub.types import AVAILABLE, HandleState, OpKey
from tensorhub.worker.calls import FillCall


class AvailabilityJudge:
    """Whether "available" is the newest version that can be read."""

    def __init__(self, world: JudgedWorld, contents: Contents) -> None:
        self._world = world
        self._contents = contents
        self._ended: set[OpKey] = set()  # of which it was said how they have ended

    def told(self, handle: JudgedHandle, message: Start | Outcome) -> None:
        """The coordinator is about to say to a rank what its call is bound to, or that it has
        ended.
        """
        record = handle.last_call
        if (
            record is None
            or record.key != message.key
            or not isinstance(record.what, FillCall)
            or self._contents.has_outsiders
        ):
            return
        if record.what.selector != AVAILABLE:
            return
        ranks = [
            h
            for h in (handle, *self._world.mates(handle))
            if h.last_call is not None and h.last_call.key == message.key
        ]
        held = [n for rank in ranks if (n := self._held(rank)) is not None]
        if (
            isinstance(message, Outcome)
            and message.again
            and handle.member.state is HandleState.FILLING
        ):
            if isinstance(record.judged, Reading):
                record.judged.holds = None  # it is overwritten already: any version is better
            return
        if isinstance(message, Start):
            self._bound(handle, record, message, held)
            return
        if message.key in self._ended:
            return  # what was decided then is said again, to a rank that asks late
        self._ended.add(message.key)
        if message.error is not None and NO_AVAILABLE in message.error.message:
            self._failed(handle, max([record.what.at_least or 0, *held]))

    def _bound(
        self, handle: JudgedHandle, record: JudgedCall, message: Start, held: list[int]
    ) -> None:
        group = self._world.coordinator.cluster.models[handle.shard.model].groups[
            handle.shard.group
        ]
        operation, content_id = group.operation, message.version.content_id
        # its memory says so, too: a former leader may have bound it, whose words are not judged
        filled = handle.member.content
        has_begun = filled is not None and filled.version.content_id == content_id
        has_begun = has_begun and handle.member.state is HandleState.FILLING
        goes_on, record.bound = has_begun or record.bound == content_id, content_id
        # None: it has ended in this very step
        if goes_on if operation is None else operation.resumes is not None:
            return  # it goes on with what it was bound to
        number, told = message.version.version, (handle, message.version)
        ok = not held or max(held) <= number
        demand(ok, "selectors: {} gets {} as available: its ranks hold {}", *told, held)
        has_it = goes_on or held == [number] * group.world_size or self._is_heard_of(content_id)
        demand(has_it, "selectors: {} gets {} as available, which no live holder has", *told)
        for newer, content_id in self._published(handle.shard.model, number + 1):
            can_be_read = self._can_be_read(content_id) and self.is_described_for(handle, newer)
            demand(
                not can_be_read, "selectors: {} gets {} as available: {} can be read", *told, newer
            )
            if self._recovers():
                away = self._away(handle.shard.model, content_id)
                demand(
                    not away,
                    "selectors: {} gets {} as available: {} of {} may come back",
                    *told,
                    away,
                    newer,
                )

    def _failed(self, handle: JudgedHandle, least: int) -> None:
        demand(
            not self._recovers(),
            "selectors: {} is told that no version is available before all could come back",
            handle,
        )
        for number, content_id in self._published(handle.shard.model, least):
            demand(
                not self._can_be_read(content_id),
                "selectors: {} is told that no version is available, and {} can be read",
                handle,
                number,
            )

    def _recovers(self) -> bool:
        return self._world.coordinator.cluster.is_recovering

    def _published(self, model: str, least: int) -> Iterator[tuple[int, str]]:
        """The numbers from `least` on, each with its published content."""
        numbers = self._contents.numbers.get(model, {})
        return (
            (n, c) for n, c in numbers.items() if n >= least and c not in self._contents.retired
        )

    def _held(self, handle: JudgedHandle) -> int | None:
        """The version that a rank holds, as the coordinator knows."""
        content, known = (
            handle.member.content,
            self._world.coordinator.cluster.members.get(handle.id),
        )
        if (
            content is None
            or handle.member.state not in HOLDING
            or known is None
            or known.holding is None
        ):
            return None
        return (
            None
            if content.version.content_id in self._contents.retired
            else content.version.version
        )

    def _can_be_read(self, content_id: str) -> bool:
        """Whether every shard of the content has a holder that the coordinator hears."""
        shards = self._contents.truth.get(content_id, {})
        return bool(shards) and all(
            any(self._offers(h, content_id) for h in self._holders(shard)) for shard in shards
        )

    def is_described_for(self, handle: JudgedHandle, number: int) -> bool:
        """Whether a reader of the whole model, or of another layout, can be told the holdings.
        After a restart the holders that know them may not be back, though host copies of all shards
        are.
        """
        model, shard = self._world.coordinator.cluster.models[handle.shard.model], handle.shard
        version = model.versions.get(number)
        if version is None or any(layout.is_described for layout in version.layouts):
            return True
        return (
            version.is_laid_out_as(model.groups[shard.group])
            if shard.serves
            else shard.layout_id == ""
        )

    def _is_heard_of(self, content_id: str) -> bool:
        """Whether a live worker holds each shard of it completely, or an identical shard, which
        readers of another layout read as well. The holding may be gone since.
        """
        held = [
            (m.shard, m.holding)
            for m in self._world.coordinator.cluster.members.values()
            if m.worker.state is WorkerState.LIVE
        ]
        sources = [
            (n, h.layout)
            for n, h in held
            if h is not None and h.is_source and h.version.info.content_id == content_id
        ]
        for layout in (layout for _, layout in sources):
            found = {n for n, its in sources if its is layout}
            twins = layout.classes.values() if layout.is_described else ()
            if found >= set(layout) or (
                twins and not any(found.isdisjoint(shards) for shards in twins)
            ):
                return True
        return False

    def _holders(self, shard: int) -> Iterator[JudgedHandle]:
        return (h for h in self._world.live_handles() if h.shard.number == shard and h.shard.serves)

    def _offers(self, handle: JudgedHandle, content_id: str) -> bool:
        content, known = (
            handle.member.content,
            self._world.coordinator.cluster.members.get(handle.id),
        )
        if (
            content is None
            or content.version.content_id != content_id
            or known is None
            or known.holding is None
        ):
            return False
        if is_of_other_layout(content.manifest):
            return False
        is_known = known.holding.is_source and known.holding.generation == content.generation
        return (
            is_known and handle.member.state in HOLDING and known.worker.state is WorkerState.LIVE
        )

    def _away(self, model: str, content_id: str) -> str:
        """A group that was recorded to hold that last, and of which not every rank is back. (It may
        have more or fewer ranks than the version has shards.)
        """
        last = {
            e.key.group: e
            for e in self._world.store
            if isinstance(e, Decision | Publication) and e.model == model
        }
        groups = self._world.coordinator.cluster.models[model].groups
        for name, entry in last.items():
            group = groups.get(name)
            if entry.content_id == content_id and (
                group is None or len(group.members) < group.world_size
            ):
                return f"group {name}"
        return ""
