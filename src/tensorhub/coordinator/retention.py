"""What must stay fetchable (R4, R5, G5): the newest `retain` versions of each model, and pinned
ones.

Responsible for the policy, for pins, for telling holders which versions are retained, and for the
single question whether a holder may leave. Not responsible for the consequences of the answer:
`holdings` and `fills` let holders wait, `handovers` finds successors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import Durable, Pinned, Retention, Unpinned
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import (
    Group,
    Holding,
    Member,
    Model,
    PendingWrite,
    Version,
    Worker,
)
from tensorhub.coordinator.refusals import held_text
from tensorhub.errors import (
    CoordinatorUnavailable,
    RetentionError,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.messages import Pin, Restore, Retain, RetainedAck, Rollback, SetRetained, Unpin


@dataclass(eq=False, repr=False)
class Retentions:
    """The only component that changes models' retention and pins."""

    _cluster: Cluster
    # pins of a former coordinator that no worker has said again; none after the recovery
    _unsaid: set[str] = field(default_factory=set, init=False)

    # -- the question

    def must_stay(self, holding: Holding, going: Worker | None = None) -> bool:
        """Whether a retained version would lose its last reliable copy of some shard with it; see
        `alone`.
        """
        return next(self.alone(holding, going), None) is not None

    def alone(self, holding: Holding, going: Worker | None) -> Iterator[Holding]:
        """The holdings of its replica without a second reliable copy of the shard, if its version
        is retained. `going`: its worker, if the worker may end with this leave (R5): then no
        holding of that worker counts.

        Only the published layout keeps a version, because readers of every layout can read it. A
        replica stops serving when its first rank leaves. A version that has lost another shard
        cannot be fetched any more: nothing is kept for it.
        """
        version, replica, group = holding.version, holding.replica, holding.member.group
        if (
            group.spot
            or holding.bridges
            or not holding.is_source
            or version.number not in group.model.retained()
            or self.is_lost(version)
        ):
            return

        def stays(other: Holding) -> bool:
            return (
                other.replica is not replica
                and other.member.worker is not going
                and self.is_reliable(other)
            )

        ours = [h for h in replica.holdings.values() if h.is_source]
        yield from (h for h in ours if not any(map(stays, h.layout.of(h.shard).steady)))

    def is_reliable(self, holding: Holding) -> bool:
        """Whether it counts for retention: it may, and its owner has acknowledged that
        (`RetainedAck`), as have those of the other ranks, since its replica stops serving when the
        first of them leaves.

        Without the acknowledgement the owner may still give the version up: after a restart,
        content that was only voted for is announced as held, too.
        """
        group = holding.member.group
        if not (holding.member.keeps and self.may_count(holding)):
            return False
        # else all ranks have acknowledged
        is_news = bool(group.model.notices.unaware or group.model.notices.queue)
        mates = group.members.values() if is_news else ()
        return all(mate.holding is None or mate.keeps for mate in mates)

    def may_count(self, holding: Holding) -> bool:
        """Whether the holding is a source that stays, in a worker that the coordinator counts
        on.
        """
        return holding.is_steady and self._cluster.counts_on(holding.member.worker)

    def is_lost(self, version: Version) -> bool:
        """Whether some published shard, and each that is equal, has no holder, and none is expected
        back.
        """
        return not (self._cluster.is_recovering or version.holdings.is_left())

    def refusal(self, holding: Holding, what: str = "") -> RetentionError:
        """Why this holder may not go, for the error of `what`."""
        group, number, worker = holding.member.group, holding.version.number, holding.member.worker
        pins = sum(pin.number == number for pin in group.model.pins.values())
        why = (
            f"pinned by {pins} block(s)"
            if pins
            else f"one of the newest {group.model.retain}, which are retained"
        )
        return RetentionError(
            f"{what}version {number} of {group.model.name!r} must stay: it is {why}, and worker "
            f"{worker.name!r} (group "
            f"{group.name!r}, rank {holding.rank}) is among its last reliable holders: let others "
            f"that are not spot "
            "replicate it, give workers host_memory_bytes for a copy of it, lower retain() or end "
            "the pin, or give it up "
            "with close(abandon=True)"
        )

    # -- what holders know

    def tell_with(self, member: Member, content_id: str) -> int | None:
        """What an Outcome or Registered tells a rank that holds this content: the notice's number
        if it is retained.
        """
        holding = member.holding
        if (
            holding is None
            or not holding.committed
            or holding.version.info.content_id != content_id
            or member.group.spot
        ):
            return None
        keep = not holding.bridges and holding.version.number in member.group.model.retained()
        if keep is not holding.told:
            # repeated, a notice has the same number: a rank may answer only the first Outcome
            member.retained_seq += 1
        self._to_be_told(holding, keep=keep)
        return member.retained_seq if holding.told else None

    def settle(self, model: Model) -> None:
        """Tell holders which versions are retained from now on. Answer the calls that waited for
        acknowledgements.
        """
        retained = model.retained()
        versions = model.versions.items()
        for version in [v for number, v in versions if v.retained is not (number in retained)]:
            version.retained = not version.retained
            self._cluster.note(version)
            for holdings in version.holdings.values():
                model.notices.queue.extend(holdings)
        self._tell_some(model)
        if model.notices.unanswered and not model.notices.queue and not model.notices.unaware:
            for write in model.notices.unanswered:
                self._end(write)
            model.notices.unanswered.clear()

    def group_changed(self, group: Group) -> None:
        """A group is spot if any rank is. Spot holders may leave at any time: they are not told to
        stay.
        """
        before, group.spot = group.spot, any(member.said.spot for member in group.members.values())
        for member in group.members.values() if group.spot is not before else ():
            if member.holding is not None:
                self._cluster.reckon(member.holding)
                self._tell(member.holding)

    def _tell(self, holding: Holding) -> None:
        member, version = holding.member, holding.version
        keep = version.retained and not (member.group.spot or holding.bridges)
        if holding.committed and holding.told is not keep:
            self._to_be_told(holding, keep=keep)
            member.retained_seq += 1
            self._cluster.tell(
                member,
                SetRetained(
                    member.registration, version.info.content_id, keep, member.retained_seq
                ),
            )

    def _to_be_told(self, holding: Holding, *, keep: bool) -> None:
        holding.told, member = keep, holding.member
        if keep:
            member.group.model.notices.unaware[member.registration] = member
        else:
            member.group.model.notices.unaware.pop(member.registration, None)
        self._cluster.note(member, member.group.model)

    def _tell_some(self, model: Model) -> None:
        """Tell holders which versions are retained now: in each step a bounded number of
        holders.
        """
        for _ in range(min(len(model.notices.queue), limits.NOTICES_PER_STEP)):
            holding = model.notices.queue.popleft()
            if not holding.leaving:
                self._tell(holding)
        if model.notices.queue:
            self._cluster.timers.set("notices", model.name, self._cluster.now)

    def go_on_telling(self, name: str) -> None:
        model = self._cluster.models.get(name)
        if model is not None:
            self._cluster.touch(model, wakes=False)

    def kept(self, worker: Worker, message: RetainedAck) -> None:
        """An owner has acknowledged a notice. An older number says nothing: the owner may hear the
        opposite just now.
        """
        member = worker.members.get(message.registration)
        holding = member.holding if member is not None else None
        if (
            member is None
            or holding is None
            or holding.version.info.content_id != message.content_id
            or not holding.committed
        ):
            return
        if message.seq == member.retained_seq and message.keep is holding.told:
            member.group.model.notices.unaware.pop(member.registration, None)
            self._cluster.note(member)
            self._cluster.touch(member.group.model)

    # -- the policy

    def retain(self, session: int | None, message: Retain) -> None:
        error = self._too_much(session, message)
        if error is not None:
            self._cluster.answer(session, message.request, error)
            return
        model = self._cluster.model(message.model)
        self._cluster.note(model)
        self._record(
            PendingWrite(model, message, session, self._cluster.now),
            Retention(model.name, message.latest),
        )

    def _too_much(
        self, session: int | None, message: Retain | Pin | Unpin
    ) -> TensorHubError | None:
        cluster, asker = self._cluster, self._cluster.sessions.get(session or 0)
        if asker is not None and asker.pending_writes >= limits.PENDING_WRITES_OF_SESSION_MAX:
            text = (
                f"{asker.pending_writes} retain and pin calls of this worker are not answered yet"
            )
            return CoordinatorUnavailable(
                f"{text} (PENDING_WRITES_OF_SESSION_MAX): wait for some of them"
            )
        if not isinstance(message, Retain):
            return None
        if message.latest > limits.RETAINED_MAX:
            return StateError(
                f"retain: the newest {limits.RETAINED_MAX} versions of a model at most "
                f"(RETAINED_MAX)"
            )
        if not cluster.has_room_for(message.model):
            return StateError(
                f"there are {limits.MODELS_MAX} models here already (MODELS_MAX): use the names "
                f"that there are"
            )
        return None

    def pin(self, worker: Worker, message: Pin) -> None:
        """Keep one version from now on. Its worker says this again after each lost connection."""
        model = self._cluster.models.get(message.model)
        known = model.pins.get(message.pin) if model is not None else None
        if known is not None and known.incarnation == worker.incarnation:
            self._unsaid.discard(known.pin)
            undone = [
                *self._cluster.pending_writes.values(),
                *(model.notices.unanswered if model is not None else ()),
            ]
            writes = [
                o for o in undone if isinstance(o.message, Pin) and o.message.pin == known.pin
            ]
            for write in writes:  # a retry, over another connection
                self._count(write, -1)
                write.repeat(message, worker.session)
                self._count(write, 1)
            if not writes:
                self._cluster.answer(worker.session, message.request)
            return
        error = self._too_much(worker.session, message)
        if error is not None:
            pass
        elif known is None:
            error = self._pin_error(worker, model, message)
        elif known.number != message.version or known.incarnation in self._cluster.workers:  # G9
            error = StateError(f"the pin {known.pin!r} of {message.model!r} is another worker's")
        if model is None or error is not None:
            self._cluster.answer(worker.session, message.request, error)
            return
        content_id = model.versions[message.version].info.content_id
        pinned = Pinned(message.pin, worker.incarnation, model.name, message.version, content_id)
        self._cluster.touch(model)
        self._unsaid.discard(message.pin)
        # it counts at once, so that no holder leaves while the pin is being recorded
        self._cluster.add_pin(model, pinned)
        self._record(PendingWrite(model, message, worker.session, self._cluster.now), pinned)

    def _pin_error(
        self, worker: Worker, model: Model | None, message: Pin
    ) -> TensorHubError | None:
        version = model.versions.get(message.version) if model is not None else None
        if model is None or version is None or not version.visible:
            return VersionUnavailable(
                f"version {message.version} of {message.model!r} cannot be pinned: it is not "
                f"published, or not any more",
                retryable=model is None or model.mark is None or message.version > model.mark,
            )
        if not version.is_held:
            text = (
                f"version {message.version} of {model.name!r} cannot be pinned: no worker holds it "
                f"now; {held_text(model)}"
            )
            return VersionUnavailable(text)
        if self._cluster.pins[worker.incarnation] >= limits.PINS_OF_WORKER_MAX:
            text = (
                f"worker {worker.name!r} has {limits.PINS_OF_WORKER_MAX} pins already "
                f"(PINS_OF_WORKER_MAX)"
            )
            return StateError(f"{text}: end some first")
        return None

    def unpin(self, worker: Worker, message: Unpin) -> None:
        model = self._cluster.models.get(message.model)
        known = model.pins.get(message.pin) if model is not None else None
        error = self._too_much(worker.session, message)
        if (
            model is None
            or known is None
            or known.incarnation != worker.incarnation
            or error is not None
        ):
            self._cluster.answer(worker.session, message.request, error)
        else:
            self._record(
                PendingWrite(model, message, worker.session, self._cluster.now), Unpinned(known.pin)
            )

    def recover(self, durable: Durable) -> None:
        """Pins of a former coordinator count until their workers' leases would have ended."""
        for record in durable.models:
            self._cluster.model(record.model).retain = record.retain
        for pin in durable.pins:
            model = self._cluster.models.get(pin.model)
            version = model.versions.get(pin.number) if model is not None else None
            if (
                model is not None
                and version is not None
                and version.info.content_id == pin.content_id
            ):
                self._cluster.add_pin(model, pin)
                self._unsaid.add(pin.pin)
            else:
                self._cluster.persist(Unpinned(pin.pin))

    def worker_gone(self, incarnation: str) -> None:
        """Its pins end with it."""
        if incarnation in self._cluster.pins:
            self._drop_pins(lambda pin: pin.incarnation == incarnation)

    def recovery_over(self) -> None:
        """A worker that has not come back within a lease is lost. One that is back has said its
        pins again: of an older copy of the state there may be further ones, which it has ended.
        """
        self._drop_pins(lambda pin: pin.pin in self._unsaid)
        self._unsaid.clear()

    def _drop_pins(self, is_gone: Callable[[Pinned], bool]) -> None:
        for model in self._cluster.models.values():
            for pin in [pin for pin in model.pins.values() if is_gone(pin)]:
                self._cluster.remove_pin(model, pin.pin)
                self._cluster.persist(Unpinned(pin.pin))
                self._cluster.touch(model)

    # -- recording

    def _record(self, write: PendingWrite, entry: Retention | Pinned | Unpinned) -> None:
        self._cluster.record(write, entry)
        self._count(write, 1)

    def _end(self, write: PendingWrite, error: TensorHubError | None = None) -> None:
        self._count(write, -1)
        self._cluster.answer(write.session, write.message.request, error)

    def _count(self, write: PendingWrite, more: int) -> None:
        asker = self._cluster.sessions.get(write.session or 0)
        if asker is not None:
            asker.pending_writes += more

    def recorded(self, write: PendingWrite) -> None:
        model, message, error = write.model, write.message, None
        match message:
            case Retain():
                model.retain = message.latest
            case Unpin():
                self._cluster.remove_pin(model, message.pin)
            case Pin() if message.pin not in model.pins:
                error = VersionUnavailable(
                    f"version {message.version} of {model.name!r} was given up in the meantime"
                )
            case _:
                pass
        self._cluster.touch(model)
        if error is None:
            number = message.version if isinstance(message, Pin) else None
            self._cluster.happened("retained", model.name, number, "", _told(message))
        if error is None and not isinstance(message, Unpin):
            model.notices.unanswered = [
                o for o in model.notices.unanswered if o.session in self._cluster.sessions
            ] + [write]
        else:
            self._end(write, error)

    def not_recorded(self, write: PendingWrite, reason: str) -> None:
        model, message = write.model, write.message
        self._cluster.touch(model)  # it may be forgotten
        if isinstance(message, Pin):
            self._cluster.remove_pin(model, message.pin)
        what = type(message).__name__.lower()
        text = (
            f"the coordinator cannot make {what} of {model.name!r} durable: {reason}; see its "
            f"state_dir"
        )
        self._end(write, CoordinatorUnavailable(text))


def _told(message: Retain | Pin | Unpin | Rollback | Restore) -> str:
    """What has changed, for people."""
    if isinstance(message, Retain):
        return f"the newest {message.latest} versions are kept"
    return "it is pinned" if isinstance(message, Pin) else "a pin has ended"
