"""No byte of a version is brought into a site twice by groups of one layout, as long as nothing
goes wrong.

A group follows an earlier group of its layout in its site: the later group reads from the earlier
group all bytes that the earlier group has read from another site. Both may read bytes from another
site if the earlier group gives up, stages its fill or makes no progress, or if a holder leaves.
Groups of different layouts, and the ranks of one group, each read for themselves.

Responsible for groups whose ranks are in one site. Not responsible for copies of one shard and
fetches, which read the published layout, nor for anything after a fault: then bytes that had
arrived may be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tensorhub.messages import Start, Write
from tensorhub.testing.sim.assertion import demand
from tensorhub.testing.sim.judges.ports import JudgedCall, JudgedHandle, JudgedWorld
from tensorhub.testing.sim.layouts import tags_in
from tensorhub.testing.sim.memory import CHUNK_BYTES
from tensorhub.types import HandleState, OpKey, OpKind, Purpose
from tensorhub.worker.calls import FillCall

SLACK_S = 0.5  # until the coordinator hears what has happened, and its ranks what it says
Where = tuple[str, str]  # a content id, and a site


@dataclass(eq=False)
class _Reading:
    """What one group reads in one call."""

    key: OpKey
    content_id: str
    layout_id: str
    ranks: list[tuple[JudgedHandle, JudgedCall]]
    # who read that there when this one was told to write, and others can read it there
    before: list[_Reading]
    beside: list[_Reading]  # who was reading it there then: it may have followed one of them
    holders: list[JudgedHandle]  # who held that then, or was about to give it up
    # By published cell: bytes from other sites, and the rank that has read them there.
    entered: dict[str, list[tuple[int, int, JudgedHandle]]] = field(default_factory=dict)
    # when something has arrived at each rank, last
    moved_at: dict[JudgedHandle, float] = field(default_factory=dict)

    @property
    def can_be_followed(self) -> bool:
        """Whether groups of its layout can read there what it reads: while it is filled, unless
        that is staged.
        """
        is_staged = any(
            isinstance(call.what, FillCall) and call.what.staged for _, call in self.ranks
        )
        return all(handle.shard.serves for handle, _ in self.ranks) and (
            self.is_done or not is_staged
        )

    @property
    def lasts(self) -> bool:
        """Whether it has not ended, and no holder has left since it began; or it holds what it has
        read, and has not been asked for anything since.
        """
        is_there = all(
            handle.last_call is call
            and call.error is None
            and (not call.done or self.is_held_by(handle))
            for handle, call in self.ranks
        )
        return is_there and (self.is_done or all(map(self.is_held_by, self.holders)))

    @property
    def is_done(self) -> bool:
        return all(call.done for _, call in self.ranks)

    def moves(self, now: float, lease_s: float) -> bool:
        """Whether something has arrived at each rank within a lease, or all is there."""
        return self.is_done or now < min(self.moved_at.values()) + lease_s - SLACK_S

    def is_held_by(self, handle: JudgedHandle) -> bool:
        return _holds(handle, self.content_id)


class CrossingJudge:
    """What has entered each site of one cluster."""

    def __init__(self, world: JudgedWorld) -> None:
        self._world = world
        self._there: dict[Where, list[_Reading]] = {}
        self._bound: dict[OpKey, str] = {}  # the content id that an operation reads
        self._known: dict[OpKey, _Reading] = {}

    def told(self, handle: JudgedHandle, message: Start | Write) -> None:
        """Its group is told which version it reads, or (with the first sources) to write."""
        key = message.key
        if isinstance(message, Start):
            self._bound[key] = message.version.content_id
        may_write = isinstance(message, Write) or message.write
        if (
            not may_write
            or key in self._known
            or key not in self._bound
            or not self._world.is_unharmed()
        ):
            return
        content_id = self._bound[key]
        handles = [
            h
            for h in (handle, *self._world.mates(handle))
            if h.last_call is not None and h.last_call.key == key
        ]
        ranks = [(h, h.last_call) for h in handles if h.last_call is not None]
        sites = {h.worker.location.site for h, _ in ranks}
        is_copy = any(h.shard.purpose not in (Purpose.USE, Purpose.PREFETCH) for h, _ in ranks)
        is_fetch = any(
            isinstance(call.what, FillCall) and call.what.kind is OpKind.FETCH for _, call in ranks
        )
        if len(ranks) < handle.shard.world_size or len(sites) > 1 or is_copy or is_fetch:
            return
        there = self._there.setdefault((content_id, sites.pop()), [])
        now, lease_s = self._world.now, self._world.options.lease_s / self._world.clock_rate
        holders = [
            each
            for each in self._world.live_handles()
            if _holds(each, content_id) or _gives_up(each, content_id)
        ]
        beside = [each for each in there if each.lasts and not each.is_done]
        self._known[key] = reading = _Reading(
            key, content_id, handle.layout_id, ranks, [], beside, holders
        )
        alike = [
            each for each in there if each.layout_id == handle.layout_id and each.can_be_followed
        ]
        reading.before = [each for each in alike if each.lasts and each.moves(now, lease_s)]
        reading.moved_at = dict.fromkeys(handles, now)
        there.append(reading)

    def arrived(
        self, handle: JudgedHandle, source: JudgedHandle, content_id: str, cells: Iterable[str]
    ) -> None:
        """A reader has got what these hold, and had not read it before."""
        site, record = handle.worker.location.site, handle.last_call
        reading = (
            self._known.get(record.key) if record is not None and record.key is not None else None
        )
        if reading is None or not self._world.is_unharmed():
            return
        reading.moved_at[handle] = self._world.now
        if source not in reading.holders and reading.is_held_by(source):
            reading.holders.append(source)  # it was published just before
        if site == source.worker.location.site:
            return
        others = [
            other
            for other in self._there[content_id, site]
            if (other in reading.before or reading in other.before)
            and other.lasts
            and reading.lasts
            and all(each.lasts for each in reading.beside)
        ]
        for tag, first, end in _pieces(cells):
            for other in others:
                found = other.entered.get(tag, ())
                twice = (
                    who
                    for least, most, who in found
                    if least < end and first < most and who is not handle
                )
                who = next(twice, None)
                demand(
                    who is None,
                    "partial fills: {} reads {} of {} from {}, which {} has brought to {!r}",
                    handle,
                    tag,
                    content_id,
                    source,
                    who,
                    site,
                )
            reading.entered.setdefault(tag, []).append((first, end, handle))


def _holds(handle: JudgedHandle, content_id: str) -> bool:
    content = handle.member.content
    return (
        content is not None
        and content.version.content_id == content_id
        and handle.member.state is HandleState.READY
    )


def _gives_up(handle: JudgedHandle, content_id: str) -> bool:
    content = handle.member.content
    is_its = content is not None and content.version.content_id == content_id
    return is_its and handle.member.state is HandleState.DRAINING


def _pieces(cells: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Which bytes of which published cells these are."""
    for cell in cells:
        for tag, of in tags_in(cell):
            first, end = map(int, of.split("-")) if of else (0, CHUNK_BYTES)
            yield tag, first, end
