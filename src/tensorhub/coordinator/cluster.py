"""All that a coordinator knows, in one place, and what its components act through.

Responsible for what has changed in a step, and for what is to be done after it. Not responsible for any rule: those are the
components'; nor for what there is: see `entities`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import Action, CloseSession, Decision, Entry, Persist, Pinned, Send
from tensorhub.coordinator.entities import (
    Entity,
    Member,
    Model,
    Noted,
    Operation,
    PendingWrite,
    ReadLease,
    Session,
    Testimony,
    Version,
    Worker,
)
from tensorhub.coordinator.guests import Guests
from tensorhub.coordinator.manifests import Manifests
from tensorhub.errors import TensorHubError
from tensorhub.machine import Timers
from tensorhub.manifest import id_of
from tensorhub.messages import NO_REQUEST, Done, ErrorInfo, FromCoordinator, Refused
from tensorhub.scheduler.links import Links
from tensorhub.types import OpKey, Options

LOST_KEPT_MAX = 4096


class Cluster:
    """All entities, and the one place through which components act. A plain value store: no rules here."""

    def __init__(self, ident: str, epoch: int, options: Options, ids: Callable[[], str]) -> None:
        self.id = ident  # names the durable state
        self.epoch = epoch  # of this coordinator
        self.options = options
        self.new_id = ids
        self.now = 0.0
        self.cause = 0  # ordinal number of the event being handled
        self.timers = Timers()
        self.sessions: dict[int, Session] = {}
        self.workers: dict[str, Worker] = {}  # LIVE and SUSPECT ones, by incarnation
        self.hosts: dict[str, Worker] = {}  # those of them that have host memory for copies
        self.lost: dict[str, None] = {}  # incarnations that must not come back; the newest LOST_KEPT_MAX
        self.members: dict[str, Member] = {}  # by registration id
        self.models: dict[str, Model] = {}
        self.model_names: list[str] = []  # theirs, sorted
        self.guest_models: set[str] = set()  # those that only guests wait for, as of the end of the last step
        self.watchers: dict[str, set[int]] = {}  # sessions by the name that they watch, whether there is a model or not
        self.watched = 0  # all of them, each name once for each
        self.guests = Guests(options)
        self.leases: dict[str, ReadLease] = {}  # ACTIVE and FENCING ones
        self.undecided: dict[str, Operation] = {}  # every group's operation, by its key as timers say it
        self.records: dict[int, Operation] = {}  # whose entries are on their way to the store
        self.pending_writes: dict[int, PendingWrite] = {}  # whose entries are on their way to the store
        self.decisions: dict[tuple[str, str], Decision] = {}  # each group's newest commit, by model and group
        self.links = Links()  # what readers tell of them; nothing depends on it but which source is chosen
        self.manifests = Manifests()  # those of all members and versions
        self.testimonies: dict[Testimony, None] = {}  # those that have a list, oldest first
        self.manifest_bytes: Counter[str] = Counter()  # of each incarnation's members, each counted
        self.pins: Counter[str] = Counter()  # how many each incarnation has, in all models
        self.changed_models: dict[str, bool] = {}  # whose consequences are to be worked out; True: of who waits, too
        self.changed_operations: dict[OpKey, Operation] = {}
        self.weighed = 0  # sources, in this step
        self.stirred: dict[OpKey, Operation] = {}  # the same, of guests who wait: some of them in each step, oldest first
        self.noted: dict[Noted, None] = {}  # what the last step has changed, or may have: `invariants` looks at it
        self.epochs_minted = epoch << 32  # group epochs of a later coordinator are always larger
        self.records_minted = 0
        self._actions: list[Action] = []

    # -- acting

    def send(self, session: int | None, message: FromCoordinator) -> None:
        """Say it over this connection; without one it is not said (the peer asks again when it is back)."""
        if session is not None:
            self._actions.append(Send(self.cause, session, message))

    def tell(self, member: Member, message: FromCoordinator) -> None:
        self.noted[member] = None
        self.send(member.worker.session, message)

    def answer(self, session: int | None, request: int, error: TensorHubError | None = None) -> None:
        """It is done, or refused with `error`."""
        self.send(session, Done(request) if error is None else Refused(request, ErrorInfo.of(error)))

    def act(self, action: Persist | CloseSession) -> None:
        self._actions.append(action)

    def refuse_session(self, session: int, error: TensorHubError) -> None:
        """Say why, and close it."""
        self.send(session, Refused(NO_REQUEST, ErrorInfo.of(error)))
        self.act(CloseSession(self.cause, session, str(error)))

    def persist(self, entry: Entry) -> int:
        """Have it made durable; returns the number under which `Persisted` or `PersistFailed` will speak of it."""
        self.records_minted += 1
        self.act(Persist(self.cause, self.records_minted, entry))
        return self.records_minted

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def committed_content(self, model: str, group: str) -> str | None:
        """The content id that a group of several ranks has committed to last, or is about to; None if nothing is known."""
        for operation in self.records.values():
            if (operation.key.model, operation.key.group) == (model, group) and operation.version is not None:
                return operation.version.info.content_id
        decision = self.decisions.get((model, group))
        return decision.content_id if decision is not None else None

    def mint_epoch(self) -> int:
        self.epochs_minted += 1
        return self.epochs_minted

    def is_former(self, epoch: int) -> bool:
        """Whether a former coordinator has minted this group epoch."""
        return epoch >> 32 != self.epoch

    # -- changing

    def note(self, *changed: Noted) -> None:
        """These were changed in this step, by whatever else than what notes them by itself: become, tell, touch, changed."""
        for about in changed:
            self.noted[about] = None

    def become(self, entity: Entity, state: Any, why: str) -> None:
        """Move an entity along its table, in this step."""
        entity.become(state, self.cause, self.now, why)
        self.noted[entity] = None

    def touch(self, model: Model, *, stirs: bool = True) -> None:
        """Have the model's consequences worked out at the end of this step. `stirs` False: only somebody read-only came or
        went, for which nobody waits; but very many may wait, and are not all asked for that.
        """
        self.changed_models[model.name] = stirs or self.changed_models.get(model.name, False)
        self.noted[model] = None

    def changed(self, operation: Operation) -> None:
        """Have the operation's consequences worked out at the end of this step, if it is not decided."""
        if not operation.decided:
            self.changed_operations[operation.key] = operation

    def bind(self, operation: Operation, version: Version) -> None:
        """From now on, until it is decided, it is about that version."""
        operation.version = version
        version.bound_with(operation)[operation.key] = operation
        self.note(operation, version)

    def stir(self, operation: Operation) -> None:
        """Have its consequences worked out: in this step, or, if it is a guest's, when it is its turn; there may be many."""
        if not operation.decided:
            (self.stirred if operation.is_of_guests else self.changed_operations)[operation.key] = operation

    def learn(self, version: Version, shard: int, manifest: bytes) -> None:
        """That shard's manifest; one that is known stays."""
        if version.is_kept and not version.manifests.get(shard):
            version.manifests[shard] = self.manifests.keep(manifest)
            self.note(version)

    def unlearn(self, version: Version) -> None:
        """The version is no more, or nobody holds any of it."""
        if version.manifests:
            self.note(version)
        for manifest in version.manifests.values():
            self.manifests.release(manifest)
        version.manifests.clear()
        for testimony in version.testimonies.values():
            testimony.publisher = None
            testimony.answered.clear()
            self.forget_list(testimony)

    def forget_list(self, testimony: Testimony) -> None:
        """Its root stays."""
        self.testimonies.pop(testimony, None)
        testimony.begin(-1)
        testimony.turned_away = False

    def keep_begun(self, member: Member, manifest: bytes) -> None:
        """The manifest of what that rank goes on with, counted as its worker's; empty: it is needed no more."""
        self.manifests.release(member.begun)
        self.manifest_bytes[member.worker.incarnation] += len(manifest) - len(member.begun)
        member.begun = self.manifests.keep(manifest)
        member.begun_id = id_of(manifest)
        self.note(member)

    def add_pin(self, model: Model, pin: Pinned) -> None:
        self.remove_pin(model, pin.pin)
        model.pins[pin.pin] = pin
        self.pins[pin.incarnation] += 1

    def remove_pin(self, model: Model, ident: str) -> None:
        """If there is one of that id."""
        pin = model.pins.pop(ident, None)
        if pin is not None:
            self.pins[pin.incarnation] -= 1
            if not self.pins[pin.incarnation]:
                del self.pins[pin.incarnation]

    # -- looking up

    def model(self, name: str) -> Model:
        """The model of this name; it begins to exist when somebody first names it for writing or waiting."""
        model = self.models.get(name)
        if model is None:
            model = self.models[name] = Model(name)
            insort(self.model_names, name)
            self.note(model)
        return model

    def models_after(self, name: str | None) -> Iterator[Model]:
        """All models, or those whose names come after that one, by name."""
        start = 0 if name is None else bisect_right(self.model_names, name)
        return (self.models[self.model_names[place]] for place in range(start, len(self.model_names)))

    def forget_if_unused(self, model: Model) -> None:
        """A name that was only watched, waited for or fetched in vain is not known for good."""
        ordered = any(write.model is model for write in self.pending_writes.values())
        if not model.is_used and not ordered:
            del self.models[model.name]
            del self.model_names[bisect_left(self.model_names, model.name)]
            self.guest_models.discard(model.name)
        elif model.is_of_workers or ordered:
            self.guest_models.discard(model.name)
        else:
            self.guest_models.add(model.name)

    def has_room_for(self, name: str) -> bool:
        """Whether somebody who may write may name this model."""
        known = name in self.models and name not in self.guest_models
        return known or len(self.models) - len(self.guest_models) < limits.MODELS_MAX

    # -- watching

    def watch(self, session: Session, name: str) -> None:
        """Have it hear of this model's versions; a second time is fine."""
        if name not in session.watched:
            session.watched.add(name)
            self.watchers.setdefault(name, set()).add(session.number)
            self._count_watch(session, 1)

    def unwatch(self, session: Session, name: str) -> None:
        """If it watches it."""
        if name in session.watched:
            session.watched.remove(name)
            self.watchers[name].remove(session.number)
            if not self.watchers[name]:
                del self.watchers[name]
            self._count_watch(session, -1)

    def _count_watch(self, session: Session, more: int) -> None:
        self.watched += more
        if session.is_guest:
            self.guests.watches.add(session.origin, session, more)

    @property
    def is_recovering(self) -> bool:
        """Whether the first lease after a restart still runs: holders of a former coordinator may come back."""
        return ("recovery", "") in self.timers

    def operations(self) -> Iterator[Operation]:
        for model in self.models.values():
            for group in model.groups.values():
                if group.operation is not None:
                    yield group.operation
