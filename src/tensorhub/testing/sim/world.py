"""A whole cluster without bytes, sockets, threads or a clock: the real coordinator, members, owners
and pulls.

`World` has the coordinator with its store, workers and connections. It knows what each step does. A
cluster gives the world the parts that decide when a step happens: a driver of shells, two planes,
the coordinator's process, and users. In `drivers.stepwise` the caller picks each step;
`drivers.timed` has a clock and faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from math import inf
from typing import Any, Protocol, assert_never

from tensorhub.coordinator import (
    Action,
    CloseSession,
    Coordinator,
    Durable,
    Entry,
    Event,
    LookFor,
    Outlived,
    Persist,
    Persisted,
    Received,
    Restoration,
    Rollback,
    Send,
    Tick,
    WorkerLost,
)
from tensorhub.messages import (
    Done,
    Fill,
    FromCoordinator,
    Grant,
    LeaveGranted,
    Outcome,
    Refused,
    Registered,
    Resolve,
    Start,
    Welcome,
    Write,
)
from tensorhub.model.manifest import Manifest
from tensorhub.testing.sim.assertion import MAKES_ROOM, demand
from tensorhub.testing.sim.clocks import Clock
from tensorhub.testing.sim.handle import BrokenHook, CallRecord, HandleShell
from tensorhub.testing.sim.judges.explained import Explained
from tensorhub.testing.sim.judges.guarantees import Guarantees
from tensorhub.testing.sim.judges.losses import Losses
from tensorhub.testing.sim.judges.ports import JudgedHandle, JudgedWorker
from tensorhub.testing.sim.judges.verified import VerifiedChunks
from tensorhub.testing.sim.memory import CHUNKS, MANIFEST
from tensorhub.testing.sim.network import COORDINATOR, Link, Process
from tensorhub.testing.sim.ports import Driver
from tensorhub.testing.sim.pulling import DataPlane
from tensorhub.testing.sim.rendering import show, show_error
from tensorhub.testing.sim.terms import FencedStore, Term
from tensorhub.testing.sim.worker import ControlPlane, SimHandle, SimWorker, WorkerUsers
from tensorhub.types import HandleState, Location, OpKey, Options


class CoordinatorHost(Protocol):
    """The processes that coordinators run in."""

    def leads(self, term: Term) -> bool:
        """Whether it is alive, and may take an event, as far as it can know by its own clock."""

    def gets_out(self, actions: list[Action]) -> list[Action]:
        """Those of a step's actions that it comes to."""

    def to_be_stored(self, persist: Persist, term: Term) -> None:
        """The coordinator wants this recorded."""

    def stepped(self, term: Term) -> None:
        """A step is over."""

    def step_down(self, term: Term, why: str) -> None:
        """The coordinator has found out that another one leads."""

    def begin_anew(self, term: Term, why: str) -> None:
        """The coordinator has found out that its state is an older copy."""


