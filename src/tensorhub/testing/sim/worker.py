"""One simulated worker process, as `runtime.worker.worker` is: its connection, its owner, its
handles.

Responsible for carrying out what `worker.router` says of each message. Not responsible for when
anything is delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, assert_never

from tensorhub import messages
from tensorhub.errors import GroupAborted
from tensorhub.layouts.identity import layout_id_together
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.reading import Selection
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.worker.coordinator_client import Answer
from tensorhub.testing.sim.clocks import Clock
from tensorhub.testing.sim.handle import Callers, CallRecord, HandleShell, HandleWorld
from tensorhub.testing.sim.host_copies import CopyRequest, SimHostCopies
from tensorhub.testing.sim.layouts import Layout, described
from tensorhub.testing.sim.memory import written
from tensorhub.testing.sim.network import Link
from tensorhub.testing.sim.ports import HandlePort
from tensorhub.testing.sim.questions import SimQuestions
from tensorhub.testing.sim.sites import MODEL
from tensorhub.testing.sim.terms import Term
from tensorhub.types import (
    READ_ONLY,
    Endpoint,
    HandleState,
    Location,
    OpKind,
    Selector,
    VersionInfo,
    host_group,
)
from tensorhub.worker.calls import FillCall, PublishCall, RefuseCall, UnpublishCall
from tensorhub.worker.heartbeats import Heartbeats
from tensorhub.worker.local_copies import LocalCopies
from tensorhub.worker.newest_told import NewestTold
from tensorhub.worker.owner import Owner
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import (
    Anew,
    Answered,
    Deliver,
    Examine,
    LoseState,
    Reply,
    Resume,
    Router,
)


class SimHandle(HandleShell):
    """One registration of a simulated worker, with the verbs with which a test calls it."""

    worker: SimWorker

    def write(self, version: int = 0) -> None:
        """Fill the memory with cells that no further handle ever wrote; identical shards write
        equal cells for one version.
        """
        assert self.member.state is HandleState.EMPTY, self
        self.grid = self.shard.manifest
        chunks = self.grid.chunk_count if self.grid is not None else self.cluster.chunks
        number = next(self.cluster.numbers)
        self.cells = written(
            f"{self.part}={version}" if self.part else f"{self.name}#{number}", chunks
        )

    def publish(self, version: int, timeout_s: float = 60.0) -> CallRecord:
        """Write the memory, where it is the caller's to write, and publish it."""
        if self.idle and self.member.state is HandleState.EMPTY:
            self.write(version)
        return self.call(PublishCall(version), timeout_s)

    def replicate(
        self, selector: Selector = "latest", timeout_s: float = 60.0, *, hold: bool = False
    ) -> CallRecord:
        """`hold`: with a before_write."""
        return self.call(FillCall(OpKind.REPLICATE, selector, hold=hold), timeout_s)

    def update(
        self,
        selector: Selector = "latest",
        timeout_s: float = 60.0,
        *,
        hold: bool = False,
        at_least: int | None = None,
    ) -> CallRecord:
        """`hold`: with a before_write."""
        return self.call(FillCall(OpKind.UPDATE, selector, at_least, hold), timeout_s)

    def stage(
        self, selector: Selector = "latest", timeout_s: float = 60.0, *, hold: bool = False
    ) -> CallRecord:
        """An update that overwrites nothing before it is committed."""
        return self.call(FillCall(OpKind.UPDATE, selector, hold=hold, staged=True), timeout_s)

    def prefetch(self, selector: Selector = "latest", timeout_s: float = 60.0) -> CopyRequest:
        """Fill its host copy, which is made the first time."""
        return self.worker.copies.prefetch(self, selector, timeout_s)

    @property
    def copy(self) -> SimHandle:
        """Its host copy."""
        copy = self.worker.registered(self.worker.copies.machine.copy_of(self.id) or "")
        assert copy is not None, f"nothing was prefetched for {self}"
        return copy

    def fetch(self, selector: Selector = "latest", timeout_s: float = 60.0) -> CallRecord:
        """The one call of a handle that `SimWorker.fetcher` made."""
        return self.call(FillCall(OpKind.FETCH, selector), timeout_s)

    def unpublish(self, timeout_s: float = 60.0) -> CallRecord:
        """Take the memory back."""
        return self.call(UnpublishCall(), timeout_s)

    def close(self, timeout_s: float = 60.0, *, abandon: bool = False) -> CopyRequest:
        """End the registration, with the host copies that end with it."""
        return self.worker.copies.close(self, timeout_s, abandon=abandon)

    def refuse(self, reason: str = "the body raised") -> CallRecord:
        """Do not make the next group call."""
        return self.call(RefuseCall(messages.ErrorInfo.of(GroupAborted(reason))), 60.0)


