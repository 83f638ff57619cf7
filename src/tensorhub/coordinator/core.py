"""The coordinator: `step(event, now) -> actions`. Pure: no clock, no I/O, no randomness of its own.

Theory of operation. First a step records the event (`_handle`). Then it works out the consequences
(`_settle`): operations go on, versions become available or unavailable, watchers and owners are
told. So the order of the facts within a step does not matter, and each consequence has one place.

Not responsible for weights (the coordinator never touches a byte of them), for protecting memory
(owners do, R3), or for durability (the shell makes entries durable, and says so with `Persisted`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import assert_never

from tensorhub import messages
from tensorhub.coordinator import invariants, limits
from tensorhub.coordinator.access import Access, admitted
from tensorhub.coordinator.actions import (
    Action,
    Connected,
    Disconnected,
    Durable,
    Event,
    Persisted,
    PersistFailed,
    Received,
    Silent,
    Tick,
)
from tensorhub.coordinator.cluster import Cluster, Session
from tensorhub.coordinator.corruption_checks import CorruptionChecks
from tensorhub.coordinator.coverage import Coverage
from tensorhub.coordinator.decisions import Decisions, OperationHandler
from tensorhub.coordinator.entities import Model, Operation, Version, Worker
from tensorhub.coordinator.fills import Fills
from tensorhub.coordinator.handovers import Handovers
from tensorhub.coordinator.holdings import Holdings, Withdrawals
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.observing import Observations
from tensorhub.coordinator.operations import Deadlines, Operations
from tensorhub.coordinator.publishes import Lineages, Publishes
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.registrations import Announcements, ManifestQuestions
from tensorhub.coordinator.restoring import Restorations
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.source_choice import Feeding, SourceChoice
from tensorhub.coordinator.states import COORDINATOR_TABLE, CoordinatorState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import Versions
from tensorhub.coordinator.views import Answers
from tensorhub.coordinator.waiting import awaits_agreement, is_of_available
from tensorhub.machine import Stateful, demand
from tensorhub.types import OpKind, Options, VersionInfo

# of a lease: a step that is so late, with none before it, shows that the coordinator did not run
GAP = 1 / 8
Often = messages.Progress | messages.ReadyToWrite | messages.Prepared  # what is said most often
# newest versions of each model that holders may announce again; retained ones always may
RECOVERED_PER_MODEL_MAX = 64


class Coordinator(Stateful[CoordinatorState]):
    """One coordinator, with all that it knows.

    `cluster`: the id of its durable state. `epoch`: larger than the epochs of all earlier
    coordinators on that state. `term`: of no other coordinator; "": no worker may rely on that.
    `epochs_from`: a number by chance, small beside 2**32, from which the epochs of groups count. A
    coordinator on another copy of the state may have the same epoch; no operation there has the key
    of one here.
    `ids`: mints ids that are unique in the cluster. `durable`: the content of the store at the
    start. `wall_offset_s`: what makes `now` seconds since 1970, for people.
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
        wall_offset_s: float = 0.0,
        term: str = "",
        epochs_from: int = 0,
    ) -> None:
        super().__init__(CoordinatorState.RECOVERING)
        observations = Observations(wall_offset_s, epoch)
        self.cluster = Cluster(cluster, epoch, term, options, ids, observations)
        self.cluster.epochs_minted += epochs_from
        self.cluster.now = self.cluster.began_at = self.cluster.listens_since = now
        self._versions = Versions(self.cluster)
        self._retentions = Retentions(self.cluster)
        self._feeding = Feeding(self.cluster)
        self._choice = SourceChoice(self.cluster, self._feeding)
        self._readers = Readers(self.cluster, self._feeding, self._choice)
        self._holdings = Holdings(self.cluster, self._feeding, self._readers)
        self._withdrawals = Withdrawals(
            self.cluster, self._readers, self._holdings, self._retentions
        )
        self._handovers = Handovers(self.cluster, self._retentions)
        self._corruption_checks = CorruptionChecks(self.cluster, self._readers, self._holdings)
        self._testimonies = Testimonies(
            self.cluster, self._readers, self._holdings, self._corruption_checks
        )
        manifest_questions, coverage = ManifestQuestions(self.cluster), Coverage(self.cluster)
        publishes = Publishes(
            self.cluster, self._versions, self._holdings, self._testimonies, coverage
        )
        fills = Fills(
            self.cluster,
            self._versions,
            self._readers,
            self._choice,
            self._holdings,
            self._retentions,
            self._testimonies,
            manifest_questions,
            coverage,
        )
        handlers: dict[OpKind, OperationHandler] = {
            kind: publishes if kind is OpKind.PUBLISH else fills for kind in OpKind
        }
        decisions = Decisions(self.cluster, self._retentions, handlers)
        deadlines = Deadlines(self.cluster, self._versions, self._retentions, fills)
        self._operations = Operations(
            self.cluster,
            self._readers,
            self._testimonies,
            self._corruption_checks,
            handlers,
            decisions,
            deadlines,
            fills,
            coverage,
        )
        self._lineages = Lineages(self.cluster, self._versions, self._holdings, self._operations)
        self._restorations = Restorations(self.cluster, self._versions, self._testimonies)
        self._membership = Membership(
            self.cluster,
            self._retentions,
            self._holdings,
            self._withdrawals,
            self._handovers,
            self._operations,
            Announcements(self.cluster, self._holdings, self._testimonies),
            manifest_questions,
        )
        self._access = Access(self.cluster, self._membership)
        self._answers = Answers(self.cluster, self._versions)
        # by kind of timer: what is done when one is due, by its key
        self._due: dict[str, Callable[[str], None]] = {
            "worker": self._membership.lease_due,
            "restate": self._membership.restate_due,
            "manifest": manifest_questions.due,
            "gone": lambda _: self._membership.give_up_gone(),
            "idle": lambda number: self._access.due(int(number)),
            "woken": lambda _: None,  # see `_settle_woken`
            "notices": self._retentions.go_on_telling,
            "operation": self._operations.deadline_passed,
            "retry": self._operations.retry_due,
            "withdrawal": self._withdrawals.due,
            "handover": self._handovers.failed,
            "handovers": self._handovers.retry_due,
            "digests": self._testimonies.overdue,
            "recovery": lambda _: self._recovery_over(),
        }
        if durable is not None:
            self._recover(durable)
        if not self.cluster.is_recovering:
            self.become(CoordinatorState.SERVING, 0, now, "nothing was published before")
            self.cluster.happened("serving")

    def __repr__(self) -> str:
        c = self.cluster
        return (
            f"<Coordinator {self.state} epoch={c.epoch} workers={len(c.workers)} "
            f"models={len(c.models)} "
            f"operations={sum(1 for _ in c.operations())} leases={len(c.leases)}>"
        )

    @property
    def observations(self) -> Observations:
        """What observers are told."""
        return self.cluster.observations

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
                publication.lineage,
            )
            what = publication.layout_id, publication.key, publication.manifest_ids
            self._versions.recover(Version(info, *what), model)
        for record in durable.models:
            lineage = record.lineage, record.mark, record.rollback, record.bounds
            origin = record.origin, record.origin_mark
            self._versions.begin_lineage(cluster.model(record.model), *lineage, origin)
        for digested in durable.digested:
            version = cluster.model(digested.model).versions.get(digested.number)
            if version is not None and version.info.content_id == digested.content_id:
                self._testimonies.recover(version, digested.roots)
        self._retentions.recover(durable)
        for model in cluster.models.values():
            for number in sorted(set(model.versions) - model.retained())[:-RECOVERED_PER_MODEL_MAX]:
                del model.versions[number]
        for described in durable.described:
            version = cluster.model(described.model).versions.get(described.number)
            if version is not None and version.info.content_id == described.content_id:
                cluster.recover_description(version, described.description, described.parts)
        for decision in sorted(durable.decisions, key=lambda d: (d.key.epoch, d.key)):
            cluster.decisions[decision.key.model, decision.key.group] = decision
        if durable.publications:  # the holders may come back
            cluster.timers.set("recovery", "", cluster.now + cluster.options.lease_s)

    # ----------------------------------------------------------------------------------------------
    # entry points

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event at time `now` (seconds; it never goes back). Return the actions, in
        order.
        """
        cluster, before = self.cluster, self.cluster.now
        cluster.now = max(now, before)
        cluster.cause += 1
        cluster.noted.clear()
        cluster.followed = 0
        due = cluster.timers.next()
        if due is not None and due <= cluster.now:
            self._notice_gap(due, before)
            self._run_timers()
        self._handle(event)
        self._settle()
        if cluster.woken:
            self._settle_woken(is_their_turn=isinstance(event, Tick))
        return cluster.take_actions()

    def next_deadline(self) -> float | None:
        """When `step(Tick(), ...)` is due; None: no deadline is set."""
        return self.cluster.timers.next()

    def check_invariants(self) -> None:
        """Raise InvariantBroken, with the entity's story, if an invariant does not hold."""
        invariants.check(self.cluster)

    def check_counts(self) -> None:
        """Raise InvariantBroken if a counter by which a bound is kept is wrong."""
        invariants.check_counts(self.cluster)

    def check_touched(self) -> None:
        """`check_invariants` for the entities that the last step has changed. This costs as much as
        that step.
        """
        invariants.check_noted(self.cluster)

    def check_waits(self) -> None:
        """Raise InvariantBroken if a call waits that can go on: nothing comes of settling it once
        more, or something should have woken it. Not so where owners may be asked anew as time
        passes: about digests, and for "available". This costs as much as all calls do.
        """
        before = self.cluster.unsettled
        for operation in self.cluster.operations():
            asks = is_of_available(operation) or awaits_agreement(operation)
            if not asks and not self.cluster.is_woken(operation):
                self.cluster.look_at_all(operation)
                self._operations.settle(operation)
                # G7
                demand(self.cluster.unsettled == before, "who can go on is woken", operation)

    # ----------------------------------------------------------------------------------------------
    # events

    def _notice_gap(self, due: float, before: float) -> None:
        """A step that comes long after a deadline, and after the step at `before`, shows that this
        coordinator was stopped or starved, and has heard no worker. (Deadlines that wait for their
        turn are no gap: the coordinator handles other events between them.)
        """
        cluster = self.cluster
        if cluster.now - max(due, before) > cluster.options.lease_s * GAP:
            cluster.listens_since = cluster.now

    def _run_timers(self) -> None:
        """Handle the deadlines that have passed. If very many have, this step handles some of them,
        and the next steps the rest.
        """
        for _ in range(limits.TIMERS_PER_STEP):
            name = (
                None
                if self.cluster.has_done_much()
                else self.cluster.timers.pop_due(self.cluster.now)
            )
            if name is None:
                return
            kind, key = name
            self._due[kind](key)

    def _recovery_over(self) -> None:
        """A worker that has not come back within the first lease after a restart is lost."""
        over_at = self._membership.recovery_ends_at
        if self.cluster.now < over_at:
            self.cluster.timers.set("recovery", "", over_at)
            return
        self.become(
            CoordinatorState.SERVING, self.cluster.cause, self.cluster.now, "a lease has passed"
        )
        self.cluster.happened("serving")
        self._retentions.recovery_over()
        self._membership.recovery_over()
        for model in self.cluster.models.values():
            self.cluster.touch(model)

    def _handle(self, event: Event) -> None:
        sessions = self.cluster.sessions
        match event:
            case Received():  # what happens most often comes first
                session = sessions.get(event.session)
                if session is not None:
                    self._receive(session, event.message)
            case Connected():
                self._access.connect(event)
            case Disconnected():
                session = sessions.get(event.session)
                if session is not None:
                    self._membership.disconnected(session)
            case Persisted() | PersistFailed():
                self._written(
                    event.record, event.reason if isinstance(event, PersistFailed) else None
                )
            case Silent():
                self._membership.silent(event.sessions)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _written(self, record: int, failure: str | None) -> None:
        """The store has this entry, or (`failure`) cannot take it."""
        write = self.cluster.pending_writes.pop(record, None)
        component: Lineages | Restorations | Retentions = self._retentions
        if write is None:
            self._operations.written(record, failure)
            return
        if isinstance(write.message, messages.Rollback):
            component = self._lineages
        elif isinstance(write.message, messages.Restore):
            component = self._restorations
        if failure is None:
            component.recorded(write)
        else:
            component.not_recorded(write, failure)

    def _receive(self, session: Session, message: messages.FromWorker) -> None:
        self._access.heard(session, message)
        worker = session.worker
        if worker is not None:
            answers = (
                message.answers if isinstance(message, messages.Heartbeat) else session.welcomed_at
            )
            # which answers nothing, also if it comes twice
            if not isinstance(message, messages.Join):
                self._membership.heard(worker, answers)
        if session.read_only:
            counts = admitted(self.cluster, session, message)
            if counts is None:
                return
            message = counts
        if worker is not None and isinstance(message, Often):
            self._operations.hear(worker, message)
        elif isinstance(message, messages.FromAnybody):
            self._receive_from_anybody(session, message)
        elif worker is None:
            self.cluster.close_session(session.number, f"{type(message).__name__} before Join")
        elif isinstance(message, messages.Fill) and message.kind is OpKind.PUBLISH:
            self.cluster.close_session(session.number, "a publication is not a Fill")
        else:
            self._receive_from_worker(worker, message)

    def _receive_from_anybody(self, session: Session, message: messages.FromAnybody) -> None:
        match message:
            case messages.Heartbeat() if session.role == "worker" and session.worker is None:
                self.cluster.close_session(session.number, "Heartbeat before Join")
            case messages.Heartbeat():
                if session.worker is not None:
                    self._membership.arrived(session.worker)
                self.cluster.send(
                    session.number, messages.HeartbeatAck(message.sequence, self.cluster.now)
                )
            case messages.Join() if session.role == "worker" and session.worker is None:
                self._membership.join(session, message)
            case messages.Join():
                self.cluster.close_session(session.number, "only a worker joins, and only once")
            case messages.Watch():
                self._access.watch(session, message)
            case messages.Unwatch():
                self.cluster.unwatch(session, message.model)
            case messages.Describe():
                self._answers.describe(session.number, message)
            case messages.GetManifest():
                self._answers.manifest(session.number, message)
            case messages.GetPart():
                self._answers.part(session.number, message)
            case messages.GetPublication():
                self._answers.publication(session.number, message)
            case messages.Check():
                self._answers.check(session.number, message)
            case messages.GetEvents():
                self._answers.events(session.number, message)
            case messages.Explain():
                self._answers.explain(session.number, message)
            case messages.GetUpdates():
                self._answers.updates(session.number, message)
            case messages.CheckStamp():
                self._answers.check_stamp(session.number, message)
            case _:
                assert_never(message)

    def _receive_from_worker(self, worker: Worker, message: messages.FromJoined) -> None:
        match message:
            case messages.Leave():
                self._membership.leave(worker, message.reason[: limits.ERROR_CHARS_MAX])
            case messages.Register():
                self._membership.register(worker, message)
            case messages.Deregister():
                self._membership.deregister(worker, message)
            case messages.BegunWith():
                self._membership.begun_with(worker, message)
            case messages.LeaveRequest():
                self._withdrawals.ask(worker, message)
            case messages.Fenced():
                self._holdings.withdrawn(worker, message)
            case messages.ReaderCut():
                self._readers.confirm_cut(worker, message)
            case messages.Rollback():
                self._lineages.ask(worker.session, message)
            case messages.Restore():
                self._restorations.ask(worker, message)
            case messages.Retain():
                self._retentions.retain(worker.session, message)
            case messages.Pin():
                self._retentions.pin(worker, message)
            case messages.Unpin():
                self._retentions.unpin(worker, message)
            case messages.RetainedAck():
                self._retentions.kept(worker, message)
            case messages.CopyRefused():
                self._handovers.failed(message.copy, worker)
            case messages.DigestedAgain():
                self._corruption_checks.answered(worker, message)
            case messages.Digests():
                self._testimonies.told(worker, message)
            case messages.Took():
                is_its = self._operations.is_rank(worker, message.key, message.rank)
                self.observations.took(worker, message, is_its=is_its)
            case messages.Served():
                self.observations.served(worker.incarnation, message.timing)
            case _:
                self._operations.hear(worker, message)

    # ----------------------------------------------------------------------------------------------
    # consequences

    def _settle(self) -> None:
        cluster = self.cluster
        while cluster.changed_operations or cluster.uncounted or cluster.changed_models:
            if cluster.renumbered:
                self._membership.tell_epochs()
            while cluster.changed_operations:
                _, operation = cluster.changed_operations.popitem()
                if not operation.decided:
                    cluster.note(operation)
                    self._operations.settle(operation)
            self._feeding.settle()
            cluster.count()
            if cluster.changed_models:
                name, wakes = next(iter(cluster.changed_models.items()))
                del cluster.changed_models[name]
                model = cluster.models.get(name)
                if model is None:
                    continue  # it was forgotten since
                self._settle_model(model)
                if wakes:
                    for operation in model.waiting.restless.values():
                        cluster.wake(operation)
                    cluster.wake_all(model.waiting.flexible)
                cluster.forget_if_unused(model)

    def _settle_model(self, model: Model) -> None:
        self._versions.refresh(model)
        self._retentions.settle(model)
        self._withdrawals.settle(model)
        self._handovers.settle(model)
        self._lineages.settle(model)

    def _settle_woken(self, *, is_their_turn: bool) -> None:
        """Settle a few of the woken operations: steps stay short, however many are woken. If there
        are many, they have steps of their own, a few in each step; other events come in between.
        """
        cluster, left = self.cluster, limits.WOKEN_PER_STEP
        while queue := cluster.woken:
            are_few = len(queue) <= left and sum(map(_looks, queue.values())) <= left
            if left <= 0 or not (are_few or is_their_turn):
                cluster.timers.set("woken", "", cluster.now)
                return
            turn = list[Operation]()
            for operation in islice(queue.values(), left):
                if left > 0:
                    turn.append(operation)
                    left -= _looks(operation)
            for operation in reversed(turn):  # what is changed last is settled first
                cluster.changed_operations[operation.key] = queue.pop(operation.key)
            self._settle()


def _looks(operation: Operation) -> int:
    """As how many it counts when it is settled: a look at a rank passes over all sources that have
    failed it.
    """
    return sum(1 + len(part.attempts.failures) for part in operation.parts.values())