class World(Driver):
    """The coordinator, its store, its workers, and the guarantees."""

    # Whoever puts a cluster together sets these before anything happens.
    data: DataPlane
    control: ControlPlane
    process: CoordinatorHost
    users: WorkerUsers

    def __init__(
        self,
        options: Options | None = None,
        *,
        chunks: int = CHUNKS,
        manifest: Manifest = MANIFEST,
        host_bytes: int = 0,
        store: FencedStore | None = None,
    ) -> None:
        self.options = options or Options()
        # that a user's own code raises
        self.user_errors: tuple[type[Exception], ...] = (BrokenHook,)
        self.host_bytes = host_bytes  # of each worker that is made from now on
        self.chunks = chunks
        self.manifest = manifest
        self.now = 0.0
        self.coordinators_clock = Clock()
        self.numbers: Iterator[int] = count(1)
        self.registrations: Iterator[int] = count()
        self.ids = count(1)
        self.sessions = count(1)
        self._terms = count(1)
        self.workers: dict[str, SimWorker] = {}
        self.by_registration: dict[str, SimHandle] = {}
        self.store = store if store is not None else FencedStore()  # an empty one is false
        self.former: Term | None = None  # it has not noticed that another one leads
        # where one noticed too late; what it said last may still be on its way
        self.was_late: Process | None = None
        self.ident = "c"  # of the coordinator's state
        self.read_only_max = 0  # sessions at a time; 0: as the options have it
        self.is_older = False  # it is an older copy, and no coordinator has noticed
        self.was_older = False  # at some time
        # Whether a coordinator dies, or takes for lost who is not.
        self.forgets: Callable[[], bool] = lambda: True
        self.is_unharmed: Callable[[], bool] = lambda: False
        # fills that this coordinator has heard: their operations, and ranks
        self._called: set[tuple[OpKey, int]] = set()
        self._heard_again = False  # the present event is one of these, said again
        self.guarantees = Guarantees(self)
        self.losses = Losses(self)
        self.verified = VerifiedChunks()
        self.explained = Explained()
        self.start_coordinator()

    @property
    def coordinator(self) -> Coordinator:
        """The one that leads, or that has led last."""
        return self.term.core

    @property
    def links(self) -> dict[int, tuple[SimWorker, Link]]:
        """Those that this coordinator has not seen end."""
        return self.term.links

    @property
    def unstored(self) -> dict[int, Persist]:
        """What this coordinator has not heard to be durable."""
        return self.term.unstored

    def terms(self) -> Iterator[Term]:
        """Of coordinators that lead, or believe so."""
        yield from (each for each in (self.term, self.former) if each is not None)

    def term_at(self, party: Process) -> Term | None:
        """The term of the coordinator that runs there."""
        if self.term.party is party:
            return self.term
        former = self.former
        return former if former is not None and former.party is party else None

    def term_of(self, worker: JudgedWorker) -> Term:
        """The term of the coordinator that the worker has heard last."""
        here, former = worker.incarnation, self.former
        led = former is not None and former.joined.get(here, 0) > self.term.joined.get(here, 0)
        return former if former is not None and led else self.term

    def core_of(self, worker: JudgedWorker) -> Coordinator:
        return self.term_of(worker).core

    def is_behind(self, worker: JudgedWorker) -> bool:
        term = self.term_of(worker)
        if term is not self.term:
            return term.is_clock_wrong
        return worker.link is not None and worker.link.party is self.was_late

    @property
    def clock_rate(self) -> float:
        """Of coordinators' clocks."""
        return self.coordinators_clock.rate

    @clock_rate.setter
    def clock_rate(self, rate: float) -> None:
        self.coordinators_clock.rate = rate

    @property
    def clock(self) -> float:
        """The time by a coordinator's clock."""
        return self.coordinators_clock.at(self.now)

    def when(self, due: float) -> float:
        """When a coordinator's clock shows that."""
        return self.coordinators_clock.when(due)

    # -- making things

    def worker(
        self,
        name: str,
        location: Location | None = None,
        transports: tuple[str, ...] = ("tcp",),
        *,
        read_only: bool = False,
    ) -> SimWorker:
        """A new worker process, which connects."""
        worker = self.workers[name] = SimWorker(
            self, name, location or Location(host=name), transports, read_only=read_only
        )
        self.control.connect(worker)
        return worker

    def handle(
        self, name: str, group: str | None = None, rank: int = 0, world_size: int = 1, **more: Any
    ) -> SimHandle:
        """A worker of this name, if there is none yet, with one registration."""
        worker = self.workers.get(name) or self.worker(name)
        return worker.register(group or name, rank, world_size, **more)

    def fetcher(self, name: str, shard: int = 0) -> SimHandle:
        """A worker of this name, if there is none yet, that fetches."""
        return (self.workers.get(name) or self.worker(name)).fetcher(shard)

    def group(self, name: str, world_size: int, *, spot: bool = False) -> list[SimHandle]:
        """A worker per rank."""
        return [
            self.handle(f"{name}{rank}", name, rank, world_size, spot=spot)
            for rank in range(world_size)
        ]

    def lose_state(self) -> None:
        """The next coordinator will be a new cluster (R2)."""
        assert self.former is None
        self.is_older = False
        self.guarantees.state_lost(self.store)
        self.store.clear()
        self.ident += "'"

    def take_older_state(self, entries: int) -> None:
        """The next coordinator will find an older copy of the state, of so many entries."""
        assert self.former is None
        before, self.is_older = list(self.store), True
        self.was_older = True
        self.store.go_back(entries)
        self.guarantees.state_replaced(before, self.store)

    def become_new_cluster(self) -> None:
        """The next coordinator will be of a new cluster, with this state."""
        self.is_older = False
        self.guarantees.state_replaced(list(self.store), self.store)
        self.ident += "'"

    def start_coordinator(self, party: Process | None = None) -> None:
        """A new one begins there, on the durable entries."""
        epoch, found = self.store.begin()
        self._called.clear()
        self.losses.forget()
        number = next(self._terms)
        core = Coordinator(
            cluster=self.ident,
            epoch=epoch,
            options=self.options,
            ids=lambda: f"id{next(self.ids)}",
            now=self.clock,
            durable=Durable.of(found) if epoch > 1 else None,
            term=f"term{number}",
            # as by chance; histories without an older copy are told in small numbers
            epochs_from=number << 8 if self.was_older else 0,
        )
        if self.read_only_max:
            core.cluster.read_only.sessions_max = self.read_only_max
        self.term = Term(epoch, core, party or Process(COORDINATOR), stored_at=self.now)

    def coordinator_died(self, *, kept: float) -> None:
        """`kept`: that share of the running writes becomes durable, from the first one on."""
        term = self.term
        left = [each for record, each in term.unstored.items() if record not in term.durable]
        whole = round(kept * len(left))
        for persist in left[:whole]:
            self.keep(persist.entry)
        for persist in left[whole : whole + 1]:
            if self.store.crash(persist.entry):
                self.note(f"all of a write was there: {show(persist.entry)}")
                self.keep(persist.entry)
        term.unstored.clear()
        term.durable.clear()

    # -- looking

    def all_handles(self) -> Iterator[SimHandle]:
        """Those of dead workers, too."""
        for worker in self.workers.values():
            yield from worker.handles

    def live_handles(self) -> Iterator[SimHandle]:
        """Those of workers that are alive."""
        return (handle for handle in self.all_handles() if handle.worker.alive)

    def handle_of(self, registration: str) -> SimHandle | None:
        """The handle of that registration, unless it has ended."""
        return self.by_registration.get(registration)

    def find(self, grant: Grant) -> SimHandle | None:
        """The memory that a grant names, if its process is alive."""
        handle = self.by_registration.get(grant.registration)
        return handle if handle is not None and handle.worker.alive else None

    def kind_of(self, registration: str) -> str:
        """The kind of memory a worker copies from: of its own registrations, or staged for one."""
        handle = self.handle_of(registration)
        return (
            "what was staged"
            if handle is None
            else f"{handle.shard.medium} memory ({handle.shard.purpose})"
        )

    def session_of(self, incarnation: str) -> int | None:
        """The newest connection over which the present coordinator has welcomed it."""
        return self.term.joined.get(incarnation)

    def is_coming(self, incarnation: str) -> bool:
        """Whether what it has said over a new connection lies unread at the coordinator."""
        there = next(
            (
                each
                for each in self.workers.values()
                if each.alive and each.incarnation == incarnation
            ),
            None,
        )
        link = there.link if there is not None else None
        return link is not None and link.unread > 0 and link.session != self.session_of(incarnation)

    def unread(self, session: int) -> int | None:
        """How much of that connection lies unread at the coordinator; None: it has read its end."""
        _, link = self.links.get(session, (None, None))
        return link.unread if link is not None else None

    def is_recording_rollback(self, model: str) -> bool:
        """Whether a rollback of that model is on its way to the store."""
        entries = (persist.entry for persist in self.unstored.values())
        return any(isinstance(entry, Rollback) and entry.model == model for entry in entries)

    def has_unheard(self, model: str) -> bool:
        """Whether versions of that model came back from an archive, and the coordinator has not
        heard that this is durable.
        """
        entries = (self.unstored[record].entry for record in self.term.durable)
        return any(isinstance(entry, Restoration) and entry.model == model for entry in entries)

    # -- the coordinator

    def mates(self, handle: JudgedHandle) -> list[SimHandle]:
        """The remaining ranks of its group."""
        return [
            h
            for h in self.live_handles()
            if h.shard.group == handle.shard.group and h is not handle
        ]

    def step(self, event: Event, term: Term | None = None) -> None:
        """Feed the coordinator (of that term) one event, and do what follows."""
        term = term or self.term
        if not self.process.leads(term):
            return  # it may have died in the midst of this event
        former = isinstance(event, Received) and self._is_former(event.session, term)
        if isinstance(event, Received):
            self.guarantees.heard(event.message)
        if former:
            self.step(Tick(), term)  # so that all that follows is this event's
        self._heard_again = False
        if isinstance(event, Received) and isinstance(event.message, Fill):
            call = event.message.key, event.message.rank
            self._heard_again = call in self._called
            self._called.add(call)
        asked, leads, outlived = list[int](), term is self.term, ""
        actions = term.core.step(event, self.clock)
        for action in self.process.gets_out(actions) if leads else actions:
            if former:
                demand(
                    self._is_reply(action, event),
                    "incarnations: {} follows of what came too late: {}",
                    action,
                    event,
                )
            match action:
                case Send():
                    self._check_said(action, event, term)
                    if action.session in term.links:
                        self._send_down(action.session, action.message, term)
                case CloseSession():
                    if action.session in term.links:
                        self._send_down(action.session, None, term)
                case Persist():
                    if leads:
                        self.guarantees.decided(action.entry)
                    term.unstored[action.record] = action
                    self.process.to_be_stored(action, term)
                case LookFor():
                    asked.append(action.session)
                case WorkerLost():
                    pass  # for people
                case Outlived():
                    demand(
                        not leads or self.is_older,
                        "durable mark: a worker was told what is not durable: {}",
                        action.reason,
                    )
                    outlived = action.reason
                    break  # nothing more may be said
                case _:
                    assert_never(action)
        if leads:
            self.losses.stepped(event)
        for session in asked:
            self.control.looked_for(session, term)
        self.process.stepped(term)
        if outlived and leads:
            self.process.begin_anew(term, outlived)
        elif outlived:
            self.process.step_down(term, outlived)  # its store refuses to begin anew

    def _check_said(self, said: Send, event: Event, term: Term) -> None:
        """What the coordinator must not say before it is so."""
        message, (worker, _) = said.message, term.links.get(said.session, (None, None))
        if isinstance(message, Done) and term is self.term:
            self.guarantees.retained.check_told(message)
        elif worker is not None and isinstance(message, Start | Write | Outcome):
            if isinstance(event, Received) and isinstance(event.message, Resolve):
                return  # it is said again
            if isinstance(message, Outcome) and self._heard_again:
                return  # it may be what was decided when the call was heard first
            handle = worker.router.rank_at(message.key.model, message.key.group, message.rank)
            if isinstance(message, Write) or (isinstance(message, Start) and message.write):
                self.guarantees.told_to_write(handle, message)
            if handle is not None and isinstance(message, Start | Write):
                self.guarantees.crossings.told(handle, message)
            if (
                handle is not None
                and isinstance(message, Outcome)
                and message.committed
                and message.version is not None
            ):
                self.guarantees.commits(
                    handle, message.version.content_id, by_source=message.by_source
                )
            if handle is not None and not isinstance(message, Write) and term is self.term:
                self.guarantees.available.told(handle, message)

    @staticmethod
    def _is_former(session: int, term: Term) -> bool:
        """Whether the worker at its other end was welcomed over a newer connection, which is up:
        the coordinator has not closed it, as it does to make room.
        """
        known = term.core.cluster.sessions.get(session)
        newest = term.joined.get(known.incarnation, session) if known is not None else session
        _, link = term.links.get(newest, (None, None))
        return session < newest and link is not None and None not in link.down

    @staticmethod
    def _is_reply(action: Action, event: Event) -> bool:
        """Whether it only answers over, or closes, the connection of that event (every session may
        ask).
        """
        if isinstance(action, Persist | WorkerLost | Outlived):
            return False
        here = isinstance(event, Received) and action.session == event.session
        return here and not (isinstance(action, Send) and isinstance(action.message, Welcome))

    def _welcome(self, session: int, worker: SimWorker, message: Welcome, term: Term) -> None:
        """A coordinator that has known an incarnation knows it ever after, or the incarnation is
        lost for good (G9), but for one that is read-only, which has nothing to lose.
        """
        incarnation = term.core.cluster.sessions[session].incarnation
        new = incarnation not in term.joined
        demand(
            new != message.known or worker.read_only,
            "incarnations: {} is welcomed as {}, and was in {}",
            incarnation,
            message,
            term.joined,
        )
        term.joined[incarnation] = session
        if new:
            worker.known_since = self.now

    def _send_down(self, session: int, message: FromCoordinator | None, term: Term) -> None:
        worker, link = term.links[session]
        if isinstance(message, Refused) and MAKES_ROOM in message.error.message:
            self.took("a read-only session made room")
            demand(worker.read_only, "bounds: {} has the full token, and makes room", worker)
        if isinstance(message, LeaveGranted):
            worker.granted(message)
        elif isinstance(message, Registered):
            worker.known(message)
        elif isinstance(message, Welcome):
            self._welcome(session, worker, message, term)
        link.down.append(message)
        self.control.said_down(worker, link)

    def keep(self, entry: Entry, term: Term | None = None) -> None:
        """It is durable now. Raises Deposed."""
        term = term or self.term
        self.store.write(term.epoch, entry)
        leads = term is self.term
        demand(leads, "incarnations: {} has written {}, and {} leads", term, entry, self.term)
        self.guarantees.stored(entry, self.store[:-1])

    def persisted(self, persist: Persist, term: Term) -> None:
        """The coordinator hears that it is durable."""
        del term.unstored[persist.record]
        term.durable.discard(persist.record)
        is_so = any(entry is persist.entry for entry in reversed(self.store))
        demand(is_so, "durable mark: {} takes {} for durable, which it is not", term, persist.entry)
        self.step(Persisted(persist.record), term)

    def check(self) -> None:
        """Everything that holds between two steps."""
        for term in self.terms():
            term.core.check_invariants()
            term.core.check_counts()
            term.core.check_waits()
            sessions = term.core.cluster.read_only
            demand(
                len(sessions.sessions) <= (self.read_only_max or inf),
                "bounds: {}, of {} at most",
                sessions,
                self.read_only_max,
            )
        for worker in self.workers.values():
            if worker.alive:
                worker.owner.check_invariants()
                worker.copies.machine.check_invariants()
        for handle in self.all_handles():
            self.guarantees.check_handle(handle)

    @staticmethod
    def check_over(record: CallRecord) -> None:
        """The call has ended, or its process (G7)."""
        handle, is_over = record.handle, record.done or not record.handle.worker.alive
        demand(
            is_over, "liveness: {}: {} never ended: {}", handle, record.what, handle.member.running
        )

    def check_agreement(self) -> None:
        """At rest, the coordinator knows exactly each holding and its generation."""
        for handle in self.live_handles():
            member = self.coordinator.cluster.members.get(handle.id)
            content, state = handle.member.content, handle.member.state
            served = handle.last_call is not None and handle.last_call.done
            demand(
                handle.shard.serves or not served,
                "liveness: {} was made for one call, which is over",
                handle,
            )
            refused = handle.registration_error is not None or state is HandleState.CLOSED
            demand(
                member is not None or refused or not handle.registered,
                "liveness: the coordinator has forgotten {}",
                handle,
            )
            if member is None:
                continue
            known = member.holding.generation if member.holding is not None else None
            held = (
                content.generation if content is not None and state is HandleState.READY else None
            )
            leaving = member.leaving
            # a publisher's own, until it takes it back (R8)
            if content is not None and content.spoiled:
                leaving = [
                    each
                    for each in leaving
                    if not (each.trust.quarantined and each.generation == held)
                ]
                held = None
            # In which layout it holds that, nobody knows before the other ranks are here: then it
            # is asked again.
            is_unheard = member.unheard > 0 and known is None
            if state is not HandleState.IN_DOUBT and not is_unheard:
                demand(
                    known == held,
                    "liveness: {} holds generation {}, the coordinator thinks {}",
                    handle,
                    held,
                    known,
                )
            demand(not leaving, "liveness: {} is thought to leave, for ever: {}", handle, leaving)
        for ident, member in self.coordinator.cluster.members.items():
            demand(
                ident in self.by_registration,
                "liveness: {} is known for ever, and is no more",
                member,
            )
        left = [(lease, lease.story) for lease in self.coordinator.cluster.leases.values()]
        demand(not left, "liveness: leases are left: {}", left)

    def call_ended(self, handle: HandleShell, record: CallRecord) -> None:
        """A call has returned, or raised."""
        what = (
            f"v{record.version.version} changed={record.changed}"
            if record.version
            else show_error(record.error)
        )
        self.note(
            f"{handle.name} {type(record.what).__name__.removesuffix('Call').lower()} ends: {what}"
        )
        self.guarantees.ended(handle, record)
        if record.key is not None:
            who = handle.worker.incarnation, record.key, handle.shard.rank
            seconds, is_committed = self.now - record.began, record.error is None
            core = self.core_of(handle.worker)
            self.explained.ended(
                core, self.clock, *who, seconds, committed=is_committed, clock_rate=self.clock_rate
            )
        self.users.ended(handle, record)
