"""A pure cluster in which everything goes wrong that its caller asks for: each kind of `Fault`, without a clock.

What is slow, late, stopped or cut off is a choice that is held back, or that comes after all the others; what a party finds
out by waiting, it finds out when time passes. Counts only what really struck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

from tensorhub.coordinator import DOOR, Disconnected, Received
from tensorhub.model.manifest import Manifest
from tensorhub.testing import Choice, Fault, SimHandle, SimWorker, StepwiseCluster
from tensorhub.testing.sim.network import COORDINATOR, Link, Partitions
from tensorhub.testing.sim.pulling import Frame, LaneEnd, SimLane

SLOW_S = 15.0  # how long a way between two workers is slow


class FaultyCluster(StepwiseCluster):
    """`ways`, `stopped_until`, `slow_store_until` and the counters of what is still to strike are the caller's to set."""

    def __init__(self, *, host_bytes: int, manifest: Manifest) -> None:
        self.happened: Counter[Fault] = Counter()
        self.partitions = Partitions()
        self.slow_store_until = 0.0
        self.unread_until: dict[str, float] = {}  # by worker: until when its words, or its connection's end, lie unread
        self.doubles: Counter[str] = Counter()  # by worker: messages that will come twice
        self.garbled: Counter[str] = Counter()  # by worker: messages that will be damaged
        self.damaged: Counter[str] = Counter()  # frames of chunks that will be, under ""
        self.failing: Counter[str] = Counter()  # writes that will fail, under ""
        self.late_tails: Counter[str] = Counter()  # by worker: connections whose tail will come late, if there is one
        self.tails: dict[int, tuple[SimWorker, Link]] = {}  # sessions whose worker's end is gone, with what comes late
        self.for_lanes: list[Fault] = []  # STALL and SLOW that strike the next lanes
        self.later: list[tuple[float, Callable[[], None]]] = []
        super().__init__(host_bytes=host_bytes, manifest=manifest)

    def strikes(self, kind: Fault, left: Counter[str], name: str = "") -> bool:
        """Whether one of those that are left strikes here; then it is used up."""
        if not left[name]:
            return False
        left[name] -= 1
        self.happened[kind] += 1
        self.note(f"{kind} {name}")
        return True

    # -- what can happen now

    def choices(self) -> list[Choice]:
        found = [choice for choice in super().choices() if self._may(choice)]
        found += [Choice("tail", str(session)) for session in self.tails]
        return sorted(found, key=self._is_slow)

    def _is_unread(self, worker: SimWorker) -> bool:
        return self.unread_until.get(worker.name, 0.0) > self.now

    def _may(self, choice: Choice) -> bool:
        match choice.kind:
            case "up" if self._is_unread(self.workers[choice.name]):
                return False
            case "notice" if int(choice.name) in self.links and self._is_unread(self.links[int(choice.name)][0]):
                return False
            case "up" | "down":
                worker = self.workers[choice.name]
                assert worker.link is not None
                return worker.link.held_until <= self.now and not self._cut_off(worker)
            case "notice" if int(choice.name) in self.links:
                worker, _ = self.links[int(choice.name)]
                return int(choice.name) not in self.tails and not self._cut_off(worker)
            case "store":
                return self.slow_store_until <= self.now
            case _:
                return True

    def _is_slow(self, choice: Choice) -> bool:
        return choice.kind == "read" and all(self._crawls(lane) for lane in self.open_lanes(self._named(choice.name)))

    def _crawls(self, lane: SimLane) -> bool:
        return self.partitions.slow_until(lane.reader.worker.name, lane.grant.source) > self.now

    def _cut_off(self, worker: SimWorker) -> bool:
        return self.partitions.blocked_until(worker.name, COORDINATOR) > self.now

    def open_lanes(self, handle: LaneEnd) -> list[SimLane]:
        return sorted(filter(self._passes, super().open_lanes(handle)), key=self._crawls)

    def _passes(self, lane: SimLane) -> bool:
        reader, source = lane.reader.worker, self.workers[lane.grant.source]
        blocked = self.partitions.blocked_until(reader.name, source.name) > self.now
        return not lane.stalled_until and not blocked and max(reader.stopped_until, source.stopped_until) <= self.now

    def do(self, choice: Choice) -> None:
        match choice.kind:
            case "tail":
                self._late(int(choice.name))
            case "up" | "down":
                self._pass_on(choice, self.workers[choice.name])
            case "store" if self.strikes(Fault.STORE_FAIL, self.failing):
                self.fail_store()
            case _:
                super().do(choice)

    def _late(self, session: int) -> None:
        worker, link = self.tails[session]
        said = link.up.popleft()
        if not link.up:
            del self.tails[session]
        self._note_message(worker.name, "-> (late)", said)
        self.step(Received(session, said))
        self.check()

    def _pass_on(self, choice: Choice, worker: SimWorker) -> None:
        """A message arrives: damaged (which costs the connection), once, or twice."""
        link = worker.link
        assert link is not None
        message = (link.up if choice.kind == "up" else link.down)[0]
        if message is not None and self.strikes(Fault.CORRUPT, self.garbled, worker.name):
            worker.disconnect()
            return
        super().do(choice)
        if message is None or worker.link is not link or not self.strikes(Fault.DUPLICATE, self.doubles, worker.name):
            return
        if choice.kind == "up":
            self.step(Received(link.session, message))  # type: ignore[arg-type]
        else:
            worker.hear(message)  # type: ignore[arg-type]
        self.check()

    # -- what follows

    def said_up(self, worker: SimWorker, link: Link) -> None:
        if link.is_lossy:
            self.happened[Fault.DROP] += 1
            link.up.pop()

    def said_down(self, worker: SimWorker, link: Link) -> None:
        if link.is_lossy:
            self.happened[Fault.DROP] += 1
            if link.down.pop() is None and link.session not in self.ending:
                self.ending.append(link.session)  # the coordinator's end is closed, whatever the worker hears

    def link_lost(self, worker: SimWorker, link: Link) -> None:
        if link.session not in self.ending:
            super().link_lost(worker, link)
        if link.up and link.session in self.links and self.strikes(Fault.REORDER, self.late_tails, worker.name):
            self.tails[link.session] = (worker, link)

    def looked_for(self, session: int) -> None:
        worker, _ = self.links.get(session, (None, None))
        known = [worker] if worker is not None else self.workers.values() if session == DOOR else []
        if not any(self._is_unread(each) for each in known):
            super().looked_for(session)

    def restart(self, *, kept: bool = False, lost: bool = False) -> None:
        super().restart(kept=kept, lost=lost)
        self.tails.clear()

    def step(self, event: object) -> None:
        if isinstance(event, Disconnected):
            self.tails.pop(event.session, None)
        super().step(event)  # type: ignore[arg-type]

    def settle(self, lane: SimLane, frame: Frame) -> None:
        if frame.chunks and self.strikes(Fault.CORRUPT, self.damaged):
            first, *rest = frame.chunks
            frame = Frame(chunks=((first[0], "damaged", first[2]), *rest))
        super().settle(lane, frame)

    def lane_made(self, lane: SimLane) -> None:
        lane.heard_at = self.now
        self.spoil(lane)
        super().lane_made(lane)

    def spoil(self, lane: SimLane) -> None:
        """It may be one that goes wrong."""
        if not self.for_lanes:
            return
        kind = self.for_lanes.pop()
        self.happened[kind] += 1
        if kind is Fault.STALL:
            lane.stalled_until = inf
        else:
            self.partitions.slow(lane.reader.worker.name, lane.grant.source, self.now + SLOW_S)

    # -- time

    def time_passes(self) -> None:
        beats = self.now >= self.heartbeat_at
        super().time_passes()
        due, self.later = (
            [act for when, act in self.later if when <= self.now],
            [(when, act) for when, act in self.later if when > self.now],
        )
        for act in due:
            act()
        for worker in self.workers.values():
            if beats and worker.alive and worker.stopped_until <= self.now:
                self._keep_connected(worker)
        for handle in list(self._running_handles()):
            self._watch(handle)

    def _keep_connected(self, worker: SimWorker) -> None:
        """As `drivers.keeper`: give up a connection in which nothing comes back, and make one where there is none."""
        link = worker.link
        if link is not None:
            if worker.beats.is_in_vain():
                worker.disconnect()
        elif not self._cut_off(worker):
            worker.connect()

    def _watch(self, handle: SimHandle) -> None:
        """Give up sources that are silent for too long."""
        for lane in list(handle.pull.lanes.values()) if handle.pull is not None else []:
            if self._passes(lane):
                lane.heard_at = self.now
            elif self.now - lane.heard_at >= self.options.stall_timeout_s:
                lane.end("stalled")

    def heal(self, seconds: float = 200.0) -> None:
        """What is broken is mended; then everything comes to rest."""
        self.partitions.heal()
        self.slow_store_until = 0.0
        self.unread_until.clear()
        self.for_lanes.clear()
        for left in (self.doubles, self.garbled, self.damaged, self.failing, self.late_tails):
            left.clear()
        for _, act in self.later:
            act()
        self.later.clear()
        for worker in self.workers.values():
            worker.stopped_until = 0.0
            if worker.link is not None:
                worker.link.held_until = 0.0
                if worker.link.is_lossy:
                    worker.disconnect()
        for handle in self.live_handles():
            handle.hook_error = None
            for lane in handle.pull.lanes.values() if handle.pull is not None else ():
                lane.stalled_until = 0.0
        super().heal(seconds)
