"""What goes wrong in a simulation: each kind of `Fault`, done to a victim that a seed picks.

A new kind gets its case in `Injector._inject`. Counts only what really happened.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from typing import Protocol

from tensorhub.coordinator import Action, Send
from tensorhub.messages import FromCoordinator, FromWorker, Outcome, Prepared
from tensorhub.testing.drivers.parts import DAMAGE, Whole
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.faults import KINDS_LEAST, Fault, FaultPlan
from tensorhub.testing.sim.handle import BrokenHook
from tensorhub.testing.sim.network import COORDINATOR, STANDBY, Link
from tensorhub.testing.sim.ports import HandlePort
from tensorhub.testing.sim.pulling import SimLane
from tensorhub.testing.sim.sites import HERE
from tensorhub.testing.sim.worker import SimHandle, SimWorker, WorkerUsers
from tensorhub.testing.sim.world import World
from tensorhub.types import HandleState
from tensorhub.worker.filling import Filling

COMES_BACK_S = 0.05  # a worker that has lost its connection
SHORT_S = (0.05, 0.5, 2.0)
LONG_S = (0.5, 3.0, 8.0, 15.0)
BEHIND_LEASES = (1.1, 4.0)  # within 2.6 an owner that is cut off may have given up what it held
CUT_OFF_LEASES = (1.3, 2.0)  # a holder that asks to leave
# At most so far a clock jumps, and once in so many leases: with the clocks that drift less than the
# margin of a lease.
JUMP_LEASES, JUMP_EVERY_LEASES = 0.2, 4.0
STAGED_CANCELS = 0.3  # of the votes for what is staged, where users cancel calls
FENCED_CANCELS = 0.3  # of the fills whose fence has to wait, likewise
AMBUSHES = 0.4  # of all partitions, drops and crashes of the coordinator
FORGETS = (1, 1, 2, 5, 20)  # entries that an older copy of the state lacks
ABSENT_S = 3.0  # at least: time for others to go on
CALMER = 2  # times half as many faults, for as many more events as a seed has at least
CALM_MAX = 8  # times
BROADER_EACH = 200  # events, until there were kinds enough


class StruckUsers(WorkerUsers):
    """Users that faults strike. These make no mistakes, and are neither restarted nor preempted."""

    hasty_until = 0.0  # calls have hardly any time

    def differ(self) -> None:
        """The ranks of some group will not call alike."""

    def restart_one(self) -> bool:
        """A dead process is started again. Whether there was one."""
        return False

    def preempt(self, worker: SimWorker) -> bool:
        """It is told to go, with little time. False: it is not spot."""
        return False

    def may_die(self, worker: SimWorker) -> bool:
        """Whether it may crash, or be preempted."""
        return True


class StruckCoordinator(Protocol):
    """The coordinator's process."""

    def crash(
        self,
        *,
        kept: float,
        down_s: float,
        lost: bool = False,
        elsewhere: bool = False,
        forgets: int = 0,
    ) -> None:
        """The coordinator dies, and is back after so long, perhaps on another machine; `kept`: that
        share of the running writes becomes durable; `lost`: all its state is gone; `forgets`: so
        many of the last entries are.
        """

    def split(self, *, lease_s: float, stops_s: float, believes_s: float) -> bool:
        """Another one leads after `lease_s`, while it is stopped, or cut off from its store. It
        notices `believes_s` too late. Whether that can be.
        """

    def heal(self) -> None:
        """What waits for its store is written now, and no former leader goes on."""


