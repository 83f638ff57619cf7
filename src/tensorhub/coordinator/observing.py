"""What observers are told: what has happened, which updates there were, and cumulative counters.

Of each update the coordinator notes when it handled which message of which rank, by its own clock
(the skeleton), and the timings that workers send afterwards. `explaining` makes a critical path of
that. No decision depends on any of it. Everything is bounded, however many workers say whatever:
timings count for the update and the lease of their sender only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, TypeVar

from tensorhub.coordinator import explaining
from tensorhub.coordinator.entities import (
    Entity,
    Operation,
    RankPart,
    ReadLease,
    Version,
    Worker,
)
from tensorhub.coordinator.explaining import Known, Lane, Rank, Update
from tensorhub.coordinator.states import LeaseState, OperationState, PartState, VersionState
from tensorhub.errors import TensorHubError, VersionUnavailable
from tensorhub.messages import Fill, Took
from tensorhub.observed import (
    EVENTS_PAGE_MAX,
    PHASE_NAMES,
    UPDATES_PAGE_MAX,
    ClusterEvent,
    Explanation,
    LinkTiming,
    ServedTiming,
    UpdateRow,
)
from tensorhub.types import OpKey

EVENTS_MAX = 1024
EVENT_CHARS_MAX = 300  # of an event's text
# finished updates, of one model and of all; and the same of read-only workers
UPDATES_MAX = {False: (32, 512), True: (8, 64)}
RANKS_KEPT_MAX = 8  # of a finished update
LANES_OF_RANK_MAX = 64
LANES_KEPT_MAX = 2**14  # of all finished updates
WAITS_MAX = 32  # of one update
BESIDE_MAX = 64  # other readers with which one is compared
LATE_S = 0.02  # less than that is no lateness
LATE_KEPT_MAX = 256
CLAIMED_S_MAX = 10.0**6  # what a worker may claim that something took
BYTES_READ_MAX = 2**63  # what all ranks of an update may claim together
# these have labels of their own in any case, and so do so many others, whatever workers invent
OWN_TRANSPORTS = frozenset({"cuda_ipc", "shm", "cma", "rdma", "nixl", "archive", "tcp"})
TRANSPORTS_MAX = 32
KINDS = ("live", "host copy", "seed", "archive")
KNOWN_NAMED_MAX = 8
RECOVERED = ("recovered", "no holder is known yet")  # why versions become what they were
SECONDS_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

T = TypeVar("T", LinkTiming, ServedTiming)
Rates = Callable[[str], Mapping[str, Sequence[tuple[Lane, float]]]]  # of a model; of one answer


class Histogram:
    """How many values were at most so large as each of SECONDS_BOUNDS, and larger ones."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BOUNDS) + 1)  # each value once
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(SECONDS_BOUNDS, value)] += 1
        self.sum += value


@dataclass(slots=True, eq=False)
class Counters:
    """Since this coordinator began."""

    # by `PHASE_NAMES`, and "total": of ranks' calls, as they say
    update_seconds: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in (*PHASE_NAMES, "total")}
    )
    # by transport and kind of source
    bytes_total: Counter[tuple[str, str]] = field(default_factory=Counter)
    # of groups: by "committed", "unchanged", "again" (the call is repeated), or the error's name
    updates_total: Counter[str] = field(default_factory=Counter)
    # by the name of the error: questions and sessions that were refused
    refused_total: Counter[str] = field(default_factory=Counter)
    retries_total: int = 0  # reads that failed, and went on elsewhere
    corrupt_total: int = 0  # of these, because of wrong bytes