class WorkerWorld(HandleWorld, Protocol):
    """What a worker needs of its world."""

    by_registration: dict[str, SimHandle]
    host_bytes: int  # of each worker that is made from now on

    control: ControlPlane

    @property
    def users(self) -> WorkerUsers: ...


class WorkerUsers(Callers):
    """The code that runs in workers, and calls their handles."""

    def welcomed(self, worker: SimWorker) -> None:
        """It is welcomed over a new connection, and has said what it has to say."""

    def anew(self, worker: SimWorker, step: Anew) -> None:
        """Over a new connection it is at this step."""

    def disconnected(self, worker: SimWorker) -> None:
        """It has lost its connection."""

    def announced(self, worker: SimWorker, message: messages.Announce) -> None:
        """It is told which version is the newest."""

    def answered(self, worker: SimWorker, message: Answer) -> None:
        """Something that it has asked for itself has its answer."""

    def crashed(self, worker: SimWorker) -> None:
        """Its process is no more."""


class ControlPlane(Protocol):
    """Keeps workers connected, and decides when messages between workers and the coordinator
    arrive.
    """

    def connect(self, worker: SimWorker) -> None:
        """It is to have a connection."""

    def connect_again(self, worker: SimWorker) -> None:
        """It has lost its connection."""

    def new_link(self, worker: SimWorker) -> Link:
        """A connection that the coordinator will see."""

    def said_up(self, worker: SimWorker, link: Link) -> None:
        """The last of `link.up` is on its way."""

    def said_down(self, worker: SimWorker, link: Link) -> None:
        """The last of `link.down` is on its way."""

    def link_lost(self, worker: SimWorker, link: Link) -> None:
        """The worker's end of this connection is gone."""

    def looked_for(self, session: int, term: Term) -> None:
        """The coordinator asks what of this session lies unread."""


