"""Workers, ranks and groups: which workers are live, suspect or lost (G9, R11), and which ranks a
group has.

Not responsible for registrations and announcements (`registrations`), nor for the effects of a lost
rank on its operation (`operations`) and its memory (`holdings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import DOOR
from tensorhub.coordinator.cluster import LOST_KEPT_MAX, Cluster, Session
from tensorhub.coordinator.entities import Group, Member, Worker
from tensorhub.coordinator.handovers import Handovers
from tensorhub.coordinator.holdings import Holdings, Withdrawals
from tensorhub.coordinator.operations import Operations
from tensorhub.coordinator.registrations import (
    Announcements,
    ManifestQuestions,
    beyond_decisions,
    misfit,
    too_much,
)
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import WorkerState
from tensorhub.coordinator.testimonies import is_asked
from tensorhub.errors import CoordinatorUnavailable, RegistrationError, TensorHubError
from tensorhub.layouts.identity import layout_id_together
from tensorhub.messages import (
    BegunWith,
    Deregister,
    Done,
    EpochChanged,
    Join,
    Publish,
    Register,
    RegisterAgain,
    Registered,
    Welcome,
)
from tensorhub.types import Purpose, release

LOOKS_APART = 1 / 8  # of a lease, between two looks for what lies unread
AWAY_LEASES_MAX = 2  # without a connection; however many wait at the door
LEAVES = "leaves"  # why a worker is suspect that is about to be gone
OWN_LAYOUT = "own/"  # begins the layout id of a rank that says nothing of the other ranks


@dataclass(eq=False, repr=False)
class Membership:
    """Changes sessions, workers, members and groups; no other component does."""

    _cluster: Cluster
    _retentions: Retentions
    _holdings: Holdings
    _withdrawals: Withdrawals
    _handovers: Handovers
    _operations: Operations
    _announcements: Announcements
    _manifest_questions: ManifestQuestions
    # overdue, without a session; may be pending
    _missed: dict[str, None] = field(default_factory=dict, init=False)
    # missed incarnations without a pending connection
    _gone: dict[str, None] = field(default_factory=dict, init=False)
    # the step that asked last about pending connections
    _asked_in: int = field(default=0, init=False)
    # when a read-only worker first knew of a later epoch
    _doubted_at: float | None = field(default=None, init=False)

    # -- workers

    def _welcomed_since(self, message: Join) -> str:
        """How the worker was welcomed by another coordinator that has led on the state of this one
        since this one found it; "": it was not.
        """
        cluster = self._cluster
        told = f"worker {message.name!r} was welcomed in epoch {message.epoch}"
        if message.cluster != cluster.id or message.epoch < cluster.epoch:
            return ""
        if message.epoch > cluster.epoch:
            return f"{told} already, and this is epoch {cluster.epoch}"
        is_other = message.term not in ("", cluster.term)
        return f"{told} by another coordinator, and this is that epoch again" if is_other else ""

    def _has_led_on(self) -> bool:
        """Whether a read-only worker of a later epoch was turned away a lease ago, and this
        coordinator still leads.
        """
        if self._doubted_at is None:
            self._doubted_at = self._cluster.now
        return self._cluster.now >= self._doubted_at + self._cluster.options.lease_s

    def join(self, session: Session, message: Join) -> None:
        """A worker introduces itself on a new connection: for the first time, or again within its
        lease.
        """
        cluster = self._cluster
        session.remembers = message.cluster == cluster.id and not session.read_only
        told = self._welcomed_since(message)
        if told and session.remembers:
            cluster.outlived(told)
            return
        # What a read-only worker claims ends no coordinator. Its Welcome tells it that the state is
        # an older copy; of a later epoch only once a former leader would have ended.
        if told and message.epoch > cluster.epoch and not self._has_led_on():
            text = (
                f"{told}: another coordinator leads, or this one has an older copy of its state "
                f"and welcomes this worker within {cluster.options.lease_s:g} s"
            )
            cluster.refuse_session(session.number, CoordinatorUnavailable(text))
            return
        if session.incarnation in cluster.lost:
            cluster.dismiss(
                session.number,
                "this incarnation was lost; come back as a new one",
                "lost incarnation",
            )
            return
        worker = cluster.workers.get(session.incarnation)
        if worker is not None and worker.session is not None and worker.session > session.number:
            cluster.close_session(session.number, "the same worker has a newer connection")
            return  # its worker has given up the connection over which this was said (G9)
        if worker is not None and worker.read_only is not session.read_only:
            text = "this incarnation has connected with another kind of token"
            cluster.dismiss(session.number, text, "incarnation of another kind")
            return
        known = worker is not None
        if worker is None and len(cluster.workers) >= 2 * cluster.options.sessions_max:
            text = (
                f"{len(cluster.workers)} workers are there, or were just now "
                f"(Options.sessions_max): try again soon"
            )
            cluster.refuse_session(session.number, CoordinatorUnavailable(text))
            return
        if worker is None:
            worker = Worker(
                session.incarnation,
                message.name,
                message.location,
                message.endpoints,
                session.number,
                cluster.now,
                # it holds nothing yet, and says what it holds only when it has heard the Welcome
                cluster.now,
                message.host_bytes,
                session.read_only,
            )
            cluster.workers[session.incarnation] = worker
            if worker.host_bytes:
                cluster.hosts[worker.incarnation] = worker
                self._handovers.room_changed()
            if cluster.is_recovering and cluster.now < self.recovered_at and not worker.read_only:
                cluster.arriving[worker.incarnation] = None
        elif worker.session is not None and worker.session != session.number:
            cluster.close_session(worker.session, "the same worker has connected again")
            cluster.sessions[worker.session].worker = None
        worker.session, before = session.number, worker.transports
        worker.connected_at(message.endpoints)
        worker.release = message.release
        cluster.note(worker)
        cluster.reckon_all_of(worker)
        if worker.transports != before:
            self._reach_changed(worker)
        session.worker, session.welcomed_at = worker, cluster.now
        cluster.read_only.away.pop(worker, None)
        self.heard(worker, worker.answers)
        self._set_deadline(worker)
        if known:
            cluster.timers.set("restate", worker.incarnation, cluster.now + cluster.options.lease_s)
        welcome = Welcome(
            cluster.id,
            cluster.epoch,
            cluster.options.lease_s,
            known,
            session.read_only,
            cluster.now,
            release(),
            cluster.term,
        )
        cluster.send(session.number, welcome)
        if worker.host_bytes:  # else it makes no copies; and there may be very many models
            self._handovers.back(worker)

    def _reach_changed(self, worker: Worker) -> None:
        """The worker is back with other transports: its ranks have other sources, and serve other
        readers.
        """
        cluster = self._cluster
        for member in worker.members.values():
            operation = member.group.operation
            if operation is not None:
                cluster.wake(operation)
            if member.holding is not None:
                cluster.wake_all(member.holding.version.starving)

    def heard(self, worker: Worker, answers: float) -> None:
        """Any message renews the lease. The worker counts only while it answers a word of the
        coordinator that is younger than a lease.

        `answers`: the time of that word; a time in the future is taken for now.
        """
        cluster = self._cluster
        worker.heard_at = cluster.now  # no promise is about this time, or the time of that word
        if answers <= worker.answers and worker.state is WorkerState.LIVE:
            return
        counted = cluster.counts_on(worker)
        worker.answers = max(worker.answers, min(answers, cluster.now))
        answered = cluster.now < worker.answers + cluster.options.lease_s
        if worker.state is WorkerState.SUSPECT and worker.session is not None and answered:
            cluster.become(worker, WorkerState.LIVE, "heard again")
            self._set_deadline(worker)
        if cluster.counts_on(worker) and not counted:
            self._touch_models(worker)
            if worker.host_bytes:
                self._handovers.room_changed()

    def arrived(self, worker: Worker) -> None:
        """The worker has announced all holdings, as before its first heartbeat, or is gone."""
        if worker.incarnation not in self._cluster.arriving:
            return
        del self._cluster.arriving[worker.incarnation]
        if not self._cluster.arriving:
            self._cluster.timers.hasten("recovery", "", self._cluster.now)

    def disconnected(self, session: Session) -> None:
        """Its connection has ended, or is about to, and nothing more that comes over it counts. The
        worker has a lease from now on to come back: how long the end lay unread is not its fault.
        """
        cluster = self._cluster
        cluster.sessions.pop(session.number, None)
        cluster.timers.cancel("idle", str(session.number))
        for name in list(session.watched):
            cluster.unwatch(session, name)
        cluster.read_only.sessions.pop(session, None)
        worker = session.worker
        if worker is None or worker.session != session.number:
            return
        cluster.note(worker)
        worker.session, worker.heard_at = None, cluster.now
        self._suspect(worker, "disconnected")
        self._set_deadline(worker)
        for member in worker.members.values():
            self._wake_askers(member)
        self._withdrawals.readers_away(worker)
        if worker.read_only:
            cluster.read_only.away[worker] = None
            if len(cluster.read_only.away) > cluster.read_only.sessions_max:
                self.lose(next(iter(cluster.read_only.away)), "too many read-only workers are away")

    def lease_due(self, incarnation: str) -> None:
        """Half a lease of silence makes a worker suspect, a whole one lost, unless what it has said
        lies unread.
        """
        worker = self._cluster.workers.get(incarnation)
        if worker is None:
            return
        if self._cluster.now >= self._suspect_at(worker):
            self._suspect(worker, "silent")
        self._set_deadline(worker)
        if self._is_overdue(worker):
            self._look_for(worker, "worker")

    def restate_due(self, incarnation: str) -> None:
        """What a worker has not announced again after a lost connection, it has closed meanwhile,
        unless it lies unread.
        """
        worker = self._cluster.workers.get(incarnation)
        if (
            worker is not None
            and worker.session is not None
            and next(_unannounced(worker), None) is not None
        ):
            self._look_for(worker, "restate")

    def _look_for(self, worker: Worker, timer: str) -> None:
        """A timer alone decides nothing: the coordinator may be behind with reading, or with
        letting in workers that come back. Other connections may delay that, but for a bounded time
        only.
        """
        cluster, lease_s = self._cluster, self._cluster.options.lease_s
        cluster.timers.set(timer, worker.incarnation, cluster.now + lease_s * LOOKS_APART)
        if worker.session is not None:
            cluster.look_for(worker.session)
        elif cluster.now >= self._listened_since(worker.heard_at) + AWAY_LEASES_MAX * lease_s:
            self._give_up(worker)
        else:
            self._missed[worker.incarnation] = None
            if self._asked_in != cluster.cause:
                self._asked_in = cluster.cause
                cluster.look_for(DOOR)

    def silent(self, sessions: Iterable[int]) -> None:
        """No message of these sessions lay unread when the shell was asked. A worker that was heard
        since is not silent. If much ends with the first of them, the shell is asked about the rest
        again.
        """
        for number in sessions:
            if self._cluster.has_done_much():
                return
            if number == DOOR:
                self._gone.update(self._missed)
                self._missed.clear()
                self.give_up_gone()
                continue
            session = self._cluster.sessions.get(number)
            worker = session.worker if session is not None else None
            if session is None or worker is None or worker.session != number:
                continue
            if self._is_overdue(worker):
                self._give_up(worker)
            elif (
                self._cluster.now
                >= self._listened_since(session.welcomed_at) + self._cluster.options.lease_s
            ):
                for member in list(_unannounced(worker)):
                    self.remove(
                        member,
                        f"rank {member.rank} of group "
                        f"{member.group.name!r} was not announced again",
                    )

    def give_up_gone(self) -> None:
        """No connection was at the door when the shell was asked: the workers that were missed then
        are lost. Each step handles some of them.
        """
        while self._gone and not self._cluster.has_done_much():
            incarnation = next(iter(self._gone))
            del self._gone[incarnation]
            worker = self._cluster.workers.get(incarnation)
            if worker is not None and worker.session is None and self._is_overdue(worker):
                self._give_up(worker)
        if self._gone:
            self._cluster.timers.set("gone", "", self._cluster.now)

    def _give_up(self, worker: Worker) -> None:
        where = "" if worker.session is not None else " since its connection ended"
        why = (
            f"worker {worker.name!r} was not heard of for "
            f"{self._cluster.now - worker.heard_at:.1f} s{where}"
        )
        self._cluster.tell_lost(worker, why)
        self._tell("lost", worker, why)
        self.lose(worker, why)

    # The very sums that timers are set to: a difference, rounded, could fall short of them again
    # and again.

    def _is_overdue(self, worker: Worker) -> bool:
        return (
            self._cluster.now
            >= self._listened_since(worker.heard_at) + self._cluster.options.lease_s
        )

    def _suspect_at(self, worker: Worker) -> float:
        """When it counts no more, if it is not heard before."""
        lease_s = self._cluster.options.lease_s
        return min(self._listened_since(worker.heard_at) + lease_s / 2, worker.answers + lease_s)

    def _listened_since(self, when: float) -> float:
        """Silence before the gap of the coordinator itself is no silence of the worker."""
        return max(when, self._cluster.listens_since)

    def _set_deadline(self, worker: Worker) -> None:
        is_live = worker.state is WorkerState.LIVE
        lost_at = self._listened_since(worker.heard_at) + self._cluster.options.lease_s
        self._cluster.timers.set(
            "worker", worker.incarnation, self._suspect_at(worker) if is_live else lost_at
        )

    def _suspect(self, worker: Worker, why: str) -> None:
        """The worker counts no more, if it did."""
        if worker.state is WorkerState.LIVE:
            self._cluster.become(worker, WorkerState.SUSPECT, why)
            if why != LEAVES:
                self._tell("suspect", worker, why)
            self._touch_models(worker)

    def leave(self, worker: Worker, reason: str) -> None:
        """The worker closes: its lease ends now."""
        self._suspect(worker, LEAVES)
        self._tell("left", worker, reason)
        self.lose(worker, f"worker {worker.name!r} has left: {reason}")

    def _tell(self, kind: str, worker: Worker, text: str) -> None:
        """Have people told, but not of workers that only look, nor of read-only ones: these come
        and go as they like.
        """
        if worker.is_shown and not worker.read_only:
            self._cluster.happened(kind, "", None, worker.name, text)

    def lose(self, worker: Worker, why: str) -> None:
        """Nothing that this incarnation says or held counts any more."""
        cluster = self._cluster
        self._cluster.become(worker, WorkerState.LOST, why)
        for member in list(worker.members.values()):
            self.remove(member, why)
        del cluster.workers[worker.incarnation]
        cluster.slowness.forget(worker.incarnation)
        self.arrived(worker)
        cluster.read_only.away.pop(worker, None)
        del cluster.manifest_bytes[worker.incarnation]
        if cluster.hosts.pop(worker.incarnation, None) is not None:
            self._handovers.host_gone(worker)
        # one held nothing; and however many come and go, they push no other out of this list
        if not worker.read_only:
            cluster.lost[worker.incarnation] = None
        if len(cluster.lost) > LOST_KEPT_MAX:
            del cluster.lost[next(iter(cluster.lost))]
        self._retentions.worker_gone(worker.incarnation)
        for timer in ("worker", "restate"):
            cluster.timers.cancel(timer, worker.incarnation)
        if worker.session is not None:
            cluster.dismiss(worker.session, why, why)
            cluster.sessions[worker.session].worker = None
            worker.session = None

    def _touch_models(self, worker: Worker) -> None:
        for member in worker.members.values():
            self._cluster.touch(member.group.model, wakes=member.said.serves)

    # -- ranks

    def register(self, worker: Worker, message: Register) -> None:
        """One rank's memory joins its group, or takes a lost rank's place under a new membership
        epoch.
        """
        cluster = self._cluster
        if worker.session is not None and cluster.sessions[worker.session].remembers:
            cluster.outlived(beyond_decisions(cluster, message))
        whole = self._manifest_questions.with_manifests(message)
        if whole is None:
            assert worker.session is not None
            self._manifest_questions.ask(worker.session, message)
            return
        message, parts, held_parts = whole
        known = cluster.members.get(message.registration)
        if known is not None and known.worker is worker:
            self._register_again(known, message, held_parts)
            return
        error = misfit(cluster, message) or too_much(cluster, worker, message, parts, held_parts)
        if known is not None:  # G9: what another worker says of it changes nothing
            error = RegistrationError(
                f"the registration {known.registration!r} is worker {known.worker.name!r}'s"
            )
        if error is None and worker.read_only:
            error = self._make_room(worker)
        if error is not None:
            cluster.answer(worker.session, message.request, error)
            return
        group = cluster.model(message.model).groups.get(message.group) or self._new_group(message)
        before = group.members.get(message.rank)
        if before is not None:
            self.remove(
                before, f"rank {before.rank} was replaced by worker {worker.name!r}", new_epoch=True
            )
        self.tell_epochs()  # a rank that comes hears the epoch from `Registered`
        kept = cluster.manifests.keep_all((message.manifest, *parts))
        said = replace(message, manifest=kept[0], parts=kept[1:], part_ids=(), held=None)
        rank = message.registration, worker, group, message.rank, message.shard
        member = Member(*rank, said, worker.session)
        cluster.manifest_bytes[worker.incarnation] += sum(
            map(len, (member.said.manifest, *member.said.parts))
        )
        cluster.note(member, group.model, worker)
        group.members[member.rank] = cluster.members[member.registration] = member
        cluster.read_only.registrations += worker.read_only
        worker.members[member.registration] = member
        if not worker.is_shown:
            worker.is_shown = True
            self._tell("joined", worker, f"from {worker.location.host}")
        group.model.groups[group.name] = group
        if member.said.serves:
            group.model.serving[group.name] = group
        if member.said.purpose is Purpose.RETENTION:
            group.model.copies[member.registration] = member
        if member.said.spot and member.said.serves and not worker.spot:
            worker.spot = True
            cluster.reckon_all_of(worker)
        self._ranks_changed(group)
        cluster.touch(group.model, wakes=member.said.serves)
        keep = message.held is None or self._announcements.heard(
            member, message.held, held_parts, message.request
        )
        self._tell_registered(member, message, keep)

    def _new_group(self, message: Register) -> Group:
        """A group begins with its first registration."""
        model = self._cluster.model(message.model)
        layout_id = (
            None
            if message.world_size > 1 and message.layout_id.startswith(OWN_LAYOUT)
            else message.layout_id
        )
        return Group(
            model, message.group, message.world_size, layout_id, self._cluster.mint_epoch()
        )

    def _register_again(
        self, member: Member, message: Register, held_parts: tuple[bytes, ...]
    ) -> None:
        """A rank that was there before says again what it holds. A fill that is under way goes
        on.
        """
        group, held = member.group, message.held
        member.said_in = member.worker.session
        member.wait(0)
        member.drop(False)
        self._cluster.note(member)
        part = member.part
        filling = part.holding if part is not None else None
        counts = self._withdrawals.restated(
            member, held.generation if held is not None else None, filling
        )
        # it has perhaps not heard what it was asked before
        self._cluster.touch(group.model, wakes=member.said.serves)
        for version in group.model.versions.values() if member.said.serves else ():
            self._cluster.wake_all(version.starving)
        publishes = part is not None and isinstance(part.call, Publish)  # it holds nothing yet
        keep = held is None or counts
        if held is not None and not counts and not publishes:
            keep = self._announcements.heard(member, held, held_parts, message.request)
        self._tell_registered(member, message, keep)

    def _tell_registered(self, member: Member, message: Register, keep: bool) -> None:
        self._manifest_questions.came(message.manifest_id, *message.part_ids)
        if message.held is not None:
            self._manifest_questions.came(message.held.manifest_id, *message.held.part_ids)
        held = message.held
        retained = (
            self._retentions.tell_with(member, held.content_id)
            if held is not None and keep
            else None
        )
        # else it could be let go although that must stay
        if not (member.unheard and self._cluster.is_recovering):
            self._confirm(member, message.request, keep, retained)

    def _confirm(
        self, member: Member, request: int, keep: bool = True, retained: int | None = None
    ) -> None:
        group = member.group
        answer = Registered(
            request,
            member.registration,
            group.epoch,
            group.sequence,
            keep,
            retained,
            group.model.history.lineage,
        )
        self._cluster.tell(member, answer)

    @property
    def recovered_at(self) -> float:
        """A worker that has not come back by then is lost."""
        return self._cluster.listens_since + self._cluster.options.lease_s

    @property
    def recovery_ends_at(self) -> float:
        """A worker that comes back at the last moment has another lease to announce its holdings:
        else they would be lost with it.
        """
        return self.recovered_at + (
            self._cluster.options.lease_s if self._cluster.arriving else 0.0
        )

    def recovery_over(self) -> None:
        """Ranks that are not back are waited for no longer. The holding of a rank of their group
        counts once they are back. A call by selector that waits for a lost source may be bound to
        another version now.
        """
        for member in self._cluster.members.values():
            if member.unheard:
                self._confirm(member, member.unheard)
        self._cluster.arriving.clear()
        for operation in self._cluster.undecided.values():
            self._cluster.wake(operation)

    def begun_with(self, worker: Worker, message: BegunWith) -> None:
        """Keep the manifest of what this memory is filled with. If there is no room, the Fill that
        names it will fail.
        """
        member, manifest = worker.members.get(message.registration), message.manifest
        if member is None:
            return
        others = self._cluster.manifest_bytes[worker.incarnation] - len(member.begun)
        if others + len(
            manifest
        ) <= limits.MANIFEST_BYTES_OF_WORKER_MAX and self._cluster.manifests.has_room_for(manifest):
            self._cluster.keep_begun(member, manifest)

    def _make_room(self, worker: Worker) -> TensorHubError | None:
        """A read-only worker registers. At the cap the worker that was idle longest, of those with
        registrations, leaves.
        """
        registrations = self._cluster.read_only.registrations
        if registrations < limits.READ_ONLY_REGISTRATIONS_MAX:
            return None
        idle = (
            each
            for each in self._cluster.read_only.idle_workers()
            if each.members and each is not worker
        )
        victim = next(idle, None)
        if victim is None:
            text = (
                f"it has {registrations} fetches under way (READ_ONLY_REGISTRATIONS_MAX): let "
                f"some of them end first"
            )
            return RegistrationError(
                f"worker {worker.name!r} cannot register: {text}", retryable=True
            )
        self.leave(
            victim, "it makes room for another read-only worker (READ_ONLY_REGISTRATIONS_MAX)"
        )
        return None

    def deregister(self, worker: Worker, message: Deregister) -> None:
        """A rank closes its handle, or says so again."""
        member = worker.members.get(message.registration)
        if member is not None:
            self.remove(member, f"rank {member.rank} of group {member.group.name!r} was closed")
        self._cluster.send(worker.session, Done(message.request))

    def remove(self, member: Member, why: str, *, new_epoch: bool = False) -> None:
        """The rank is gone: its operation, its memory's readers, and its place in the group."""
        cluster, group = self._cluster, member.group
        self._operations.member_gone(member, why)
        self._withdrawals.member_gone(member)
        for holding in member.holdings:
            self._holdings.lose(holding)
        cluster.note(member, group, member.worker)
        if cluster.members.pop(member.registration, None) is not None:
            cluster.keep_begun(member, b"")
            cluster.keep_arranged(member, ())
            cluster.manifests.release(member.said.manifest, *member.said.parts)
            cluster.manifest_bytes[member.worker.incarnation] -= sum(
                map(len, (member.said.manifest, *member.said.parts))
            )
            cluster.read_only.registrations -= member.worker.read_only
        self._wake_askers(member)
        if group.model.copies.pop(member.registration, None) is not None:
            self._handovers.copy_gone(member)
        member.worker.members.pop(member.registration, None)
        if group.members.get(member.rank) is member:
            del group.members[member.rank]
            self._ranks_changed(group)
        cluster.touch(group.model, wakes=member.said.serves)
        if not group.members and not new_epoch:
            self._dissolve(group)
        else:
            self._change_epoch(group)

    def _wake_askers(self, member: Member) -> None:
        """Other workers may be asked instead of it."""
        for version in member.group.model.versions.values():
            if version.starving and is_asked(version, member.registration):
                self._cluster.wake_all(version.starving)

    def _ranks_changed(self, group: Group) -> None:
        self._retentions.group_changed(group)
        if len(group.members) == group.world_size:
            group.layout_id = layout_id_together(
                [group.members[rank].said.layout_id for rank in range(group.world_size)]
            )
            for member in group.members.values():
                if member.unheard:
                    self._cluster.tell(member, RegisterAgain(member.unheard, whole=False))
                    member.wait(0)
        if group.name in group.model.serving and not group.spot:
            group.model.steady[group.name] = group
        else:
            group.model.steady.pop(group.name, None)

    def _change_epoch(self, group: Group) -> None:
        """The ranks of the group hear the new epoch once, however many ranks a step removes."""
        self._cluster.note(group)
        group.renumber(self._cluster.mint_epoch())
        self._cluster.renumbered[group] = None

    def tell_epochs(self) -> None:
        for group in self._cluster.renumbered:
            changed = EpochChanged(group.model.name, group.name, group.epoch, group.sequence)
            for member in group.members.values():
                self._cluster.tell(member, changed)
        self._cluster.renumbered.clear()

    def _dissolve(self, group: Group) -> None:
        """Its last rank has gone: the next registration under its name begins a new group."""
        for replica in list(group.replicas):
            self._holdings.settle_replica(replica)
        group.model.groups.pop(group.name, None)
        group.model.serving.pop(group.name, None)
        group.model.steady.pop(group.name, None)


def _unannounced(worker: Worker) -> Iterator[Member]:
    """Its ranks that it has not named over its present connection."""
    return (member for member in worker.members.values() if member.said_in != worker.session)
