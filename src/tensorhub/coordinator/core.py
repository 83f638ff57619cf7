"""The coordinator: `step(event, now) -> actions`. Pure: no clock, no I/O, no randomness of its own.

Theory of operation. A handler records what happened (`_handle`); what follows from it is worked out afterwards
(`_settle`): operations that can go on go on, versions become available or not, watchers and owners are told. So the
order in which facts arrive within a step does not matter, and each consequence has one place.

Not responsible for weights (it never touches a byte of them), for protecting memory (owners do, R3), or for making
anything durable (the shell does, and says so with `Persisted`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import assert_never

from tensorhub.coordinator import access, invariants, limits
from tensorhub.coordinator.actions import Action, CloseSession, Durable
from tensorhub.coordinator.answers import Answers
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Session, Version, Worker
from tensorhub.coordinator.events import (
    Connected,
    Disconnected,
    Event,
    Persisted,
    PersistFailed,
    Received,
    Tick,
)
from tensorhub.coordinator.handovers import Handovers
from tensorhub.coordinator.lineage import Lineages
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.operations import Operations
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import COORDINATOR_TABLE, CoordinatorState
from tensorhub.coordinator.versions import Versions
from tensorhub.coordinator.visitors import Visitors
from tensorhub.coordinator.withdrawals import Withdrawals
from tensorhub.machine import InvariantBroken, Stateful
from tensorhub.messages import (
    BegunWith,
    Check,
    ChunksThere,
    CopyRefused,
    Deregister,
    Describe,
    DigestedAgain,
    Digests,
    Fenced,
    Fill,
    FromAnybody,
    FromJoined,
    FromWorker,
    GetManifest,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    LeaveRequest,
    Pin,
    ReaderCut,
    Register,
    Retain,
    RetainedAck,
    Rollback,
    Unpin,
    Unwatch,
    Watch,
)
from tensorhub.types import OpKind, Options, VersionInfo

RECOVERED_PER_MODEL_MAX = 64  # newest versions of each model that holders may announce again; retained ones always may


class Coordinator(Stateful[CoordinatorState]):
    """One coordinator's whole mind.

    `cluster`: the id of its durable state. `epoch`: larger than that of any coordinator before it on that state.
    `ids`: mints ids that nobody else ever mints. `durable`: what the store held at the start.
    """

    machine = "coordinator"
    table = COORDINATOR_TABLE

    def __init__(
        self,
        *,
        cluster: str,
        epoch: int,
        options: Options,
        ids: Callable[[], str],
        now: float,
        durable: Durable | None = None,
    ) -> None:
        super().__init__(CoordinatorState.RECOVERING)
        self.cluster = Cluster(cluster, epoch, options, ids)
        self.cluster.now = now
        self._versions = Versions(self.cluster)
        self._retentions = Retentions(self.cluster)
        self._readers = Readers(self.cluster)
        self._withdrawals = Withdrawals(self.cluster, self._readers, self._retentions)
        self._handovers = Handovers(self.cluster, self._retentions)
        self._operations = Operations(self.cluster, self._versions, self._readers, self._retentions)
        self._lineages = Lineages(self.cluster, self._versions, self._readers, self._operations)
        self._membership = Membership(
            self.cluster, self._retentions, self._readers, self._withdrawals, self._handovers, self._operations
        )
        self._visitors = Visitors(self.cluster, self._membership)
        self._answers = Answers(self.cluster, self._versions)
        if durable is not None:
            self._recover(durable)
        if not self.cluster.is_recovering:
            self.become(CoordinatorState.SERVING, 0, now, "nothing was published before")

    def __repr__(self) -> str:
        c = self.cluster
        return (
            f"<Coordinator {self.state} epoch={c.epoch} workers={len(c.workers)} models={len(c.models)} "
            f"operations={sum(1 for _ in c.operations())} leases={len(c.leases)}>"
        )

    def _recover(self, durable: Durable) -> None:
        cluster = self.cluster
        newest = sorted(durable.publications, key=lambda p: (p.model, p.lineage, p.number))
        for publication in newest:
            model = cluster.model(publication.model)
            info = VersionInfo(
                publication.model,
                publication.number,
                publication.content_id,
                publication.nbytes,
                publication.world_size,
            )
            self._versions.recover(Version(info, publication.lineage, publication.layout_id, publication.key), model)
        for record in durable.models:
            model = cluster.model(record.model)
            model.lineage, model.mark, model.rolled_back_by = record.lineage, record.mark, record.rollback
            model.retain = record.retain
        for digested in durable.digested:
            version = cluster.model(digested.model).versions.get(digested.number)
            if version is not None and version.info.content_id == digested.content_id:
                self._operations.recover_roots(version, digested.roots)
        self._retentions.recover(durable.pins)
        for model in cluster.models.values():
            for number in sorted(set(model.versions) - model.retained())[:-RECOVERED_PER_MODEL_MAX]:
                del model.versions[number]
        for decision in sorted(durable.decisions, key=lambda d: (d.key.epoch, d.key)):
            cluster.decisions[decision.key.model, decision.key.group] = decision
        if durable.publications:  # whose holders may come back
            cluster.timers.set("recovery", "", cluster.now + cluster.options.lease_s)

    # ------------------------------------------------------------------------------------------------- entry points

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event at time `now` (seconds, never going back); return what is to be done, in write."""
        cluster = self.cluster
        cluster.now = max(now, cluster.now)
        cluster.cause += 1
        cluster.noted.clear()
        cluster.weighed = 0
        self._run_timers()
        self._handle(event)
        self._settle()
        self._settle_guests(is_their_turn=isinstance(event, Tick))
        return cluster.take_actions()

    def next_deadline(self) -> float | None:
        """When `step(Tick(), ...)` is wanted at the latest; None: no deadline is set."""
        return self.cluster.timers.next()

    def check_invariants(self) -> None:
        """Raise InvariantBroken, with a story, if anything that always holds does not."""
        invariants.check(self.cluster)

    def check_touched(self) -> None:
        """The same, of what the last step has changed: costs as much as that step, however large the cluster is."""
        invariants.check_noted(self.cluster)

    # ------------------------------------------------------------------------------------------------------ events

    def _run_timers(self) -> None:
        """Do what is due; where that is very much a part, and the rest in the next steps, for which it is time at once."""
        for _ in range(limits.TIMERS_PER_STEP):
            few = len(self.cluster.noted) < limits.NOTED_PER_STEP
            name = self.cluster.timers.pop_due(self.cluster.now) if few else None
            match name:
                case None:
                    return
                case ("worker", incarnation):
                    self._membership.lease_due(incarnation)
                case ("guest", number):
                    self._visitors.due(int(number))
                case ("guests", _):
                    pass  # see `_settle_guests`
                case ("restate", incarnation):
                    self._membership.restate_due(incarnation)
                case ("operation", key):
                    self._operations.deadline_passed(key)
                case ("retry", key):
                    self._operations.retry_due(key)
                case ("withdrawal", registration):
                    self._withdrawals.due(registration)
                case ("handover", copy):
                    self._handovers.due(copy)
                case ("handovers", model_name):
                    self._handovers.retry_due(model_name)
                case ("digests", model_name):
                    self._operations.digests_overdue(model_name)
                case ("recovery", _):
                    self.become(CoordinatorState.SERVING, self.cluster.cause, self.cluster.now, "a lease has passed")
                    self._retentions.recovery_over()
                    for model in self.cluster.models.values():
                        self.cluster.touch(model)
                case _:
                    raise InvariantBroken(f"no such timer: {name}")

    def _handle(self, event: Event) -> None:
        sessions = self.cluster.sessions
        match event:
            case Connected():
                self._visitors.connect(event)
            case Received():
                session = sessions.get(event.session)
                if session is not None:
                    self._receive(session, event.message)
            case Disconnected():
                session = sessions.get(event.session)
                if session is not None:
                    self._membership.disconnected(session)
            case Persisted():
                if event.record in self.cluster.pending_writes:
                    write = self.cluster.pending_writes.pop(event.record)
                    component = self._lineages if isinstance(write.message, Rollback) else self._retentions
                    component.recorded(write)
                else:
                    self._operations.persisted(event.record)
            case PersistFailed():
                if event.record in self.cluster.pending_writes:
                    write = self.cluster.pending_writes.pop(event.record)
                    component = self._lineages if isinstance(write.message, Rollback) else self._retentions
                    component.not_recorded(write, event.reason)
                else:
                    self._operations.persist_failed(event.record, event.reason)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _receive(self, session: Session, message: FromWorker) -> None:
        self._visitors.heard(session, message)
        if session.worker is not None:
            self._membership.heard(session.worker)
        if session.read_only and not access.admits(self.cluster, session, message):
            return
        if isinstance(message, FromAnybody):
            self._receive_from_anybody(session, message)
        elif session.worker is None:
            self._offend(session, f"{type(message).__name__} before Join")
        elif isinstance(message, Fill) and message.kind is OpKind.PUBLISH:
            self._offend(session, "a publication is not a Fill")
        else:
            self._receive_from_worker(session.worker, message)

    def _offend(self, session: Session, what: str) -> None:
        self.cluster.act(CloseSession(self.cluster.cause, session.number, what))

    def _receive_from_anybody(self, session: Session, message: FromAnybody) -> None:
        match message:
            case Heartbeat() if session.role == "worker" and session.worker is None:
                self._offend(session, "Heartbeat before Join")
            case Heartbeat():
                self.cluster.send(session.number, HeartbeatAck(message.sequence))
            case Join() if session.role == "worker" and session.worker is None:
                self._membership.join(session, message)
            case Join():
                self._offend(session, "only a worker joins, and only once")
            case Watch():
                self._visitors.watch(session, message.model)
            case Unwatch():
                self.cluster.unwatch(session, message.model)
            case Describe():
                self._answers.describe(session.number, message)
            case GetManifest():
                self._answers.manifest(session.number, message)
            case Check():
                self._answers.check(session.number, message)
            case _:
                assert_never(message)

    def _receive_from_worker(self, worker: Worker, message: FromJoined) -> None:
        match message:
            case Leave():
                self._membership.leave(worker, message.reason[: limits.ERROR_CHARS_MAX])
            case Register():
                self._membership.register(worker, message)
            case Deregister():
                self._membership.deregister(worker, message)
            case BegunWith():
                self._membership.begun_with(worker, message)
            case LeaveRequest():
                self._withdrawals.ask(worker, message)
            case Fenced():
                self._readers.withdrawn(worker, message)
            case ReaderCut():
                self._readers.confirm_cut(worker, message)
            case Rollback():
                self._lineages.ask(worker.session, message)
            case Retain():
                self._retentions.retain(worker.session, message)
            case Pin():
                self._retentions.pin(worker, message)
            case Unpin():
                self._retentions.unpin(worker, message)
            case RetainedAck():
                self._retentions.kept(worker, message)
            case CopyRefused():
                self._handovers.refused(worker, message.copy)
            case DigestedAgain():
                self._operations.digested_again(worker, message)
            case ChunksThere():
                self._operations.chunks_there(worker, message)
            case Digests():
                self._operations.digests_told(worker, message)
            case _:
                self._operations.hear(worker, message)

    # ------------------------------------------------------------------------------------------------ consequences

    def _settle(self) -> None:
        cluster = self.cluster
        while cluster.changed_operations or cluster.changed_models:
            while cluster.changed_operations:
                _, operation = cluster.changed_operations.popitem()
                if not operation.decided:
                    cluster.note(operation)
                    self._operations.settle(operation)
            if cluster.changed_models:
                name, stirs = next(iter(cluster.changed_models.items()))
                del cluster.changed_models[name]
                model = cluster.models.get(name)
                if model is None:
                    continue  # it was forgotten since
                self._versions.refresh(model)
                self._retentions.settle(model)
                self._withdrawals.settle(model)
                self._handovers.settle(model)
                self._lineages.settle(model)
                if stirs:
                    cluster.changed_operations.update(model.waiting)
                    cluster.stirred.update(model.guests_waiting)
                cluster.forget_if_unused(model)

    def _settle_guests(self, *, is_their_turn: bool) -> None:
        """Few are seen to at once. However many wait, and whatever happens to what they wait for, the steps of others stay
        short: many have steps of their own, some in each, and others' come between.
        """
        cluster = self.cluster
        if is_their_turn or len(cluster.stirred) <= limits.GUESTS_PER_STEP:
            for key in list(islice(cluster.stirred, limits.GUESTS_PER_STEP)):
                if cluster.weighed < limits.SOURCES_PER_STEP and key in cluster.stirred:
                    cluster.changed_operations[key] = cluster.stirred.pop(key)
                    self._settle()
        if cluster.stirred:
            cluster.timers.set("guests", "", cluster.now)