class Injector:
    """The faults of one run."""

    users: StruckUsers  # set before they begin, as is the next one
    coordinator: StruckCoordinator

    def __init__(
        self, world: World, timeline: Timeline, plan: FaultPlan, events_least: int
    ) -> None:
        self._world = world
        self._timeline = timeline
        self._random = timeline.random
        self.plan = plan
        self._events_least = events_least
        self.happened: Counter[str] = Counter()
        self.part = Whole()  # of the run that is run
        self._strikes = 0
        self.is_over = False
        self.parts_sites = False  # whether half of all partitions are between the two sites
        # Also set by order:
        self.slow_store_until = 0.0
        self.failing_store_until = 0.0
        self.late_tails_until = 0.0
        self._unsure_until = 0.0  # replies of the store are lost
        self._standby_s = timeline.random.choice((0.5, 2.0, 5.0)) if has_standby(plan) else 0.0
        self.doubles_left = 0  # messages still to be delivered twice
        self.damaged: dict[str, int] = {}  # frames to which worker are damaged next
        self._broader_at = events_least
        # Whose words lie unread ("": everybody's), until when, and how long it takes to read them
        # all then.
        self._unread: dict[str, tuple[float, float]] = {}
        self._garbled: dict[str, int] = {}  # control messages of which worker are damaged next
        self._ambushes: list[Fault] = []  # what strikes whoever votes next
        # who has voted next cancels; True: who has voted for what is staged
        self._changes_of_mind: list[bool] = []
        self._absences: list[Fault] = []  # what strikes some holder at the next rollback
        # the next holder that asks to leave a retained version is cut off for so many leases
        self._cut_off_leases = 0.0
        # the coordinator dies while it says next how a group's operation has ended
        self._cuts_short = False
        self._cuts_write = False  # the coordinator dies in the midst of its next write
        self._stalled: dict[str, float] = {}  # sources that send nothing, and until when
        self._for_lanes: list[Fault] = []  # STALL and SLOW that strike the next reads
        self._jumps_again_at: dict[SimWorker, float] = {}
        self._doubts = False  # nothing tells whether the next write is durable
        self._no_descriptors: dict[str, float] = {}  # in which process, and until when

    def __repr__(self) -> str:
        return f"<Injector {dict(self.happened)}>"

    def begin(self) -> None:
        """From now on, things go wrong."""
        self._next()

    def _next(self) -> None:
        """Where no versions came of the seed so far, less and less goes wrong."""
        late = max(0, self._timeline.events - self._events_least)
        has_kinds = len(self.happened) >= KINDS_LEAST
        calm = CALMER * late // self._events_least if has_kinds else 0
        mean_s = self.plan.mean_s * 2 ** min(calm, CALM_MAX)
        self._timeline.after(self._random.expovariate(1 / mean_s), None, self._strike)

    def _strike(self) -> None:
        if self.is_over:
            return
        self._next()
        self._strikes += 1
        broadens = self._timeline.events >= self._broader_at and len(self.happened) < KINDS_LEAST
        if self.part.broadens(self._strikes, wants=broadens):
            self._broader_at += BROADER_EACH
            self.plan.broaden(self._random)
        kind = self.plan.draw(self._random)
        if kind is not None and self.part.strikes(self._strikes, kind) and self._inject(kind):
            self.happens(kind)

    def happens(self, kind: str) -> None:
        """It really did."""
        self.happened[kind] += 1

    def end(self) -> None:
        """No fault strikes any more; broken parts are mended."""
        self.is_over = True
        self.slow_store_until = self.failing_store_until = self.late_tails_until = 0.0
        self._unsure_until = 0.0
        self._doubts = False
        self._no_descriptors.clear()
        self.doubles_left = 0
        self._garbled.clear()
        self._ambushes.clear()
        self._absences.clear()
        self._cut_off_leases = 0.0
        self._changes_of_mind.clear()
        self._cuts_short = self._cuts_write = False
        self._for_lanes.clear()
        self._stalled.clear()
        self._unread.clear()
        # What is damaged last may be all that its reader has: nothing else will happen that makes
        # anybody look at it again.
        drawn = Fault.CORRUPT in self.plan.weights
        last = list(self._world.workers) if drawn and self.part.has(DAMAGE) else []
        self.damaged = dict.fromkeys(last, 1)
        self._timeline.partitions.heal()
        self.coordinator.heal()
        for handle in self._world.live_handles():
            handle.hook_error = handle.before_vote = None
            if handle.access is not None:
                handle.end_access()
        for _, link in self._world.links.values():
            link.held_until = 0.0

    def stall(self, worker: SimWorker, until: float) -> None:
        """Its readers are accepted, and sent nothing."""
        self._stalled[worker.name] = until
        for lane in [lane for handle in worker.handles for lane in handle.serving]:
            lane.stalled_until = until

    # -- asked by others, for each thing that could be struck

    def store_s(self) -> float:
        """How long the next write takes."""
        slow = self._timeline.now < self.slow_store_until
        seconds = self._random.uniform(0.5, 4.0) if slow else self._random.uniform(0.0002, 0.01)
        if self._cuts_write:
            self._cuts_write = False
            self._timeline.after(seconds * self._random.random(), None, self._dies_in_write)
        return seconds

    def store_fails(self) -> bool:
        """Whether this write has failed."""
        if self._timeline.now >= self.failing_store_until:
            return False
        self.happens(Fault.STORE_FAIL)
        return True

    def reply_s(self) -> float:
        """How late its writer hears that this write is durable; 0: at once."""
        if self._timeline.now >= self._unsure_until or self._random.random() < 0.5:
            return 0.0
        self.happens(Fault.STORE_UNSURE)
        return self._random.choice(LONG_S)

    def store_doubts(self) -> bool | None:
        """Whether this write, which has failed, is durable; None: it has not failed."""
        if not self._doubts:
            return None
        self._doubts = False
        self.happens(Fault.STORE_DOUBT)
        return self._random.random() < 0.7

    def lacks_descriptors(self, *names: str) -> float:
        """Until when some of these can open no connection; 0: all can."""
        if not self._no_descriptors:
            return 0.0
        until = max(self._no_descriptors.get(name, 0.0) for name in names)
        if until <= self._timeline.now:
            return 0.0
        self.happens(Fault.DESCRIPTORS)
        return until

    def link_lost(self, link: Link) -> None:
        """Its worker's end is gone: what it has said may come late."""
        if self._timeline.now < self.late_tails_until and link.up:
            link.held_until = self._timeline.now + self._random.choice(SHORT_S)
            self.happens(Fault.REORDER)

    def doubles(self, message: FromWorker | FromCoordinator) -> bool:
        """Whether this message comes twice."""
        if not self.doubles_left:
            return False
        self.doubles_left -= 1
        self._world.note(f"{type(message).__name__} comes twice")
        self.happens(Fault.DUPLICATE)
        return True

    def garbles(self, worker: SimWorker) -> bool:
        """Whether this control message is damaged."""
        if not self._garbled or not self._garbled.get(worker.name):
            return False
        self._garbled[worker.name] -= 1
        self._world.note(f"a message of {worker.name} is damaged")
        self.happens(Fault.CORRUPT)
        return True

    def voted(self, worker: SimWorker, vote: Prepared) -> None:
        """The coordinator is about to hear that worker's vote: the way back may break before it
        hears the outcome, and stay so until its call gives up.
        """
        voters = [
            h
            for h in worker.handles
            if h.last_call is not None and h.last_call.key == vote.key and not h.last_call.done
        ]
        if not voters or not worker.alive:
            return
        # then its user changes his mind later
        is_stopped = worker.stopped_until > self._timeline.now
        is_staged = voters[0].member.staged is not None
        if not is_stopped and self._changes_mind(is_staged=is_staged):
            self._changes_of_mind.clear()
            voters[0].cancel()
            self.happens(Fault.CANCEL)
        if self._ambushes:
            kind = self._ambushes.pop()
            running = [handle.member.running for handle in voters]
            ends = [call.next_deadline() for call in running if call is not None]
            waits = bool(ends) and self._random.random() < 0.5
            least = worker.when(max(ends)) + SHORT_S[0] if waits else 0.0
            if self._strike_worker(kind, worker, self._leader, least):
                self.happens(kind)

    def _changes_mind(self, *, is_staged: bool) -> bool:
        """Whether a user does, once its rank has voted. Votes for what is staged are rare."""
        if self._changes_of_mind and self._changes_of_mind[0] <= is_staged:
            return True
        takes_back = is_staged and Fault.CANCEL in self.plan.weights and not self.is_over
        return takes_back and self._random.random() < STAGED_CANCELS

    def fence_waits(self, handle: HandlePort) -> None:
        """A handle takes its memory back, and an access still runs. If it is to be filled, its user
        may change his mind.
        """
        fill = handle.member.running
        if not isinstance(fill, Filling) or self.is_over:
            return
        if Fault.CANCEL in self.plan.weights and self._random.random() < FENCED_CANCELS:
            self._timeline.after(0.0, handle.worker, self._cancel_fenced, handle, fill)

    def _cancel_fenced(self, handle: HandlePort, fill: Filling) -> None:
        if handle.member.running is fill and handle.fencing_since is not None:
            handle.cancel()
            self.happens(Fault.CANCEL)

    def rolls_back(self) -> None:
        """The coordinator is about to hear of a rollback: a holder of the versions that it retires
        may be away.
        """
        if not self._absences:
            return
        holders = [
            handle.worker
            for handle in self._world.live_handles()
            if handle.member.state is HandleState.READY
        ]
        if holders:
            worker, kind = self._random.choice(holders), self._absences.pop()
            if self._strike_worker(kind, worker, self._leader, self._timeline.now + ABSENT_S):
                self.happens(kind)

    def leaves(self, registration: str) -> None:
        """The coordinator is about to hear that this handle asks to leave: it may be cut off until
        its lease is over, and longer.
        """
        handle, leases = self._world.handle_of(registration), self._cut_off_leases
        content = handle.member.content if handle is not None else None
        if not leases or handle is None or content is None or not content.retained:
            return
        self._cut_off_leases, until = 0.0, self._timeline.now + leases * self._world.options.lease_s
        if handle.worker.alive and self._strike_worker(
            Fault.PARTITION, handle.worker, self._leader, until
        ):
            handle.worker.disconnect()
            self.happens(Fault.PARTITION)

    def reads_at(self, worker: SimWorker) -> float:
        """When the coordinator reads what has come from that worker just now; across workers, in
        any order.
        """
        now = self._timeline.now
        until, reading_s = (
            self._unread.get("", self._unread.get(worker.name, (0.0, 0.0)))
            if self._unread
            else (0.0, 0.0)
        )
        return until + self._random.random() * reading_s if until > now else now

    def cuts_short(self, actions: list[Action]) -> list[Action]:
        """What the coordinator comes to of these: it may die when it has told only some ranks how
        it all ended.
        """
        if not self._cuts_short:
            return actions
        told = [
            n
            for n, action in enumerate(actions)
            if isinstance(action, Send) and isinstance(action.message, Outcome)
        ]
        if len(told) < 2:
            return actions
        return actions[: self._random.choice(told[1:])]

    def was_cut_short(self) -> None:
        """So much of it got out; now it dies."""
        self._cuts_short = False
        if self._crash_coordinator(lost=False):
            self.happens(Fault.COORDINATOR)

    def _dies_in_write(self) -> None:
        if not self.is_over and self._crash_coordinator(lost=False, keeps=False):
            self.happens(Fault.COORDINATOR)

    def _cannot_allocate(self, until: float) -> bool:
        fails = self._timeline.now < until and not self.is_over
        if fails:
            self._world.note("memory cannot be allocated")
            self.happens(Fault.ALLOCATE)
        return fails

    def damages(self, lane: SimLane) -> bool:
        """Whether this frame of chunks is damaged."""
        name = lane.reader.worker.name
        if not self.damaged or not self.damaged.get(name):
            return False
        self.damaged[name] -= 1
        self._world.note(f"a frame to {name} is damaged")
        self.happens(Fault.CORRUPT)
        return True

    def spoils(self, lane: SimLane) -> None:
        """A read begins: it may be one that goes wrong."""
        lane.stalled_until = max(lane.stalled_until, self._stalled.get(lane.grant.source, 0.0))
        if not self._for_lanes:
            return
        now, kind = self._timeline.now, self._for_lanes.pop()
        if kind is Fault.STALL:
            lane.stalled_until = now + self._random.choice((1.0, 5.0, 60.0))
        else:
            self._timeline.partitions.slow(
                lane.reader.worker.name, lane.grant.source, now + self._random.choice(LONG_S)
            )
        self.happens(kind)

    # -- striking

    @property
    def _leader(self) -> str:
        """The machine of the coordinator that leads."""
        return self._timeline.coordinator.name

    def _worker(self) -> SimWorker | None:
        """A random live worker; often one that reads or is read."""
        lane = self._lane() if self._random.random() < 0.5 else None
        alive = [worker for worker in self._world.workers.values() if worker.alive]
        if lane is not None and lane.source is not None:
            ends = [lane.reader.worker, lane.source.worker]
            workers = [worker for end in ends for worker in alive if worker is end]
        else:
            workers = alive
        return self._random.choice(workers) if workers else None

    def _handle(self) -> SimHandle | None:
        handles = [handle for handle in self._world.live_handles() if handle.shard.serves]
        return self._random.choice(handles) if handles else None

    def _lane(self) -> SimLane | None:
        """A connection over which something is read."""
        lanes = [lane for handle in self._world.live_handles() for lane in handle.serving]
        return self._random.choice(lanes) if lanes else None

    def _inject(self, kind: Fault) -> bool:
        """Inject the fault. False: there was no victim (or the fault is counted when it
        strikes).
        """
        random, now = self._random, self._timeline.now
        worker = self._worker()
        if worker is None and kind is not Fault.RESTART:
            return False
        match kind:
            case Fault.RESTART:
                return self.users.restart_one()
            case Fault.COORDINATOR if random.random() < AMBUSHES:
                self._cuts_write = random.random() < 0.5
                self._cuts_short = not self._cuts_write
                return False
            case Fault.COORDINATOR | Fault.STATE_LOST:
                return self._crash_coordinator(lost=kind is Fault.STATE_LOST)
            case Fault.OLDER_STATE:
                return self._crash_coordinator(lost=False, forgets=random.choice(FORGETS))
            case Fault.STORE_SLOW:
                self.slow_store_until = now + random.choice(LONG_S)
                return True
            case Fault.STORE_FAIL:
                self.failing_store_until = now + random.choice(SHORT_S)
                return False
            case Fault.STORE_UNSURE:
                self._unsure_until = now + random.choice(LONG_S)
                return False
            case Fault.STORE_DOUBT:
                self._doubts = True
                return False
            case Fault.FAILOVER:
                return self._crash_coordinator(lost=False, lease_s=self._standby_s)
            case Fault.SPLIT:
                return self._split()
            case Fault.STORE_AWAY:
                return self._store_away()
            case Fault.REORDER:
                self.late_tails_until = now + random.choice(LONG_S)
                if worker is not None and random.random() < 0.5:
                    worker.disconnect()
                return False
            case Fault.BEHIND:
                assert worker is not None
                return self._fall_behind(worker)
            case Fault.DUPLICATE:
                self.doubles_left += random.choice((1, 1, 5, 30))
                return False
            case Fault.HASTE:
                self.users.hasty_until = now + random.choice(LONG_S)
                return True
            case Fault.DIFFER:
                self.users.differ()
                return False
            case Fault.CANCEL if random.random() < AMBUSHES:
                self._changes_of_mind = [random.random() < 0.5]
                return False
            case (
                Fault.STALL
                | Fault.SLOW
                | Fault.DEVICE
                | Fault.HOOK
                | Fault.CANCEL
                | Fault.OVERWRITE
                | Fault.LIE
            ):
                return self._strike_data(kind)
            case Fault.PARTITION | Fault.DROP if random.random() < AMBUSHES:
                self._ambushes, self._absences = [kind], [kind]
                if kind is Fault.PARTITION:
                    self._cut_off_leases = random.choice(CUT_OFF_LEASES)
                return False
            case _:
                assert worker is not None
                return self._strike_worker(kind, worker)

    def _crash_coordinator(
        self, *, lost: bool, lease_s: float = 0.0, forgets: int = 0, keeps: bool = True
    ) -> bool:
        """`lease_s`: a standby leads within that time, on another machine. `keeps`: running writes
        may become durable.
        """
        if not self._timeline.coordinator.alive:
            return False
        down_s = self._random.choice((0.01, 0.3, 3.0, 12.0))
        self._unread.clear()
        kept = 0.0
        if keeps:
            share = self._random.random()
            # a batch may be split
            kept = 1.0 if share < 0.4 else 0.0 if share < 0.8 else 5 * share - 4
        if lease_s:
            down_s = lease_s * self._random.random()
        self.coordinator.crash(
            kept=kept, down_s=down_s, lost=lost, elsewhere=lease_s > 0, forgets=forgets
        )
        return True

    def _split(self) -> bool:
        """A leader that is stopped, or whose clock is wrong, goes on when another one leads."""
        random, lease_s = self._random, self._standby_s
        stops_s = lease_s * random.uniform(1.1, 4.0) if random.random() < 0.6 else 0.0
        believes_s = 0.0 if random.random() < 0.6 else lease_s * random.uniform(0.1, 4.0)
        return self.coordinator.split(
            lease_s=lease_s, stops_s=stops_s, believes_s=max(believes_s, 0.0 if stops_s else 0.1)
        )

    def _store_away(self) -> bool:
        """No write gets through for a while. Long before another one may lead, it steps down."""
        random, away_s = self._random, self._random.choice(LONG_S)
        if away_s < self._standby_s:
            self.slow_store_until = self._timeline.now + away_s
            return True
        return self.coordinator.split(
            lease_s=away_s, stops_s=0.0, believes_s=self._standby_s * random.random() - away_s
        )

    def _fall_behind(self, worker: SimWorker) -> bool:
        """The coordinator reads no message of that worker, or of any worker: it is starved, so that
        its timers run, or stopped, so that they do not. Workers go on saying things, and give up
        connections that bring no answer.
        """
        random, now, lease_s = self._random, self._timeline.now, self._world.options.lease_s
        if any(now < until + reading_s + lease_s for until, reading_s in self._unread.values()):
            return False  # it has to come to something meanwhile
        until, reading_s = (
            now + lease_s * random.uniform(*BEHIND_LEASES),
            lease_s * random.choice((0.0, 0.1, 1.0)),
        )
        whose = random.choice((worker.name, ""))
        self._unread = {whose: (until, reading_s)}
        # just when it has heard of an end, and who has lost its connection comes back
        if random.random() < 0.3:
            self._unread.clear()
            worker.disconnect()
            self._timeline.after(
                COMES_BACK_S, None, self._unread.update, {whose: (until, reading_s)}
            )
        process = self._timeline.coordinator
        if not whose and random.random() < 0.3:
            process.stopped_until = max(process.stopped_until, until)
        self._world.note(f"the coordinator reads nothing of {whose or 'anybody'} until {until:.3f}")
        return worker.link is not None

    def _strike_data(self, kind: Fault) -> bool:
        random, handle, lane = self._random, self._handle(), self._lane()
        if handle is None:
            return False
        match kind:
            case Fault.STALL | Fault.SLOW:
                self._for_lanes.append(kind)
                if lane is not None:
                    self.spoils(lane)
                return False
            case Fault.DEVICE if handle.access is None:
                handle.hold_access()
                self._timeline.after(random.choice(LONG_S), handle.worker, handle.end_access)
                return handle.access is not None
            case Fault.HOOK:
                handle.hook_error = BrokenHook("the hook broke")
                self._timeline.after(random.choice(LONG_S), handle.worker, self._mend_hook, handle)
            case Fault.CANCEL if (
                handle.member.running is not None
                and handle.worker.stopped_until <= self._timeline.now
            ):
                handle.cancel()
            case Fault.OVERWRITE:
                return misdeeds.overwrite(handle)
            case Fault.LIE:
                content_id = next(filter(None, map(misdeeds.plot, self._world.live_handles())), "")
                self._silence_publishers(content_id)
                return bool(content_id) or misdeeds.lie(handle)
            case _:
                return False
        return True

    def _part_sites(self, until: float) -> None:
        """No message passes between the coordinator's site and the second site."""
        workers, partitions = self._world.workers.values(), self._timeline.partitions
        here = [
            COORDINATOR,
            STANDBY,
            *(each.name for each in workers if each.location.site == HERE),
        ]
        there = [each.name for each in workers if each.location.site != HERE]
        self._world.note(f"{', '.join(there)} are cut off from {', '.join(here)} until {until:.3f}")
        for one, other in product(here, there):
            partitions.block(one, other, until)

    @staticmethod
    def _mend_hook(handle: SimHandle) -> None:
        handle.hook_error = None

    def _silence_publishers(self, content_id: str) -> None:
        """Those cannot say for a while what they have published."""
        for handle in self._world.live_handles():
            content = handle.member.content
            if (
                content is not None
                and content.published
                and content.version.content_id == content_id
            ):
                self._strike_worker(Fault.PARTITION, handle.worker, self._leader)
                handle.worker.disconnect()

    def _strike_worker(
        self, kind: Fault, worker: SimWorker, other: str = "", until: float = 0.0
    ) -> bool:
        random, now, world = self._random, self._timeline.now, self._world
        link = worker.link
        match kind:
            case Fault.CRASH | Fault.PREEMPT if not self.users.may_die(worker):
                return False
            case Fault.CRASH:
                if sum(each.alive for each in world.workers.values()) < 2:
                    return False
                worker.crash()
            case Fault.PARTITION if self.parts_sites and random.random() < 0.5:
                self._part_sites(now + random.choice(LONG_S))
            case Fault.ONE_WAY if link is not None and random.random() < 0.5:
                link.loses_up = random.random() < 0.5
                link.loses_down = not link.loses_up
                lost = "hears" if link.loses_down else "says"
                world.note(f"the connection of {worker.name} loses all that it {lost}")
            case Fault.PARTITION | Fault.ONE_WAY:
                others = [w.name for w in world.workers.values() if w.alive and w is not worker]
                lane = self._lane()
                if lane is not None and lane.reader.worker is worker and random.random() < 0.5:
                    others = [lane.grant.source]
                other = other or random.choice([self._leader, *others[:3]])
                until = max(until, now + random.choice(LONG_S))
                if kind is Fault.ONE_WAY:
                    sender, receiver = random.sample((worker.name, other), 2)
                    world.note(f"nothing passes from {sender} to {receiver} until {until:.3f}")
                    self._timeline.partitions.block_one_way(sender, receiver, until)
                else:
                    world.note(f"{worker.name} and {other} are cut off until {until:.3f}")
                    self._timeline.partitions.block(worker.name, other, until)
            case Fault.CUT if link is not None:
                worker.disconnect()
            case Fault.DELAY if link is not None:
                link.held_until = now + random.choice(SHORT_S)
            case Fault.DROP if link is not None:
                world.note(f"the connection of {worker.name} loses everything")
                link.loses_up = link.loses_down = True
            case Fault.ALLOCATE:
                until = now + random.choice(LONG_S)
                worker.copies.cannot_allocate = partial(self._cannot_allocate, until)
                return False
            case Fault.CORRUPT:
                books = self._garbled if random.random() < 0.3 else self.damaged
                books[worker.name] = random.choice((1, 1, 4))
                return False
            case Fault.PAUSE:
                until = now + random.choice(LONG_S)
                party = self._timeline.coordinator if random.random() < 0.15 else worker
                until = max(until, party.stopped_until)
                world.note(f"{party.name} is stopped until {until:.3f}")
                party.stopped_until = until
            case Fault.PREEMPT:
                return self.users.preempt(worker)
            case Fault.DESCRIPTORS:
                name = random.choice((worker.name, worker.name, self._leader))
                self._no_descriptors[name] = now + random.choice(LONG_S)
                return False
            case Fault.CLOCK:
                return self._strike_clock(worker)
            case _:
                return False
        return True

    def _strike_clock(self, worker: SimWorker) -> bool:
        """It jumps ahead, or stands still: with the worker, which then sleeps, or alone."""
        random, now, lease_s = self._random, self._timeline.now, self._world.options.lease_s
        before = worker.now
        if random.random() < 0.5:
            if self._jumps_again_at.get(worker, 0.0) > now:
                return False
            self._jumps_again_at[worker] = now + JUMP_EVERY_LEASES * lease_s
            worker.clock.jump(random.uniform(0.0, JUMP_LEASES * lease_s))
            seconds = worker.now - before
            self._world.note(f"the clock of {worker.name} jumps {seconds:.3f} s ahead")
        else:
            until = now + random.choice(LONG_S)
            if random.random() < 0.5:
                worker.stopped_until = max(worker.stopped_until, until)
            worker.clock.stand_still(now, until)
            self._world.note(f"the clock of {worker.name} stands still until {until:.3f}")
        self._world.clock_changed(worker)
        return True


def has_standby(plan: FaultPlan) -> bool:
    """Whether several coordinators are there for the seed."""
    return not {Fault.FAILOVER, Fault.SPLIT, Fault.STORE_AWAY}.isdisjoint(plan.weights)
