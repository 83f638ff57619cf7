"""What can be fetched now: the selector "available" (R12), and what an error says about who holds what.

A version counts if workers that are heard of hold each of its shards: completely, or by partial copies that have all of it
together (G6). Progress reports say how many chunks a partial copy has, but not which ones. So its owner is asked, and a call
that depends on the answer is bound no sooner. Not responsible for binding (`fills`), nor for `latest` (`versions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tensorhub.coordinator import ways
from tensorhub.coordinator.actions import Decision
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import ChunkAnswer, Holding, Model, Operation, Version, Worker
from tensorhub.coordinator.holders import Holders
from tensorhub.coordinator.layout_holdings import LayoutHoldings
from tensorhub.coordinator.states import WorkerState
from tensorhub.errors import VersionUnavailable, some
from tensorhub.layouts.identity import ALONE
from tensorhub.messages import ChunksThere, Fill, TellChunks

HELD_TOLD_MAX = 3  # versions that an error names
NOBODY = "and 'available' waits for nobody"


class HowHeld(Enum):
    WHOLE = "complete copies can be read now"
    TOGETHER = "partial copies that are read now have all of it"
    UNKNOWN = "a partial copy was asked what it has"
    DOUBTFUL = "a worker that has fallen silent has it, or the rest of it"
    NOT = "nobody has it"


@dataclass(eq=False, repr=False)
class Availability:
    """Asks partial copies what they have, and resolves "available"."""

    _cluster: Cluster

    # -- the selector

    def resolve(self, operation: Operation, at_least: int | None) -> Version | None:
        """The newest version that all ranks can have now, and that is not older than what one of them holds.

        None: the call waits. Nothing was published yet, or a version is about to be complete, or a silent worker that may
        have it may come back. Raises VersionUnavailable at once if nobody has what was published.
        """
        model, parts = operation.group.model, operation.parts.values()
        held = [part.member.holding.version.number for part in parts if part.member.holding is not None]
        least, waits = max([at_least or 0, *held]), self._cluster.is_recovering
        candidates = [v for v in model.visible if v.number >= least]
        for version in candidates:
            if all(p.member.holding is not None and p.member.holding.version is version for p in parts):
                return version
            how = self._held(version, operation)
            if how is HowHeld.WHOLE:
                return version
            if how in (HowHeld.TOGETHER, HowHeld.UNKNOWN) or self._may_come_back(version):
                return None
            waits = waits or how is HowHeld.DOUBTFUL
        goes_on = any(isinstance(part.call, Fill) and part.call.former for part in parts)  # what it was bound to is gone
        if waits or goes_on or not (candidates or any(number >= least for number in model.lost)):
            return None
        raise VersionUnavailable(self._nothing(operation, least, max(held, default=None)))

    def is_lost(self, operation: Operation) -> bool:
        """Whether no worker is left that could bring a bound call for "available" its version.

        A reader of a lost worker goes on for as long as that worker serves it.
        """
        return not self._cluster.is_recovering and self._held(operation.bound, operation) is HowHeld.NOT

    @staticmethod
    def _nothing(operation: Operation, least: int, held: int | None) -> str:
        model = operation.group.model
        what = f"version {least} of {model.name!r} or a newer one" if least else f"a version of {model.name!r}"
        text = f"nobody holds {what} as a whole, {NOBODY}"
        if held is None or held < least:
            return f"{text}; {held_text(model, operation)}"
        mine = f"a rank of this group holds version {held}, which 'available' never replaces by an older one"
        return f"{text}; {_told(model, operation)}; {mine}: call unpublish() on it first, or give the number of that version"

    def _held(self, version: Version, operation: Operation) -> HowHeld:
        """How the whole version is held for these readers: as it was published, or, if that is better, in their layout."""
        found = list(ways.of(self._cluster, version, operation))
        if any(way.can_be_read for way in found):
            return HowHeld.WHOLE
        if not found:  # what was published is not described yet
            return HowHeld.NOT if self._held_in(version, version.holdings) is HowHeld.NOT else HowHeld.DOUBTFUL
        layouts = {id(layout): layout for way in found for layout in way[:2] if layout is not None}
        how = [self._held_in(version, layout) for layout in layouts.values()]
        return next(each for each in HowHeld if each in how)

    def _held_in(self, version: Version, layout: LayoutHoldings[Holding]) -> HowHeld:
        """How all of it is held in that layout: like the shard that is held worst."""
        if layout.copies():
            return HowHeld.WHOLE
        left = any(each.abandoned for each in (layout, *version.described_as(layout.origin_id)))
        if not all(layout.values()) or (left and not layout.have_sources()):
            return HowHeld.NOT  # whoever still reads what was left on purpose ends
        shards = [self._shard(holdings) for holdings in layout.values()]
        return next(how for how in (HowHeld.NOT, HowHeld.DOUBTFUL, HowHeld.UNKNOWN, HowHeld.TOGETHER) if how in shards)

    def _shard(self, holdings: Holders[Holding]) -> HowHeld:
        here = [h for h in holdings if h.takes_readers and h.member.worker.state is WorkerState.LIVE]
        partial = [holding for holding in here if not holding.complete]
        if len(partial) < len(here):
            return HowHeld.TOGETHER
        asked = [self._ask(holding) for holding in partial]
        if any(answer.chunks is None for answer in asked):
            return HowHeld.UNKNOWN
        chunks, there = max((answer.chunks or 0 for answer in asked), default=0), 0
        for answer in asked:
            there |= answer.there
        if chunks and there & (1 << chunks) - 1 == (1 << chunks) - 1:
            return HowHeld.TOGETHER
        return HowHeld.DOUBTFUL if len(here) < len(holdings) else HowHeld.NOT

    def _may_come_back(self, version: Version) -> bool:
        """After a restart: whether a group whose last recorded commit is this version is not back with every rank yet."""
        if not self._cluster.is_recovering:
            return False
        decisions = self._cluster.decisions.values()
        return any(d.content_id == version.info.content_id and not self._is_back(d) for d in decisions)

    def _is_back(self, decision: Decision) -> bool:
        group = self._cluster.models[decision.model].groups.get(decision.key.group)
        return group is not None and len(group.members) == group.world_size

    # -- partial copies

    def _ask(self, holding: Holding) -> ChunkAnswer:
        """What it has, if its owner has said so lately; if not, the owner is asked."""
        answer, member = holding.chunk_answer, holding.member
        # A LIVE owner answers within half a lease: all answers to one question are there before the first one is old.
        until = answer.said_at + self._cluster.options.lease_s / 2 if answer is not None else 0.0
        old = answer is not None and answer.chunks is not None and self._cluster.now > until
        if answer is None or old or answer.session != member.worker.session:
            answer = holding.chunk_answer = ChunkAnswer(member.worker.session)
            self._cluster.note(member)
            self._cluster.tell(member, TellChunks(member.registration, holding.generation))
        return answer

    def heard(self, worker: Worker, message: ChunksThere) -> None:
        """An owner has said what a partial copy has. Unasked, or of another generation, the word changes nothing (G9)."""
        member = worker.members.get(message.registration)
        holding = member.holding if member is not None else None
        answer = holding.chunk_answer if holding is not None else None
        if member is None or holding is None or answer is None or holding.generation != message.generation:
            return
        if answer.chunks is None and answer.session == worker.session:
            answer.chunks, answer.there = message.chunks, int.from_bytes(message.there, "little")
            answer.said_at = self._cluster.now
            self._cluster.note(member)
            others = [h for h in holding.peers if h.member.worker.state is WorkerState.LIVE]
            answers = [other.chunk_answer for other in others]  # who has fallen silent is not waited for
            if not any(each is not None and each.chunks is None for each in answers):
                self._cluster.touch(member.group.model)


def held_text(model: Model, operation: Operation | None = None) -> str:
    """For an error: which versions of a model are held, by how many, and which one the selector "available" gets.

    Who makes the call `operation` is not told to fetch what it holds. Without it, the caller is taken to read any layout.
    """
    told, held = _told(model, operation), _readable(model)
    gets = next((v for v in held if v.can_be_read() or not _reads_one_shard(operation)), None)
    if gets is None or _is_own(gets, operation):
        return told
    return f"{told}; the selector 'available' gets {gets.number}"


def _told(model: Model, operation: Operation | None) -> str:
    held = _readable(model)
    if not held:
        if any(v.visible and v.is_held for v in model.versions.values()):
            return "workers that are not heard of now hold a version of it"
        return f"nobody holds all of a version of it{_lacking(model)}"
    told = ", ".join(f"version {v.number} by {_replicas(v, operation)}" for v in held[:HELD_TOLD_MAX])
    more = f" and {len(held) - HELD_TOLD_MAX} older" if len(held) > HELD_TOLD_MAX else ""
    return f"held now: {told}{more}"


def _lacking(model: Model) -> str:
    """Of the newest version of which somebody holds some shards of a layout: of which ones nobody does."""
    for version in _not_retired(model):
        for layout in version.layouts:
            missing = [str(shard) for shard in layout if not layout.of(shard).live_sources]
            if layout.counts and len(missing) < len(layout):
                whose = "the published layout" if layout is version.holdings else "another layout than the published one"
                return f" (of version {version.number}, in {whose}, nobody has all of the shards of ranks {some(missing)})"
    return ""


def _readable(model: Model) -> list[Version]:
    """Those that can be read now, the newest first."""
    return [v for v in _not_retired(model) if v.copies]


def _not_retired(model: Model) -> list[Version]:
    """The newest first, without those that a rollback is about to retire."""
    mark = -1 if model.mark is None else model.mark
    return [v for v in model.visible if v.number <= mark]


def _reads_one_shard(operation: Operation | None) -> bool:
    """Whether it takes a published shard as it is, so that other layouts are of no use to it."""
    return operation is not None and ways.first_member(operation).fits_any_layout


def _is_own(version: Version, operation: Operation | None) -> bool:
    """Whether the ranks of the group that calls have a whole copy of it themselves."""
    held = [member.holding for member in operation.group.members.values()] if operation is not None else []
    mine = [
        h
        for h in held
        if h is not None and h.version is version and h.is_source and h.member.worker.state is WorkerState.LIVE
    ]
    return bool(mine) and {h.shard for h in mine} == set(mine[0].layout)


def _replicas(version: Version, operation: Operation | None) -> str:
    own = _is_own(version, operation)
    count = version.copies - own
    if own and not count:
        return "this group itself"
    told = ("this group and " if own else "") + f"{count} {'other ' if own else ''}replica{'' if count == 1 else 's'}"
    if version.can_be_read():
        return told
    told = f"{told} of other layouts than the published one"
    if not _reads_one_shard(operation):
        return told
    return f"{told}, which this call cannot read" + (" (fetch(rank=None) can)" if version.layout_id != ALONE else "")