class Observations:
    """Of one coordinator. `wall_offset_s` is added to its times, for people; `epoch`: its own."""

    def __init__(self, wall_offset_s: float, epoch: int = 0) -> None:
        self.wall_offset_s = wall_offset_s
        self._epoch = epoch
        self.counters = Counters()
        self.last_event = 0  # the number of the newest event
        self._events: deque[ClusterEvent] = deque(maxlen=EVENTS_MAX)
        self._running: dict[OpKey, Update] = {}
        # the oldest first; by whether a read-only worker has called
        self._finished: dict[bool, dict[OpKey, Update]] = {False: {}, True: {}}
        # of which model so many are kept
        self._kept: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._of_model: dict[str, dict[OpKey, Update]] = {}  # all of these, the oldest call first
        self._lanes: dict[str, Lane] = {}  # theirs, by lease
        self._is_behind = False
        self._late: deque[tuple[float, float]] = deque(maxlen=LATE_KEPT_MAX)  # from, until

    def __repr__(self) -> str:
        finished = sum(map(len, self._finished.values()))
        return f"<Observations: {self.last_event} events, {finished} updates>"

    @property
    def running(self) -> Set[OpKey]:
        """The updates that have not ended."""
        return self._running.keys()

    # ----------------------------------------------------------------------------------------------
    # events

    def happened(
        self,
        now: float,
        kind: str,
        model: str = "",
        version: int | None = None,
        worker: str = "",
        text: str = "",
    ) -> None:
        """Keep an event."""
        self.last_event += 1
        what = (kind, model, version, worker, text[:EVENT_CHARS_MAX], self._epoch)
        self._events.append(ClusterEvent(self.last_event, self.clock(now), *what))

    def clock(self, now: float) -> float:
        """That time, for people."""
        return max(0.0, now + self.wall_offset_s)

    def events_after(self, number: int) -> tuple[tuple[ClusterEvent, ...], bool]:
        """The events that are kept with larger numbers, the oldest first, at most EVENTS_PAGE_MAX;
        and whether there are more.
        """
        kept = len(self._events)
        first = min(max(0, kept - (self.last_event - number)), kept)
        last = min(first + EVENTS_PAGE_MAX, kept)
        return tuple([self._events[place] for place in range(first, last)]), last < kept

    # ----------------------------------------------------------------------------------------------
    # the skeleton of an update

    def called(self, now: float, part: RankPart) -> None:
        """A rank has called."""
        operation, call = part.operation, part.call
        if not isinstance(call, Fill):
            return
        update = self._running.get(operation.key)
        if update is None:
            kind, size = operation.kind.value, operation.group.world_size
            update = Update(operation.key, kind, size, call.staged, now)
            self._running[operation.key] = update
            self._of_model.setdefault(operation.key.model, {})[operation.key] = update
        worker = part.member.worker
        # each earlier one once, and none of another group
        its = operation.key.model, operation.key.group
        earlier = (key for key in dict.fromkeys(call.former) if (key.model, key.group) == its)
        former = tuple([key for key in earlier if key != operation.key])
        update.calls += 1
        update.ranks[part.rank] = Rank(
            part.rank, worker.name, worker.incarnation, now, call.hold, former
        )

    def waits(self, now: float, operation: Operation, name: str) -> None:
        """All ranks wait for the same thing from now on: see `PART_NAMES`."""
        update = self._running.get(operation.key)
        if update is None or len(update.waits) >= WAITS_MAX:
            return
        if not update.waits or update.waits[-1][1] != name:
            update.waits.append((now, name))

    def lent(self, now: float, lease: ReadLease) -> None:
        """A rank may read from one more source."""
        rank = self._rank(lease.part)
        if rank is None:
            return
        if rank.leased_at is None:
            rank.leased_at = now
        rank.sourceless_s += now - rank.sourceless_at if rank.sourceless_at is not None else 0.0
        rank.sourceless_at = None
        if len(rank.lanes) < LANES_OF_RANK_MAX:
            source, fills = lease.holding.member.worker, None
            upstream = lease.holding.member.part
            if not lease.is_of_whole and upstream is not None:
                fills = upstream.operation.key, upstream.rank
            lane = Lane(source.name, source.incarnation, fills, now)
            rank.lanes[lease.id] = self._lanes[lease.id] = lane

    def read_failed(self, now: float, lease: ReadLease, reason: str, detail: str) -> None:
        """A reader has given a source up."""
        is_corrupt, reader = reason == "corrupt", lease.part.member.worker
        self.counters.retries_total += 1
        self.counters.corrupt_total += is_corrupt
        if not reader.read_only:
            info, source = lease.holding.version.info, lease.holding.member.worker.name
            text = f"{reader.name} has read from {source}: {reason}: {detail}"
            kind = "corrupt" if is_corrupt else "source_failed"
            self.happened(now, kind, info.model, info.version, source, text)

    def became(self, now: float, entity: Entity, before: object, why: str) -> None:
        """An entity has another state than `before`."""
        # `match` would take longer, and this is called very often
        if type(entity) is RankPart:
            self._part_became(now, entity)
        elif type(entity) is ReadLease:
            self._lease_became(now, entity)
        elif type(entity) is Operation:
            self._operation_became(now, entity)
        elif type(entity) is Version and why not in RECOVERED:
            self._version_became(now, entity, before, why)

    def _part_became(self, now: float, part: RankPart) -> None:
        update = self._running.get(part.operation.key)
        rank = update.ranks.get(part.rank) if update is not None else None
        if rank is None or update is None:
            return
        state = part.state
        if state is PartState.VOTED:
            rank.agreed_at = now
        elif state is PartState.CLAIMING:
            rank.verified_at = now
        elif state is PartState.READY:
            rank.ready_at = now
        elif update.written_at is None:
            update.written_at = now

    def _lease_became(self, now: float, lease: ReadLease) -> None:
        if lease.state not in (LeaseState.RELEASED, LeaseState.FENCING):
            return
        lane, part = self._lanes.get(lease.id), lease.part
        if lane is not None and lane.until is None:
            lane.until = now
        rank = self._rank(part) if part.reads and [*part.leases] == [lease.id] else None
        if rank is not None:
            rank.sourceless_at = now

    def _version_became(self, now: float, version: Version, before: object, why: str) -> None:
        info = version.info
        if version.state is VersionState.AVAILABLE:
            kind = "published" if before is VersionState.STAGED else "readable"
            self.happened(now, kind, info.model, info.version)
        elif before is VersionState.AVAILABLE and version.state is VersionState.UNAVAILABLE:
            self.happened(now, "unpublished", info.model, info.version, "", why)

    def _operation_became(self, now: float, operation: Operation) -> None:
        update = self._running.get(operation.key)
        if update is None:
            return
        if operation.state is OperationState.RUNNING:
            update.bound_at, update.info = now, operation.bound.info
            update.waits.append((now, "source"))
        elif operation.state is OperationState.PREPARED:
            update.prepared_at = now
        elif operation.state is OperationState.COMMITTED:
            self._end(now, operation, "unchanged" if update.written_at is None else "committed")

    def failed(
        self, now: float, operation: Operation, error: TensorHubError, *, again: bool
    ) -> None:
        """An operation is aborted. `again`: its ranks repeat their call."""
        key, bound = operation.key, operation.version
        if operation.parts and not (again or operation.is_read_only):
            number = bound.number if bound is not None else None
            text = f"{operation.kind}: {type(error).__name__}: {error}"
            self.happened(now, "failed", key.model, number, key.group, text)
        self._end(now, operation, "again" if again else type(error).__name__)

    def _end(self, now: float, operation: Operation, outcome: str) -> None:
        update = self._running.pop(operation.key, None)
        if update is None:
            return
        self.counters.updates_total[outcome] += 1
        update.ended_at, update.outcome = now, outcome
        if outcome == "unchanged":
            self._drop(update)
            return
        read_only = operation.is_read_only
        if outcome == "committed" and update.info is not None and not read_only:
            worker, kind = operation.key.group, f"{operation.kind}"
            self.happened(now, "updated", operation.key.model, update.info.version, worker, kind)
        self._keep_slowest(update)
        finished, kept, model = self._finished[read_only], self._kept[read_only], update.key.model
        finished[update.key] = update
        kept[model] += 1
        of_model, of_all = UPDATES_MAX[read_only]
        if kept[model] > of_model:
            oldest = next(key for key in finished if key.model == model)
            self._forget(oldest, read_only=read_only)
        while len(finished) > of_all or (len(self._lanes) > LANES_KEPT_MAX and len(finished) > 1):
            self._forget(next(iter(finished)), read_only=read_only)

    def _keep_slowest(self, update: Update) -> None:
        """Keep the ranks that the critical path may pass, and the slowest ones."""
        if len(update.ranks) <= RANKS_KEPT_MAX:
            return
        ranks = list(update.ranks.values())
        decisive = (
            min(ranks, key=lambda rank: rank.called_at),
            max(ranks, key=lambda rank: rank.called_at),
            max(ranks, key=lambda rank: rank.ready_at or 0.0),
        )
        slowest = sorted(ranks, key=lambda rank: -(rank.agreed_at or math.inf))
        kept = dict.fromkeys([*decisive, *slowest])
        for rank in list(kept)[RANKS_KEPT_MAX:]:
            del update.ranks[rank.rank]
            for lease in rank.lanes:
                self._lanes.pop(lease, None)
            update.others += 1

    def _forget(self, key: OpKey, *, read_only: bool) -> None:
        """Forget a finished update."""
        kept = self._kept[read_only]
        kept[key.model] -= 1
        if not kept[key.model]:
            del kept[key.model]
        self._drop(self._finished[read_only].pop(key))

    def _drop(self, update: Update) -> None:
        for lease in [lease for rank in update.ranks.values() for lease in rank.lanes]:
            self._lanes.pop(lease, None)
        of_model = self._of_model[update.key.model]
        del of_model[update.key]
        if not of_model:
            del self._of_model[update.key.model]

    def _rank(self, part: RankPart) -> Rank | None:
        update = self._running.get(part.operation.key)
        return update.ranks.get(part.rank) if update is not None else None

    # ----------------------------------------------------------------------------------------------
    # what workers and the shell say

    def took(self, worker: Worker, message: Took, *, is_its: bool) -> bool:
        """A rank says how long its call took: whether that counts, as it does once. `is_its`: the
        sender is that rank now.
        """
        update = self._find(message.key)
        if update is None:
            return False
        rank = update.ranks.get(message.rank)
        if rank is None and is_its and update.others:
            update.others -= 1
        elif rank is None or rank.took is not None or rank.incarnation != worker.incarnation:
            return False
        nbytes_max = 4 * update.info.nbytes if update.info is not None else 0
        lanes = rank.lanes if rank is not None else {}
        links = [
            _sane(link, nbytes_max) for link in message.links if rank is None or link.lease in lanes
        ]
        phases = {name: _claimed(s) for name, s in message.phases if name in PHASE_NAMES}
        seconds, counters = _claimed(message.seconds), self.counters
        is_failed = update.outcome not in ("running", "committed")
        for name, value in () if is_failed else (*phases.items(), ("total", seconds)):
            counters.update_seconds[name].add(value)
        for link in links:
            known = {transport for transport, _ in counters.bytes_total} | OWN_TRANSPORTS
            is_known = link.transport in known or len(known) < len(OWN_TRANSPORTS) + TRANSPORTS_MAX
            label = link.transport if is_known else "other"
            kind = link.kind if link.kind in KINDS else "other"
            counters.bytes_total[label, kind] += link.nbytes
            update.bytes_read = min(update.bytes_read + link.nbytes, BYTES_READ_MAX)
        if rank is not None:
            sane = (seconds, tuple(phases.items()), tuple(links))
            rank.took = Took(update.key, rank.rank, *sane)
        return True

    def served(self, incarnation: str, timing: ServedTiming) -> None:
        """A source says what serving a reader cost it."""
        lane = self._lanes.get(timing.lease)
        if lane is not None and lane.incarnation == incarnation:
            lane.served = _sane(timing, 2**63)

    def late(self, now: float, late_s: float, *, is_behind: bool) -> None:
        """The shell has found that an event waited so long for its turn, until now. `is_behind`:
        too long.
        """
        if is_behind and not self._is_behind:
            text = f"what comes waits {late_s:.1f} s for its turn"
            self.happened(now, "behind", "", None, "", text)
        self._is_behind = is_behind
        if late_s > LATE_S:
            self._late.append((now - late_s, now))

    # ----------------------------------------------------------------------------------------------
    # answers

    def updates(self, now: float, model: str | None) -> tuple[UpdateRow, ...]:
        """At most UPDATES_PAGE_MAX, the newest call first."""
        if model is not None:
            found = list(self._of_model.get(model, {}).values())
        else:
            found = [*self._running.values()]
            found += [each for kept in self._finished.values() for each in kept.values()]
        found.sort(key=lambda update: update.began_at)
        known, newest = self._known(), found[: -UPDATES_PAGE_MAX - 1 : -1]
        return tuple([self._row(now, update, known) for update in newest])

    def _row(self, now: float, update: Update, known: Known) -> UpdateRow:
        found = self._explained(now, update, known)
        slowest = explaining.subject(update)
        longest = max(found.parts, key=lambda part: part.seconds, default=None)
        return UpdateRow(
            update.key,
            update.info.version if update.info is not None else None,
            update.call,
            update.outcome,
            found.ended_at,
            found.seconds,
            slowest.worker,
            slowest.took.phases if slowest.took is not None else (),
            update.bytes_read,
            longest.name if longest is not None else "",
            found.sentence,
        )

    def explanation(
        self, now: float, model: str, version: int | None, group: str | None
    ) -> Explanation:
        """Of the newest update of the model that fits: to that version (None: of the newest update
        that is bound to one), by that group (None: the slowest one). Raises VersionUnavailable if
        none is known.
        """
        found = [
            update
            for update in self._of_model.get(model, {}).values()
            if (group is None or update.key.group == group)
            and (version is None or (update.info is not None and update.info.version == version))
        ]
        if not found:
            which = "" if version is None else f" to version {version}"
            by = "" if group is None else f" by group {group!r}"
            text = (
                f"no update of {model!r}{which}{by} is known to this coordinator: it keeps the "
                f"last {UPDATES_MAX[False][0]} of a model"
            )
            groups = {key.group for key in self._of_model.get(model, ())}
            named = ", ".join(sorted(groups or self._of_model)[:KNOWN_NAMED_MAX])
            what = f"of {model!r} those of groups" if groups else "those of models"
            raise VersionUnavailable(f"{text}; known are {what} {named}" if named else text)
        known = self._known()
        if group is None:
            newest = max(found[::-1], key=lambda each: (each.info is not None, each.began_at)).info
            found = [each for each in found if each.info == newest]
            return self._explained(now, max(found, key=lambda each: each.wall_s(now)), known)
        return self._explained(now, found[-1], known)

    def committed(self, now: float, model: str, most: int) -> list[Explanation]:
        """Of the newest updates of the model that are committed."""
        found = [each for each in self._of_model[model].values() if each.outcome == "committed"]
        known = self._known()
        return [self._explained(now, update, known) for update in found[-most:]]

    def _known(self) -> Known:
        """For one answer."""
        return Known(self._find, self._late, partial(_beside, cache(self._rates)))

    def _explained(self, now: float, update: Update, known: Known) -> Explanation:
        return explaining.explanation(update, now, self.wall_offset_s, known)

    def _find(self, key: OpKey) -> Update | None:
        found = self._running.get(key)
        return found or self._finished[False].get(key) or self._finished[True].get(key)

    def _rates(self, model: str) -> dict[str, list[tuple[Lane, float]]]:
        """How fast ended updates have read from each source, in bytes per second; by its
        incarnation, in the order in which the reads began.
        """
        found: dict[str, list[tuple[Lane, float]]] = {}
        for update in self._of_model.get(model, {}).values():
            for rank in update.ranks.values() if update.outcome != "running" else ():
                for link in rank.took.links if rank.took is not None else ():
                    if link.seconds:
                        lane = rank.lanes[link.lease]
                        of_source = found.setdefault(lane.incarnation, [])
                        of_source.append((lane, link.nbytes / link.seconds))
        for of_source in found.values():
            of_source.sort(key=_since)
        return found


def _since(of_lane: tuple[Lane, float]) -> float:
    return of_lane[0].since


def _beside(rates: Rates, update: Update, lane: Lane) -> list[float]:
    """Those of other readers of the model that have read from the same source at the same time: of
    the BESIDE_MAX that began last.
    """
    of_source = rates(update.key.model).get(lane.incarnation, ())
    until = math.inf if lane.until is None else lane.until
    end = bisect_left(of_source, until, key=_since)
    among = of_source[max(0, end - BESIDE_MAX) : end]
    return [rate for other, rate in among if other.is_beside(lane)]


def _claimed(seconds: float) -> float:
    """What a worker says that something took, within bounds."""
    return min(max(0.0, seconds), CLAIMED_S_MAX) if not math.isnan(seconds) else 0.0


def _sane(timing: T, nbytes_max: int) -> T:
    """The same, with all figures within bounds."""
    sane: dict[str, Any] = {}
    for each in fields(timing):
        value = getattr(timing, each.name)
        if each.name in ("nbytes", "segments", "resent"):
            sane[each.name] = min(max(0, value), nbytes_max)
        elif isinstance(value, int | float):
            sane[each.name] = _claimed(value)
    return replace(timing, **sane)
