"""All that a coordinator knows, in one place: its connections and its entities. Components act
through it.

Responsible for noting the changes of a step, and for collecting its actions. The rules are in the
components, and `entities` describes each entity. `access` decides which session is admitted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import (
    Action,
    CloseSession,
    Decision,
    Described,
    Entry,
    LookFor,
    Outlived,
    Persist,
    Pinned,
    Send,
    WorkerLost,
)
from tensorhub.coordinator.entities import (
    Entity,
    Group,
    Holding,
    Member,
    Model,
    Noted,
    Operation,
    PendingWrite,
    RankPart,
    ReadLease,
    Replica,
    SelectionKey,
    Testimony,
    Version,
    Worker,
)
from tensorhub.coordinator.layout_holdings import LayoutHoldings, Manifests
from tensorhub.coordinator.observing import Observations
from tensorhub.coordinator.states import WorkerState
from tensorhub.coordinator.waiting import starves, waits_in
from tensorhub.errors import TensorHubError
from tensorhub.layouts.published import Published, decoded
from tensorhub.machine import Timers
from tensorhub.messages import (
    NO_REQUEST,
    Dismissed,
    Done,
    ErrorInfo,
    FromCoordinator,
    Refused,
    Restore,
)
from tensorhub.model.digests import head_of
from tensorhub.model.manifest import ID_BYTES, id_of
from tensorhub.scheduler.links import Links
from tensorhub.scheduler.slowness import Slowness
from tensorhub.types import OpKey, Options


@dataclass(slots=True, eq=False)
class Session:
    """One authenticated connection."""

    number: int
    incarnation: str
    role: str
    read_only: bool  # it may say what `access` admits
    worker: Worker | None = None  # set once it has joined
    watched: set[str] = field(default_factory=set)  # models that it has asked to hear of
    heard_at: float = 0.0  # when its newest message arrived
    called_at: float = 0.0  # when its newest message that is no heartbeat arrived
    # when its worker was welcomed: whatever it says after its Join answers that
    welcomed_at: float = 0.0
    pending_writes: int = 0  # those of its Retain, Pin and Unpin that are not answered
    # whether its worker was in this cluster before: else what it says may be of another cluster
    remembers: bool = False


class ReadOnlySessions:
    """What all read-only sessions have together."""

    def __init__(self, sessions_max: int) -> None:
        self.sessions_max = max(1, sessions_max // 2)
        self.sessions: dict[Session, None] = {}  # the session that was idle longest is first
        # workers without a session; the worker that left first is first
        self.away: dict[Worker, None] = {}
        self.watches = 0
        self.registrations = 0

    def __repr__(self) -> str:
        return f"<ReadOnlySessions: {len(self.sessions)} of {self.sessions_max}>"

    def called(self, session: Session) -> None:
        """The session is new, or has said something."""
        self.sessions.pop(session, None)
        self.sessions[session] = None

    def idle_workers(self) -> Iterator[Worker]:
        """All their workers; the worker that was idle longest is first."""
        yield from self.away
        yield from (session.worker for session in self.sessions if session.worker is not None)


LOST_KEPT_MAX = 4096


class Cluster:
    """All entities, and the place through which components act. A plain value store: no rules
    here.
    """

    def __init__(
        self,
        ident: str,
        epoch: int,
        term: str,
        options: Options,
        ids: Callable[[], str],
        observations: Observations,
    ) -> None:
        self.id = ident  # names the durable state
        self.observations = observations  # no decision depends on them
        self.epoch, self.term = epoch, term  # of this coordinator
        self.options = options
        self.new_id = ids
        self.now = self.began_at = 0.0
        self.listens_since = (
            # the end of the newest gap in which this coordinator did not run; its start, if there
            # was none
            0.0
        )
        self.cause = 0  # ordinal number of the event being handled
        self.timers = Timers()
        self.sessions: dict[int, Session] = {}
        self.workers: dict[str, Worker] = {}  # LIVE and SUSPECT ones, by incarnation
        self.hosts: dict[str, Worker] = {}  # those of them that have host memory for copies
        # incarnations that are back, and have not announced all holdings yet
        self.arriving: dict[str, None] = {}
        # incarnations that must not come back; the newest LOST_KEPT_MAX
        self.lost: dict[str, None] = {}
        self.members: dict[str, Member] = {}  # by registration id
        self.models: dict[str, Model] = {}
        self.model_names: list[str] = []  # theirs, sorted
        # those that have published last, the newest at the end; some may be forgotten
        self.newest_models: dict[str, None] = {}
        # sessions by the name that they watch, whether there is a model or not
        self.watchers: dict[str, set[int]] = {}
        self.watched = 0  # all watches: the sum of the sets' sizes
        self.read_only = ReadOnlySessions(options.sessions_max)
        self.leases: dict[str, ReadLease] = {}  # ACTIVE and FENCING ones
        # every group's operation, by its key as a text, as timers name it
        self.undecided: dict[str, Operation] = {}
        self.records: dict[int, Operation] = {}  # by record: the entry is on its way to the store
        # by record: the description is on its way to the store
        self._describing: dict[int, Version] = {}
        # by record: the entry is on its way to the store
        self.pending_writes: dict[int, PendingWrite] = {}
        # each group's newest commit, by model and group
        self.decisions: dict[tuple[str, str], Decision] = {}
        # What readers report of links, and of each other's; only the choice of sources depends on
        # that.
        self.links = Links()
        self.slowness = Slowness()
        self.manifests = Manifests()  # those of all members and versions
        self.testimonies: dict[Testimony, None] = {}  # those that have a list, oldest first
        self.list_bytes = 0  # of these lists
        self.selections = 0  # those of all versions
        # by incarnation: of all its members, equal manifests included
        self.manifest_bytes: Counter[str] = Counter()
        self.pins: Counter[str] = Counter()  # how many each incarnation has, in all models
        # to be settled; True: with the operations that wait
        self.changed_models: dict[str, bool] = {}
        self.changed_operations: dict[OpKey, Operation] = {}
        # Changed operations that waited. Each step settles some of them, oldest first.
        self.woken: dict[OpKey, Operation] = {}
        # of which holdings are to be counted anew in this step
        self.uncounted: dict[Version, Model] = {}
        # their ranks have not been told the new epoch yet; none between two steps
        self.renumbered: dict[Group, None] = {}
        self.followed = 0  # links of chains of readers, in this step
        # what the last step has changed, or may have: `invariants` looks at it
        self.noted: dict[Noted, None] = {}
        self.epochs_minted = epoch << 32  # group epochs of a later coordinator are always larger
        self.records_minted = 0
        self._actions: list[Action] = []

    def has_done_much(self) -> bool:
        """Whether this step has to leave further deadlines and losses to the next ones."""
        return len(self.noted) >= limits.NOTED_PER_STEP or self.followed >= limits.FOLLOWED_PER_STEP

    def happened(self, kind: str, *about: Any) -> None:
        """Have people told: see `Observations.happened`."""
        self.observations.happened(self.now, kind, *about)

    # -- acting

    def send(self, session: int | None, message: FromCoordinator) -> None:
        """Say this over a connection. Without one nothing is said: the peer asks again when it is
        back.
        """
        if session is not None:
            self._actions.append(Send(self.cause, session, message))

    def tell(self, member: Member, message: FromCoordinator) -> None:
        self.noted[member] = None
        self.send(member.worker.session, message)

    def answer(
        self, session: int | None, request: int, error: TensorHubError | None = None
    ) -> None:
        """Tell the asker that its request is done, or refused with `error`."""
        if error is not None:
            self.observations.counters.refused_total[type(error).__name__] += 1
        self.send(
            session, Done(request) if error is None else Refused(request, ErrorInfo.of(error))
        )

    def close_session(self, session: int, reason: str) -> None:
        """End this connection, once all is said."""
        self._actions.append(CloseSession(self.cause, session, reason))

    def look_for(self, session: int) -> None:
        """Ask whether anything of this session lies unread."""
        self._actions.append(LookFor(self.cause, session))

    def tell_lost(self, worker: Worker, reason: str) -> None:
        """Have people told that a worker is lost."""
        self._actions.append(WorkerLost(self.cause, worker.name, reason))

    def refuse_session(self, session: int, error: TensorHubError) -> None:
        """Say why, and close it."""
        self.answer(session, NO_REQUEST, error)
        self.close_session(session, str(error))

    def dismiss(self, session: int, text: str, reason: str) -> None:
        """Tell a worker that this incarnation of it is lost for good, and close the session."""
        self.send(session, Dismissed(text[: limits.DISMISSED_CHARS_MAX]))
        self.close_session(session, reason)

    def outlived(self, reason: str | None) -> None:
        """A worker remembers more than is recorded; None: none does."""
        if reason is not None:
            self._actions.append(Outlived(self.cause, reason))

    def persist(self, entry: Entry) -> int:
        """Have an entry made durable. Returns the number by which `Persisted` or `PersistFailed`
        will name it.
        """
        self.records_minted += 1
        self._actions.append(Persist(self.cause, self.records_minted, entry))
        return self.records_minted

    def record(self, write: PendingWrite, entry: Entry) -> None:
        """Have made durable what a worker has asked for."""
        write.record = self.persist(entry)
        self.pending_writes[write.record] = write

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    @property
    def unsettled(self) -> int:
        """How much is to be said, or to be settled, in this step."""
        return len(self._actions) + len(self.changed_models) + len(self.changed_operations)

    def committed_content(self, model: str, group: str) -> str | None:
        """The content id that a group of several ranks has committed to last, or is about to; None
        if nothing is known.
        """
        for operation in self.records.values():
            if (operation.key.model, operation.key.group) == (
                model,
                group,
            ) and operation.version is not None:
                return operation.version.info.content_id
        decision = self.decisions.get((model, group))
        return decision.content_id if decision is not None else None

    def mint_epoch(self) -> int:
        self.epochs_minted += 1
        return self.epochs_minted

    # -- changing

    def note(self, *changed: Noted) -> None:
        """These were changed in this step. (`become`, `tell`, `touch` and `changed` note what they
        change by themselves.)
        """
        for about in changed:
            self.noted[about] = None

    def become(self, entity: Entity, state: Any, why: str) -> None:
        """Move an entity along its table, in this step."""
        before = entity.state
        entity.become(state, self.cause, self.now, why)
        self.observations.became(self.now, entity, before, why)
        self.noted[entity.operation if isinstance(entity, RankPart) else entity] = None
        if isinstance(entity, Replica):
            self.reckon(*entity.holdings.values())
        elif isinstance(entity, Worker):
            self.reckon_all_of(entity)

    def reckon(self, *holdings: Holding) -> None:
        """Have these holdings counted again before the next question: their counts depend on
        something that has changed.
        """
        for holding in holdings:
            version = holding.version
            self.noted[version] = None
            self.uncounted[version] = holding.member.group.model
            if not holding.leaving:
                holding.layout.uncounted[holding] = None

    def count(self) -> None:
        """Count the holdings that have changed. Where there is more to read from, wake the
        operations that lack a source; where there is less, those that may have none left.
        """
        while self.uncounted:
            version, model = self.uncounted.popitem()
            for layout in version.layouts:
                layout.count()
                if layout.has_grown:
                    layout.has_grown = False
                    self.wake_all(version.starving)
                    self.wake_all(model.waiting.unbound_copies)
                    if self.is_recovering:  # this version may be read instead of an older one
                        for other in model.versions.values():
                            self.wake_all(other.starving)
            self.wake_all(model.waiting.forlorn)

    def reckon_all_of(self, worker: Worker) -> None:
        self.reckon(
            *(member.holding for member in worker.members.values() if member.holding is not None)
        )

    def touch(self, model: Model, *, wakes: bool = True) -> None:
        """Have the model settled at the end of this step. `wakes`: with the operations that wait
        for it. False where only memory that serves no reader came or went: no operation waits for
        that.
        """
        self.changed_models[model.name] = wakes or self.changed_models.get(model.name, False)
        self.noted[model] = None

    def changed(self, operation: Operation, part: RankPart | None = None) -> None:
        """Have the operation settled at the end of this step, if it is not decided. `part`: this
        rank alone has news.
        """
        if part is None:
            operation.news = None
        elif operation.news is not None:
            operation.news[part] = None
        if not operation.decided:
            self.changed_operations[operation.key] = operation

    def bind(self, operation: Operation, version: Version) -> None:
        """From now on, until it is decided, the operation acts on this version."""
        operation.version = version
        version.bound[operation.key] = operation
        self.note(operation, version)

    def look_at_all(self, operation: Operation) -> None:
        """When it is settled next, look at all its ranks."""
        operation.news = None

    def wake(self, operation: Operation) -> None:
        """Have an operation settled in its turn: in this step, unless there are many."""
        operation.news = None
        if not operation.decided:
            self.woken[operation.key] = operation

    def wake_all(self, waiting: dict[OpKey, Operation]) -> None:
        """The thing that these operations wait for may be there. They leave the list in which they
        wait, so that an operation that is woken repeatedly is looked at once.
        """
        for operation in waiting.values():
            self.wake(operation)
        waiting.clear()

    def is_woken(self, operation: Operation) -> bool:
        """Whether it will be looked at."""
        return bool(self.woken) and operation.key in self.woken

    def file(self, operation: Operation) -> None:
        """Have it found by what it waits for now."""
        operation.is_starving = operation.version is not None and starves(operation)
        # else for what has changed meanwhile
        if not (operation.key in self.changed_operations or self.is_woken(operation)):
            operation.news = {}
        now = waits_in(operation)
        kept = [*map(id, now)]
        for before in operation.filed_in:
            if id(before) not in kept:
                before.pop(operation.key, None)
        for each in now:
            each[operation.key] = operation
        operation.filed_in = now

    def learn(
        self,
        version: Version,
        layout: LayoutHoldings[Holding],
        shard: int,
        manifest: bytes,
        parts: tuple[bytes, ...] | None = None,
    ) -> None:
        """Keep this manifest of a shard in a layout, and its parts (None: the sender does not know
        them), unless they are known already. Parts that differ from the published ones are not
        kept. Once every shard is described, the operations that wait for that are woken.
        """
        if not version.is_kept:
            return
        was_described = layout.is_described
        if not layout.manifests.get(shard):
            layout.manifests[shard] = self.manifests.keep(manifest)
            self.note(version)
        if (
            parts is not None
            and shard not in layout.parts
            and self._are_as_published(version, layout, shard, parts)
        ):
            layout.learn_parts(shard, self.manifests.keep_all(parts))
            self.note(version)
        if layout.is_described and not was_described:
            model = self.models[version.info.model]
            self.wake_all(model.waiting.unbound)

    def _are_as_published(
        self,
        version: Version,
        layout: LayoutHoldings[Holding],
        shard: int,
        parts: tuple[bytes, ...],
    ) -> bool:
        """Whether these are the recorded parts of that shard. Nothing is recorded of layouts that
        were not published.
        """
        recorded = version.recorded(shard) if layout is version.holdings else None
        return recorded is None or recorded[1] == (self.manifests.name(parts[-1]) if parts else "")

    def ids_of(self, layout: LayoutHoldings[Holding]) -> bytes:
        """`Version.manifest_ids` of the shards that are published in that layout."""
        said = [(layout.manifests[shard], *layout.parts.get(shard, ())[-1:]) for shard in layout]
        ids = [[bytes.fromhex(self.manifests.name(blob)) for blob in blobs] for blobs in said]
        return b"".join([b"".join(each).ljust(2 * ID_BYTES, b"\0") for each in ids])

    def describe(self, version: Version, layout: LayoutHoldings[Holding]) -> str:
        """The id of the description that says which rank holds which part in that layout
        (`layouts.published`). Every shard's manifest, or the description itself, is known.
        """
        if not layout.description:
            manifests = layout.manifests
            said = [layout.parts[shard] or (manifests[shard],) for shard in layout]
            shards = tuple([tuple(map(self.manifests.id_of, each)) for each in said])
            if layout is version.holdings:
                head = head_of(manifests[0])
            else:
                published = decoded(version.holdings.description)
                head = published.digest, published.chunk_bytes
            self._keep_description(version, layout, Published(*head, shards).encode())
        if (
            layout is version.holdings
            and version.visible
            and layout.is_described
            and not layout.stored
        ):
            layout.stored = True
            self.note(version)
            named = [layout.parts[shard] or (layout.manifests[shard],) for shard in layout]
            parts = tuple(dict.fromkeys(chain(*named)))
            info = version.info
            entry = Described(info.model, info.version, info.content_id, layout.description, parts)
            self._describing[self.persist(entry)] = version
        return layout.described_as

    def described(self, record: int, *, failed: bool) -> None:
        """The store has an entry, or cannot take it. A failed description is stored with the next
        call that needs it.
        """
        version = self._describing.pop(record, None)
        if version is not None and failed:
            version.holdings.stored = False
            self.note(version)

    def recover_description(
        self, version: Version, description: bytes, blobs: tuple[bytes, ...]
    ) -> None:
        """The store has the description of a publication, and has checked it: readers of another
        layout can plan before a publisher is back.
        """
        layout = version.holdings
        if not self.manifests.has_room_for(description, *blobs):
            return
        published = decoded(description)
        found = dict(zip(published.part_ids, blobs, strict=True))
        for shard, ids in enumerate(published.shards):
            if len(ids) == 1:
                layout.manifests[shard] = self.manifests.keep(found[ids[0]])
            layout.learn_parts(
                shard, self.manifests.keep_all(found[each] for each in ids) if len(ids) > 1 else ()
            )
        self._keep_description(version, layout, description)
        layout.stored = True

    def _keep_description(
        self, version: Version, layout: LayoutHoldings[Holding], description: bytes
    ) -> None:
        layout.description, layout.described_as = (
            self.manifests.keep(description),
            id_of(description),
        )
        self.note(version)

    def lay_out(self, version: Version, group: Group) -> LayoutHoldings[Holding]:
        """Where the copy of that group belongs, which has another layout than the published one.
        All ranks are there. `forget_layouts` forgets it again.
        """
        layout = version.others.get(group.reads_as)
        if layout is None:
            layout = version.others[group.reads_as] = LayoutHoldings(group.reads_as)
            layout.lay_out(group.world_size)
            self.note(version)
        return layout

    def forget_layouts(self, version: Version) -> None:
        """Forget the layouts in which no rank holds or fills the version any more, and the
        selections that only they needed.
        """
        used = layouts_used(version)
        for key, layout in [
            (key, each) for key, each in version.others.items() if id(each) not in used
        ]:
            self.manifests.release(*layout.unlearn())
            del version.others[key]
            self.note(version)
            for selection in version.selections.keys() - selections_needed(version):
                self.forget_selection(version, selection)

    def forget_selection(self, version: Version, key: SelectionKey) -> None:
        self.forget_list(version.selections.pop(key))
        self.selections -= 1

    def unlearn(self, version: Version) -> None:
        """Forget the manifests and lists of a version that is retired, or that no rank holds. A
        durable description is kept while the version may be held again, because its publisher may
        not come back.
        """
        if version.manifests or version.holdings.parts:
            self.note(version)
        for layout in version.layouts:
            if layout is not version.holdings or not (layout.stored and version.is_kept):
                self.manifests.release(*layout.unlearn())
        for key in list(version.selections):
            self.forget_selection(version, key)
        version.others.clear()
        for testimony in version.testimonies.values():
            testimony.publisher = None
            testimony.answered.clear()
            self.forget_list(testimony)

    def forget_list(self, testimony: Testimony) -> None:
        """Its root stays."""
        if testimony in self.testimonies:
            del self.testimonies[testimony]
            self.list_bytes -= testimony.nbytes
        testimony.begin(-1)
        testimony.turned_away = False

    def keep_begun(self, member: Member, manifest: bytes) -> None:
        """Keep the manifest of what that rank goes on with, counted as its worker's. Empty: it is
        needed no more.
        """
        self.manifests.release(member.begun)
        self.manifest_bytes[member.worker.incarnation] += len(manifest) - len(member.begun)
        member.begun = self.manifests.keep(manifest)
        member.begun_id = id_of(manifest)
        self.note(member)

    def keep_arranged(self, member: Member, parts: tuple[bytes, ...]) -> None:
        """Keep what that rank has said of where it reads to, counted as its worker's, instead of
        what it has said before.
        """
        before, member.arranged = member.arranged, self.manifests.keep_all(parts)
        self.manifests.release(*before)
        self.manifest_bytes[member.worker.incarnation] += sum(map(len, parts)) - sum(
            map(len, before)
        )
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
        """The model of this name. It begins to exist when a worker first names it for writing or
        waiting.
        """
        model = self.models.get(name)
        if model is None:
            model = self.models[name] = Model(name)
            insort(self.model_names, name)
            self.note(model)
        return model

    def has_news(self, model: Model) -> None:
        """A version of it has become visible."""
        self.newest_models.pop(model.name, None)
        self.newest_models[model.name] = None
        if len(self.newest_models) > limits.NEWEST_MODELS_MAX:
            del self.newest_models[next(iter(self.newest_models))]

    def models_after(self, name: str | None) -> Iterator[Model]:
        """All models in the order of their names, or only the models after that name."""
        start = 0 if name is None else bisect_right(self.model_names, name)
        return (
            self.models[self.model_names[place]] for place in range(start, len(self.model_names))
        )

    def forget_if_unused(self, model: Model) -> None:
        """Forget a name that was only waited for or fetched in vain."""
        ordered = any(write.model is model for write in self.pending_writes.values())
        if not model.is_used and not ordered:
            del self.models[model.name]
            del self.model_names[bisect_left(self.model_names, model.name)]

    def has_room_for(self, name: str) -> bool:
        """Whether this model may be named."""
        return name in self.models or len(self.models) < limits.MODELS_MAX

    def counts_on(self, worker: Worker) -> bool:
        """Whether the worker knows that it is counted on. The worker may cut itself off one lease
        after the newest word of the coordinator that it has answered, whatever lies unread here,
        and then it keeps nothing for other workers (R4). A timer may be late to notice.
        """
        return worker.state is WorkerState.LIVE and self.now < worker.answers + self.options.lease_s

    def is_restored(self, model: Model) -> bool:
        """Whether versions of an archive are on their way to the store."""
        return any(
            write.model is model and isinstance(write.message, Restore)
            for write in self.pending_writes.values()
        )

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
        if session.read_only:
            self.read_only.watches += more

    @property
    def is_recovering(self) -> bool:
        """Whether the first lease after a restart still runs, or a worker that came back within it
        still announces its holdings.
        """
        return ("recovery", "") in self.timers

    def operations(self) -> Iterator[Operation]:
        for model in self.models.values():
            for group in model.groups.values():
                if group.operation is not None:
                    yield group.operation


def layouts_used(version: Version) -> set[int]:
    """The identities of the layouts in which a rank holds or fills the version."""
    used = {
        id(part.in_layout)
        for operation in version.bound.values()
        for part in operation.parts.values()
    }
    return used | {id(layout) for layout in version.others.values() if layout.has_holders}


def selections_needed(version: Version) -> set[SelectionKey]:
    """What the readers of its other layouts need."""
    others = version.others.values()
    return {
        (n.shard, n.selection) for each in others for needs in each.needs.values() for n in needs
    }