class SimWorker:
    """One worker process."""

    def __init__(
        self,
        cluster: WorkerWorld,
        name: str,
        location: Location,
        transports: tuple[str, ...] = ("tcp",),
        *,
        life: int = 1,
        new_handle: Callable[[WorkerWorld, SimWorker, Shard], SimHandle] = SimHandle,
        op_timeout_s: float = 60.0,
        read_only: bool = False,
    ) -> None:
        self.cluster = cluster
        self.read_only = read_only  # its token is
        self.name = name
        self.location = location
        self.endpoints = tuple(Endpoint(transport, name) for transport in transports)
        self.lives = life
        self.incarnation = f"{name}.{life}"
        self.alive = True
        self.stopped_until = 0.0  # its threads do not run before
        self.clock = Clock()
        self.owner = Owner()
        self.manifests: dict[str, Manifest] = {}
        self.handles: list[SimHandle] = []
        self.found_copies = LocalCopies()
        self.selections: dict[str, Selection] = {}
        self.link: Link | None = None
        self.beats = Heartbeats(cluster.options.lease_s)
        self.known_since = 0.0  # when a coordinator that did not know it has welcomed it
        self.unsure_at = 0.0  # when the coordinator could last not count on it
        # when it has last lost a connection over which it was heard, by its own clock
        self.cut_off_at = float("-inf")
        self.cut: set[str] = set()  # leases whose readers are served no more
        self.dismissals: list[str] = []
        self.host_bytes = cluster.host_bytes
        self.asks = SimQuestions(self)
        self.copies = SimHostCopies(self, op_timeout_s)
        self.copies_refused = 0  # that it will refuse to make
        self.router = Router[SimHandle](cluster.numbers)
        # of the models that it watches, as it was told
        self.newest: dict[str, VersionInfo | None] = {}
        self._told = NewestTold()
        self._new_handle = new_handle
        self._said_held: dict[int, str] = {}  # of these: what content such a request says is held

    def __repr__(self) -> str:
        return f"<SimWorker {self.incarnation} link={self.link is not None}>"

    # -- registering

    def register(
        self,
        group: str,
        rank: int = 0,
        world_size: int = 1,
        *,
        model: str = MODEL,
        spot: bool = False,
        cut: Layout | None = None,
    ) -> SimHandle:
        """One rank's memory. `cut`: what it has of a tensor that all have a part of."""
        number = next(self.cluster.registrations)
        shard = Shard(
            f"r{number}", model, group, rank, world_size, spot, "", self.cluster.manifest, rank
        )
        if cut is not None:
            manifest, declared, coordinates = described(cut, rank)
            its = replace(shard, manifest=manifest, declared=declared, coordinates=coordinates)
            shard = replace(its, layout_id=manifest.layout_id)
        handle = self.take(shard)
        if cut is not None:
            handle.layout_id = layout_id_together(
                [described(cut, each)[0].layout_id for each in range(world_size)]
            )
            handle.part = f"{group}/{rank % cut.parts}" if cut.copies > 1 else ""
        return handle

    def fetcher(self, shard: int | None = 0, *, model: str = MODEL) -> SimHandle:
        """What can fetch once: that shard, or (None) the whole model."""
        number, apart = next(self.cluster.registrations), READ_ONLY if self.read_only else ""
        names = f"{apart}r{number}", model, f"{apart}fetch{number}"
        made = Shard(*names, 0, 1, True, "", None, shard or 0)
        return self.take(
            made
            if shard is not None
            else replace(made, layout_id="own/fetch", declared=Declaration())
        )

    def take(
        self, shard: Shard, begin: Callable[[SimHandle], None] = lambda handle: None
    ) -> SimHandle:
        """What registers that memory, of any kind. `begin` is called before it does."""
        handle = self._new_handle(self.cluster, self, shard)
        self.add(handle, begin)
        its = (
            each.layout_id for each in self.handles if host_group(each.shard.group) == shard.group
        )
        handle.layout_id = next(its, handle.layout_id)
        return handle

    def add(
        self, handle: SimHandle, begin: Callable[[SimHandle], None] = lambda handle: None
    ) -> None:
        """It is this worker's from now on."""
        self.handles.append(handle)
        self.router.add(handle.shard, handle)
        self.copies.machine.began(handle.member)
        self.cluster.by_registration[handle.shard.registration] = handle
        begin(handle)
        if self.link is not None and self.link.welcomed:
            handle.apply(handle.member.connected(self.now, self.cluster.options.lease_s))

    def drop(self, handle: HandlePort) -> None:
        """Forget a handle that is no more."""
        self.handles = [each for each in self.handles if each is not handle]
        self.router.remove(handle.shard)
        self.found_copies.remove(handle.shard.registration)
        self.cluster.by_registration.pop(handle.shard.registration, None)
        self.copies.ended(handle)

    def registered(self, registration: str) -> SimHandle | None:
        """What it has under that id."""
        return self.router.handles.get(registration)

    # -- its clock

    @property
    def now(self) -> float:
        """The time by its own clock."""
        return self.clock.at(self.cluster.now)

    def when(self, due: float) -> float:
        """When its clock shows that."""
        return self.clock.when(due)

    # -- its connection

    @property
    def is_online(self) -> bool:
        """Whether it has a connection over which it was welcomed."""
        return self.link is not None and self.link.welcomed

    def connect(self) -> None:
        """Open a connection and join."""
        assert self.alive
        assert self.link is None
        self.beats.connected()
        self.link = self.cluster.control.new_link(self)
        seen = self.router.cluster, self.router.epoch, self.router.term
        self.say(
            messages.Join(self.name, self.location, self.endpoints, 1, self.host_bytes, "", *seen)
        )

    def disconnect(self) -> None:
        """The connection breaks; messages on their way are lost, and the coordinator will notice
        some time.
        """
        link = self.link
        if link is None:
            return
        self.cluster.note(f"{self.name} loses its connection")
        self.link = None
        self.unsure_at = self.cluster.now
        if link.welcomed:
            self.cut_off_at = self.now
        self.cluster.guarantees.history.cut_off(self)
        self.cluster.control.link_lost(self, link)
        for handle in self.handles:
            if handle.last_call is not None and not handle.last_call.done:
                handle.last_call.online = False
        for handle in list(self.router.handles.values()):
            handle.apply(handle.member.disconnected(self.now))
        self.cluster.control.connect_again(self)
        self.cluster.users.disconnected(self)

    def crash(self) -> None:
        """The process and its memory are no more, and its users have not wanted that."""
        self.end()
        self.cluster.users.crashed(self)

    def end(self) -> None:
        """The process and its memory are no more."""
        self.cluster.note(f"{self.name} crashes")
        self.alive = False
        for handle in self.handles:
            self.cluster.guarantees.retained.lost(handle)
            handle.access = None
            if handle.last_call is not None:
                self.cluster.guarantees.history.crashed(handle.last_call)
            handle.todo.clear()
            handle.hooks.clear()
            if handle.pull is not None:
                handle.pull.over = True
                for lane in list(handle.pull.lanes.values()):
                    self.cluster.data.reader_died(lane)
            for lane in list(handle.serving):
                self.cluster.data.source_died(lane)
        link, self.link = self.link, None
        self.cluster.guarantees.history.cut_off(self)
        if link is not None:
            self.cluster.control.link_lost(self, link)

    def say(self, message: messages.FromWorker) -> None:
        """Tell the coordinator; without a session it is not said, as `runtime.control.link` has
        it.
        """
        if self.link is not None and (self.link.welcomed or isinstance(message, messages.Join)):
            if (
                isinstance(message, messages.Register)
                and message.held is not None
                and not message.held.voted
            ):
                self._said_held[message.request] = message.held.content_id
            self.cluster.guarantees.history.says(self, message)
            self.link.up.append(message)
            self.cluster.control.said_up(self, self.link)

    def beat(self) -> None:
        """Renew the lease."""
        self.say(self.beats.next())

    def heard_soon(self) -> list[messages.FromCoordinator | None]:
        """The messages on their way here."""
        return list(self.link.down) if self.link is not None else []

    # -- what it hears

    def granted(self, message: messages.LeaveGranted) -> None:
        """That is about to be told to one of its handles."""
        handle = self.router.asker(message.request)
        if handle is not None:
            self.cluster.guarantees.retained.granted(handle)

    def known(self, message: messages.Registered) -> None:
        """That is about to be told to one of its handles: what it has announced as held counts from
        now on.
        """
        handle, content_id = (
            self.router.asker(message.request),
            self._said_held.pop(message.request, None),
        )
        if handle is not None:
            self.cluster.guarantees.registered(handle, message)
        if handle is not None and content_id is not None and message.keep:
            self.cluster.guarantees.retained.stays(handle, content_id)

    def hear(self, message: messages.FromCoordinator) -> None:
        """Hand the message to its handle or module."""
        self.beats.heard(message)
        if isinstance(message, messages.Welcome):
            self._welcomed(message)
        elif isinstance(message, messages.Dismissed):
            self._dismissed(message)
        for routed in self.router.route(message):
            match routed:
                case Deliver():
                    self._tell(routed.handle, routed.message)
                case Examine(handle=handle, question=question):
                    if isinstance(question, messages.DigestAgain):
                        handle.digests.make_again(question)
                    else:
                        handle.digests.tell(question)
                case messages.MakeCopy() if self.copies_refused:
                    self.copies_refused -= 1
                    self.say(messages.CopyRefused(routed.copy, "not here"))
                case messages.MakeCopy():
                    self.copies.ordered(routed)
                case Answered():
                    self._answered(routed.message)
                case Reply():
                    self.say(routed.message)
                case messages.Announce():
                    before, history = self.newest.get(routed.model), self.cluster.guarantees.history
                    if self._told.goes_back(routed):
                        history.finds_loss(self, routed)
                    else:
                        history.goes_on(self, before, routed)
                    if routed.model in self.newest:
                        self.newest[routed.model] = routed.newest
                    self.cluster.guarantees.history.announced(self, routed)
                    self.cluster.users.announced(self, routed)
                case messages.CutReader():
                    self._cut(routed)
                case messages.DropCopy():
                    self.copies.dropped(routed)
                case _:
                    assert_never(routed)

    def _tell(self, handle: SimHandle, message: messages.ToRank) -> None:
        guarantees, record = self.cluster.guarantees, handle.last_call
        if record is not None and not record.done:
            guarantees.history.answered_by(self, record.judged, handle.shard.model)
        if (
            record is not None
            and not record.done
            and isinstance(message, messages.LeaveGranted | messages.Write | messages.Start)
        ):
            record.granted = True
            if isinstance(message, messages.LeaveGranted):
                guarantees.retained.let_go(handle)
        if (
            record is not None
            and isinstance(message, messages.Outcome)
            and message.key == record.key
        ):
            record.committed = message.committed
        if isinstance(message, messages.Outcome) and handle.member._memory.doubt == message.key:
            guarantees.resolved(handle, message)
        if isinstance(message, messages.Revoked) and handle.lied == message.content_id:
            guarantees.retained.lost(handle)  # the coordinator has found out
        handle.apply(handle.member.receive(message, self.now))

    def _welcomed(self, message: messages.Welcome) -> None:
        if self.link is None:
            return
        is_new, self.link.welcomed = not self.link.welcomed, True
        self.unsure_at, now = self.cluster.now, self.now
        for step in self.router.welcomed(message):
            match step:
                case LoseState():
                    step.handle.apply(step.handle.member.state_lost(now))
                case Resume():
                    step.handle.apply(step.handle.member.connected(now, message.lease_s))
                case Anew():
                    self._anew(step)
                case _:
                    assert_never(step)
        self.copies.connected()
        if is_new:
            self.cluster.users.welcomed(self)

    def _anew(self, step: Anew) -> None:
        match step:
            case Anew.FORGET_VERSIONS:
                self.newest = dict.fromkeys(self.newest)
                self._told.forget()
            case Anew.WATCH:
                for model in self.newest:
                    self.say(self._told.watch(model))
            case Anew.PIN:
                self.asks.say_pins()
            case _:
                assert_never(step)
        self.cluster.users.anew(self, step)

    def _dismissed(self, message: messages.Dismissed) -> None:
        """This incarnation is lost for good; its memory goes on under a new incarnation, and its
        present readers are served no more.
        """
        self.dismissals.append(message.reason)
        self.lives += 1
        self.incarnation = f"{self.name}.{self.lives}"
        for handle in self.handles:
            for lane in list(handle.serving):
                self.cluster.data.lane_shut(lane)

    def _cut(self, message: messages.CutReader) -> None:
        """Serve that reader no more on the connections that it has."""
        self.cut.add(message.lease)
        for handle in self.handles:
            for lane in [lane for lane in handle.serving if lane.incarnation == message.reader]:
                self.cluster.data.lane_shut(lane)
        self.say(messages.ReaderCut(message.lease))

    def _answered(self, message: Answer) -> None:
        self.copies.heard(message)
        self.cluster.users.answered(self, message)
        if isinstance(message, messages.Done | messages.Refused):
            self.asks.answered(message)
