"""A cluster in which the caller picks each next event: for tests of one interaction, and for
Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tensorhub.coordinator import (
    Action,
    Connected,
    Disconnected,
    Persist,
    PersistFailed,
    Received,
    Silent,
    Tick,
)
from tensorhub.messages import FromCoordinator, FromWorker, Heartbeat, HeartbeatAck
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.model.manifest import Manifest
from tensorhub.testing.sim.memory import CHUNK_BYTES, MANIFEST
from tensorhub.testing.sim.network import Link
from tensorhub.testing.sim.ports import HandlePort, SimWorkerPort
from tensorhub.testing.sim.pulling import Frame, LaneEnd, Reading, SimLane
from tensorhub.testing.sim.rendering import show
from tensorhub.testing.sim.terms import Term
from tensorhub.testing.sim.worker import SimHandle, SimWorker, WorkerUsers
from tensorhub.testing.sim.world import World
from tensorhub.types import Options
from tensorhub.worker.calls import Fence


class Choice(NamedTuple):
    """Something that could happen now."""

    kind: str
    name: str


class StepwiseCluster(World):
    """Nothing happens by itself. `choices` lists what could; `do` lets one of them happen, and
    checks everything.
    """

    fence_grace_s = 0.0

    def __init__(
        self, options: Options | None = None, *, host_bytes: int = 0, manifest: Manifest = MANIFEST
    ) -> None:
        self.log: list[str] = []
        self.ending: list[int] = []  # sessions whose end the coordinator has not noticed
        self.heartbeat_at = 0.0
        super().__init__(options, host_bytes=host_bytes, manifest=manifest)
        self.data = self.control = self.process = self
        self.users = WorkerUsers()

    def restart(self, *, kept: bool = False, lost: bool = False) -> None:
        """The coordinator dies and comes back on its durable state; `kept`: running writes have
        become durable, too.

        `lost`: without its state, as a new cluster. Then earlier publications must not come back
        (R2, G3).
        """
        self.note("the coordinator restarts")
        self.coordinator_died(kept=kept)
        if lost:
            self.lose_state()
        self.start_coordinator()
        self.ending.clear()
        for worker in self.workers.values():
            if worker.link is not None:
                worker.disconnect()
        self.ending.clear()

    # -- what follows

    def note(self, line: str) -> None:
        self.log.append(f"{self.now:7.2f}  {line}")

    def took(self, path: str) -> None:
        """Nothing is counted."""

    def handle_moved(self, handle: HandlePort) -> None:
        """It goes on when its turn comes."""

    def clock_changed(self, worker: SimWorkerPort) -> None:
        """It is looked at each time when time passes."""

    def wake_at(
        self, due: float | None, machine: object, worker: SimWorkerPort, tick: Callable[[], None]
    ) -> None:
        """Each time when time passes it is looked at."""

    def fence_begun(self, handle: HandlePort, fence: Fence) -> None:
        """It is looked at when its turn comes."""

    def access_ended(self, handle: HandlePort) -> None:
        """So it is then."""

    def leads(self, term: Term) -> bool:
        return True

    def gets_out(self, actions: list[Action]) -> list[Action]:
        return actions

    def to_be_stored(self, persist: Persist, term: Term) -> None:
        """It is stored when its turn comes."""

    def stepped(self, term: Term) -> None:
        """Everything is checked later."""

    def step_down(self, term: Term, why: str) -> None:
        """There is no other one."""

    def begin_anew(self, term: Term, why: str) -> None:
        """Its caller lets the next one begin."""

    def connect(self, worker: SimWorker) -> None:
        worker.connect()

    def connect_again(self, worker: SimWorker) -> None:
        """Its caller does."""

    def new_link(self, worker: SimWorker) -> Link:
        link = Link(next(self.sessions), self.term.party)
        self.links[link.session] = (worker, link)
        self.step(Connected(link.session, worker.incarnation, "worker"))
        return link

    def link_lost(self, worker: SimWorker, link: Link) -> None:
        self.ending.append(link.session)

    def said_up(self, worker: SimWorker, link: Link) -> None:
        """It lies there until its turn comes."""

    def said_down(self, worker: SimWorker, link: Link) -> None:
        """So does this."""

    def looked_for(self, session: int, term: Term) -> None:
        """Nothing lies unread, since the coordinator reads what comes at once."""
        self.step(Silent((session,)))

    def chunks_offered(self, handle: LaneEnd) -> None:
        """Readers look when their turn comes."""

    def lane_made(self, lane: SimLane) -> None:
        self.lanes_wanted(lane.reading)

    def lanes_wanted(self, reading: Reading) -> None:
        for lane in reading.lanes.values():
            lane.queue.extend(lane.submit(reading.start.manifest.nbytes))

    def lane_closed(self, lane: SimLane) -> None:
        lane.close()

    def lane_cut(self, lane: SimLane) -> None:
        lane.end()

    def lane_shut(self, lane: SimLane) -> None:
        lane.is_stopped = True
        if lane.access is not None:
            lane.end("lost")

    def reader_died(self, lane: SimLane) -> None:
        lane.end()

    def source_died(self, lane: SimLane) -> None:
        if lane.access is not None:
            lane.access = None
            lane.end("lost")

    # -- what can happen now

    def choices(self) -> list[Choice]:
        """Each step that could happen now, in a fixed order."""
        found: list[Choice] = []
        for name, worker in self.workers.items():
            if worker.link is not None:
                if worker.link.up:
                    found.append(Choice("up", name))
                if worker.link.down and worker.stopped_until <= self.now:
                    found.append(Choice("down", name))
        for handle in self._running_handles():
            if handle.can_do_next():
                found.append(Choice("do", handle.name))
            if handle.hooks:
                found.append(Choice("hook", handle.name))
            if self.can_read(handle):
                found.append(Choice("read", handle.name))
        found.extend(Choice("notice", str(session)) for session in self.ending)
        if self.unstored:
            found.append(Choice("store", str(min(self.unstored))))
        return found

    def _running_handles(self) -> Iterator[SimHandle]:
        """The handles of workers that are not stopped."""
        return (handle for handle in self.live_handles() if handle.worker.stopped_until <= self.now)

    def _running_workers(self) -> list[SimWorker]:
        return [
            worker
            for worker in self.workers.values()
            if worker.alive and worker.stopped_until <= self.now
        ]

    def do(self, choice: Choice) -> None:
        """Let it happen, and check everything."""
        kind, name = choice
        match kind:
            case "up":
                worker = self.workers[name]
                assert worker.link is not None
                said = worker.link.up.popleft()
                self._note_message(name, "->", said)
                self.step(Received(worker.link.session, said))
            case "down":
                worker = self.workers[name]
                assert worker.link is not None
                heard = worker.link.down.popleft()
                if heard is None:
                    worker.disconnect()
                else:
                    self._note_message(name, "<-", heard)
                    worker.hear(heard)
            case "notice":
                self.ending.remove(int(name))
                self.links.pop(int(name), None)
                self.step(Disconnected(int(name)))
            case "store":
                persist = self.unstored[int(name)]
                self.note(f"stored {show(persist.entry)}")
                self.keep(persist.entry)
                self.persisted(persist, self.term)
            case "do":
                self._named(name).do_next()
            case "hook":
                self._named(name).hook_returns()
            case "read":
                self.read(self._named(name))
        self.check()

    def _named(self, name: str) -> SimHandle:
        return next(handle for handle in self.live_handles() if handle.name == name)

    def _note_message(self, worker: str, arrow: str, message: FromWorker | FromCoordinator) -> None:
        if not isinstance(message, Heartbeat | HeartbeatAck):
            self.note(f"{worker} {arrow} {show(message)}")

    def can_read(self, handle: SimHandle) -> bool:
        """Whether its fill can go on."""
        return self._next_lane(handle) is not None

    def _next_lane(self, handle: SimHandle) -> SimLane | None:
        """The lane of its fill that has something to do."""
        lanes = self.open_lanes(handle)
        running = [lane for lane in lanes if lane.access is not None]
        able = running or [lane for lane in lanes if self._can_go_on(lane)]
        return next(iter(able or [lane for lane in lanes if self._lacks_in_vain(lane)]), None)

    def open_lanes(self, handle: LaneEnd) -> list[SimLane]:
        """Those of its fill over which something can come, in the order in which they are looked
        at.
        """
        return list(handle.pull.lanes.values()) if handle.pull is not None else []

    @staticmethod
    def _lacks_in_vain(lane: SimLane) -> bool:
        """Whether it waits for what its source lacks, while some source has what this reader
        lacks.
        """
        lanes, missing = lane.reading.lanes.values(), lane.reading.missing
        runs = [
            run
            for each in lanes
            if each.source is not None and each.source.worker.alive
            for run in each.has()
        ]
        return bool(lane.queue) and any(
            first <= chunk < first + count for first, count in runs for chunk in missing
        )

    @staticmethod
    def _can_go_on(lane: SimLane) -> bool:
        if lane.is_stopped or lane.connect():
            return True
        if not lane.queue:
            return False
        begun = lane.begin(lane.queue[0], CHUNK_BYTES)
        lane.let_go()
        return not isinstance(begun, Wait)

    def read(self, handle: SimHandle) -> None:
        """One step of a fill: end the access that runs, begin one, or find out that a source is no
        more.
        """
        lane = self._next_lane(handle)
        assert lane is not None
        if lane.access is not None:
            self.settle(lane, lane.finish())
            return
        reason = lane.connect() or ("lost" if lane.is_stopped else "")
        if reason:
            lane.end(reason)
            return
        begun = lane.begin(lane.queue[0], CHUNK_BYTES)
        if isinstance(begun, Refusal):
            lane.end("refused")
        elif isinstance(begun, Access):
            lane.queue.popleft()
            if begun.rest:
                lane.queue.appendleft(begun.rest)
        else:
            lane.settle(lane.lack())

    def settle(self, lane: SimLane, frame: Frame) -> None:
        """What its source has sent arrives."""
        lane.settle(frame)

    def fail_store(self) -> None:
        """The oldest entry that is being written cannot be."""
        record = min(self.unstored)
        del self.unstored[record]
        self.note("the store fails")
        self.step(PersistFailed(record, "disk full"))
        self.check()

    def run(self, *but: str | tuple[str, str], until: Callable[[], object] | None = None) -> None:
        """Let everything happen that can, each in its turn, until nothing is left, or `until`
        holds. `but`: choices that are not taken, and kinds of choices.
        """
        for _ in range(10_000):
            choices = [
                choice for choice in self.choices() if choice not in but and choice.kind not in but
            ]
            if (until is None and not choices) or (until is not None and until()):
                return
            self.do(choices[0])
        raise AssertionError("the cluster does not come to rest")

    def advance(self, seconds: float, *, run: bool = True) -> None:
        """Let time pass; with `run`, everything else happens as well."""
        end = self.now + seconds
        while True:
            if run:
                self.run()
            due = [self.heartbeat_at, self._coordinators_deadline()]
            due += [handle.member.next_deadline() for handle in self._running_handles()]
            due += [worker.copies.machine.next_deadline() for worker in self._running_workers()]
            due += [
                until
                for handle in self._running_handles()
                if (until := handle.fence_waits_until() or 0.0) > self.now
            ]
            when = max(self.now, min(d for d in due if d is not None))
            if when > end:
                break
            self.now = when
            self.time_passes()
        self.now = end
        self.time_passes()
        if run:
            self.run()

    def _coordinators_deadline(self) -> float | None:
        due = self.coordinator.next_deadline()
        return None if due is None else self.when(due)

    def time_passes(self) -> None:
        """Let the due events happen; owners no longer wait for chunks that they lack."""
        if self.now >= self.heartbeat_at:
            self.heartbeat_at = self.now + self.options.lease_s / 4
            for worker in self.workers.values():
                if worker.stopped_until <= self.now:
                    worker.beat()
        due = self._coordinators_deadline()
        if due is not None and due <= self.now:
            self.step(Tick())
        for worker in self._running_workers():
            worker.copies.tick()
        for handle in list(self._running_handles()):
            for lane in [
                lane
                for lane in handle.serving
                if lane.access is None and lane.queue and not lane.is_stopped
            ]:
                if lane in self.open_lanes(lane.reader) and not self._can_go_on(lane):
                    lane.settle(lane.lack())
            deadline = handle.member.next_deadline()
            if deadline is not None and deadline <= self.now:
                handle.apply(handle.member.tick(self.now))
        self.check()

    def heal(self, seconds: float = 200.0) -> None:
        """Faults are over: every worker connects, all messages arrive, deadlines pass; every call
        must have ended.
        """
        start, end = self.now, self.now + seconds
        for handle in self.live_handles():
            handle.end_access()
        while self.now < end:
            for worker in self.workers.values():
                if worker.alive and worker.link is None:
                    worker.connect()
            self.advance(2.0)
            connected = all(
                worker.link is not None for worker in self.workers.values() if worker.alive
            )
            quiet = all(handle.idle for handle in self.live_handles()) and not self.choices()
            if connected and quiet and self.now > start + 2 * self.options.lease_s:
                break
        for handle in self.live_handles():
            if handle.last_call is not None:
                self.check_over(handle.last_call)
        self.check_agreement()
