"""The guarantees of the design, checked from outside: by what memory holds, and by what calls have returned.

Responsible for G1 to G6 and G8 to G10, each named in what `GuaranteeBroken` says; G7 (liveness) is demanded by who drives
the cluster, once faults are over. What the coordinator's own books say is used as little as may be: its invariants are
its own affair. `check_*` costs what it looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from tensorhub.coordinator import Decision, Entry, Pinned, Publication, Retention, Rollback
from tensorhub.coordinator.fills import LEFT, UNCHANGED
from tensorhub.coordinator.states import ReplicaState
from tensorhub.errors import DrainTimeout, IntegrityError, LeaseLost, TensorHubError, VersionConflict, VersionUnavailable
from tensorhub.messages import Done, FromWorker, Outcome, Register, Registered, Start, Withdraw, Withdrawn, Write
from tensorhub.testing.rendering import show_error
from tensorhub.types import LATEST, PREVIOUS, HandleState, Medium, OpKey, OpKind, Purpose, VersionInfo
from tensorhub.worker.calls import Call, CloseCall, FillCall, PublishCall, SetAsideCall, UnpublishCall
from tensorhub.worker.enrolment import LEASE_MARGIN
from tensorhub.worker.holding import Content
from tensorhub.worker.running import DEADLINE_SLACK_S

if TYPE_CHECKING:
    from tensorhub.testing.cluster import Cluster
    from tensorhub.testing.handle import Asked, Handle

LATE_S_MAX = 3 * DEADLINE_SLACK_S  # it is given up after one, and some ends wait for another one
CLEARED_MAX = 2  # sources that are not at fault: then it is the reader
TODO_MAX = 1000  # actions that one handle has still to carry out
HOLDING = (HandleState.READY, HandleState.DRAINING)
RECORD = -1  # stands for a rank: what the store says of an operation


class GuaranteeBroken(AssertionError):
    """One of the design's guarantees does not hold."""


def demand(holds: bool, what: str) -> None:
    """Raise GuaranteeBroken unless it `holds`."""
    if not holds:
        raise GuaranteeBroken(what)


class Guarantees:
    """What was promised in one cluster, and whether it is kept."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.strangers = False  # some who publish are no handles of this cluster: nobody can know what they promised
        self.promised: dict[OpKey, dict[int, tuple[str, ...]]] = {}  # cells of each publish, by rank
        self.truth: dict[str, dict[int, tuple[str, ...]]] = {}  # cells of each content, by shard
        self.outcomes: dict[OpKey, dict[int, tuple[bool, str]]] = {}  # by rank: committed, and how it was learnt
        self.bound: dict[OpKey, int] = {}  # of each group call: the version that a rank returned
        self.returned: dict[str, int] = {}  # by model: the newest number of its lineage whose publish has returned
        self.retired: set[str] = set()  # content ids that were rolled back
        self.rolled_back: set[OpKey] = set()  # publications of these
        self.published: dict[str, dict[int, str]] = {}  # by model and number: content ids that are durable, or may be
        self.used: dict[str, tuple[int, float]] = {}  # by model: the largest number ever published; when it was rolled back
        self.recorded: dict[str, int] = {}  # by model: what the last `retain` that is durable asks for
        self.policy: dict[str, int] = {}  # by model: what holds of it, as some `retain` has returned since
        self.wishes: dict[int, tuple[str, int]] = {}  # by request: a `retain` that has not returned
        self.pin_wishes: dict[int, tuple[str, int]] = {}  # by request: the model and version of a new pin
        self.pins: dict[str, tuple[str, int, str]] = {}  # by id: model, number and incarnation of pins that have returned
        self._undone: dict[int, Retention | str] = {}  # by request: what has to be durable before it returns
        self._epochs: dict[tuple[str, str, int, int], str] = {}  # which registration a group's rank has had in an epoch
        self._pinned: dict[str, str] = {}  # by id: the content of each pin that is durable
        self._publications: dict[str, OpKey] = {}  # by content id: which publish has minted it
        self._spoilt: set[tuple[str, str]] = set()  # registrations, and the content that their own user has overwritten
        self._numbers: set[tuple[str, int, int]] = set()  # (model, lineage, number) that are durable
        # By group and content: the first rank that was let go, and when; its replica serves no more.
        self._leaving: dict[tuple[str, str], tuple[Handle, float]] = {}
        self._stayed: dict[tuple[str, str], set[Handle]] = {}  # of these: who serves again, in a replica that began since
        self._given_up: dict[str, float] = {}  # when some owner of which content took it from its readers, or wanted to
        self._fenced: dict[str, str] = {}  # by registration: the content that was, unless the coordinator has heard of it
        self._lost: dict[tuple[str, str], float] = {}  # when which registration has lost which content without leave

    def state_lost(self, store: Iterable[Entry]) -> None:
        """Whatever was published before must not come back; what was wanted of the former cluster counts no more."""
        self.retired.update(entry.content_id for entry in store if isinstance(entry, Publication))
        for past in (self.returned, self.published, self.recorded, self.policy, self.wishes, self.pins, self._numbers):
            past.clear()
        self.forget()

    def forget(self) -> None:
        """Forget how calls have ended."""
        self.outcomes.clear()
        self.bound.clear()

    # -- what happens

    def promise(self, key: OpKey, rank: int, cells: Sequence[str]) -> None:
        """A rank votes to publish what its memory holds now."""
        self.promised.setdefault(key, {})[rank] = tuple(cells)

    def decided(self, entry: Entry) -> None:
        """The coordinator wants this recorded."""
        if isinstance(entry, Publication):
            cells = self.promised.get(entry.key, {})
            if not cells and self.strangers:
                cells = dict.fromkeys(range(entry.world_size), ())
            whole = len(cells) == entry.world_size
            demand(whole, f"G4: {entry.key} is published, but only ranks {sorted(cells)} have called")
            self.truth[entry.content_id] = cells
            self._publications[entry.content_id] = entry.key
            self.published.setdefault(entry.model, {})[entry.number] = entry.content_id
            newest, when = self.used.get(entry.model, (-1, float("-inf")))
            self.used[entry.model] = max(newest, entry.number), when

    def stored(self, entry: Entry, before: Iterable[Entry]) -> None:
        """It is durable now. After a rollback nobody may see what it retires any more."""
        self._record_wish(entry)
        match entry:
            case Decision():
                self._learn(entry.key, RECORD, True, "that was recorded")
            case Publication():
                self._learn(entry.key, RECORD, True, "that was recorded")
                number = entry.model, entry.lineage, entry.number
                demand(number not in self._numbers, f"R1: a number was published twice: {number}")
                self._numbers.add(number)
            case Rollback():
                again = any(isinstance(e, Rollback) and e.ident == entry.ident for e in before)
                demand(not again, f"R2: a rollback that was asked for again was done twice: {entry}")
                published = [e for e in before if isinstance(e, Publication) and e.model == entry.model]
                gone = [e for e in published if e.number > entry.to]
                self.retired.update(e.content_id for e in gone)
                self.rolled_back.update(e.key for e in gone)
                self._lower_floors(entry.model, published)
                self.used[entry.model] = self.used.get(entry.model, (-1, 0.0))[0], self._cluster.now
                numbers = self.published.get(entry.model, {})
                self.published[entry.model] = {n: c for n, c in numbers.items() if n <= entry.to}
            case Retention():
                self.recorded[entry.model] = entry.retain
                self.policy[entry.model] = min(entry.retain, self.policy.get(entry.model, 0))
                self._loosen(entry.model)
            case _:
                pass

    def asks(self, request: int, what: Retention | str) -> None:
        """What is asked for is to be durable before it is answered: a `retain`, or the name of a pin or of a rollback."""
        if not any(isinstance(entry, Rollback) and entry.ident == what for entry in self._cluster.store):
            self._undone[request] = what

    def _record_wish(self, entry: Entry) -> None:
        match entry:
            case Retention():
                done: Retention | str = entry
            case Pinned():
                done = entry.pin
                self._pinned[entry.pin] = entry.content_id
            case Rollback():
                done = entry.ident
            case _:
                return
        self._undone = {request: what for request, what in self._undone.items() if what != done}

    def retains(self, model: str, latest: int) -> None:
        """That `retain` has returned: at once, or after later ones, as it waits until every holder knows."""
        self.policy[model] = min(latest, self.recorded.get(model, 0))

    def _lower_floors(self, model: str, published: list[Publication]) -> None:
        newest = max((e.number for e in published if e.content_id not in self.retired), default=-1)
        if model in self.returned:
            self.returned[model] = min(self.returned[model], newest)
        for handle in self._cluster.all_handles():
            asked = handle.asked
            if asked is not None and asked.floor is not None and handle.shard.model == model:
                asked.floor = min(asked.floor, newest)

    def ended(self, handle: Handle, asked: Asked) -> None:
        """A call has returned, or raised."""
        error, key = asked.error, asked.key
        if isinstance(asked.what, UnpublishCall | CloseCall):
            self._given_up[handle.last_held] = self._cluster.now  # also in vain: its readers may have been told
        if isinstance(error, DrainTimeout):
            self._given_up[handle.last_held] = self._cluster.now  # for a while
        if error is not None:
            left = (handle.shard.group, handle.last_held)
            if (
                isinstance(asked.what, UnpublishCall | CloseCall | SetAsideCall)
                and left in self._leaving
                and self._leaving[left][0] is handle
            ):
                del self._leaving[left]  # it stays
            demand(
                isinstance(error, (TensorHubError, *self._cluster.user_errors)),
                f"G10: every refusal is a typed error: {error!r}",
            )
            if isinstance(error, IntegrityError) and UNCHANGED in str(error):
                self._blamed(handle, asked, str(error))
            if isinstance(error, VersionUnavailable) and LEFT in str(error):
                self._left(handle, asked, str(error))
            if isinstance(asked.what, PublishCall) and isinstance(error, VersionConflict) and not error.retryable:
                self._refused(handle, asked, asked.what.version)
            if key is not None and getattr(error, "memory", "") != "in_doubt" and not isinstance(error, LeaseLost):
                for each in {**dict.fromkeys(asked.votes), key: None}:
                    self._learn(each, handle.shard.rank, False, f"{handle.name} raised {show_error(error)}")
            return
        if key is not None and asked.version is not None:
            number = asked.version.version
            self._learn(key, handle.shard.rank, True, f"{handle.name} returned {number}")
            bound = self.bound.setdefault(key, number)
            demand(bound == number, f"G4: {key} ended with version {bound} and with {number} ({handle.name})")
        match asked.what:
            case PublishCall():
                if asked.version is not None and asked.version.content_id not in self.retired:
                    newest = self.returned.get(handle.shard.model, -1)
                    self.returned[handle.shard.model] = max(asked.what.version, newest)
            case FillCall():
                self._filled(handle, asked, asked.what)
            case UnpublishCall() | CloseCall():
                demand(handle.worker.owner.is_quiet(handle.id), f"G2: {handle.name} is read after {asked.what}")
                self.check_closed(handle)
            case _:
                pass

    def _refused(self, handle: Handle, asked: Asked, number: int) -> None:
        """R1: only what was published, or what a rollback has overtaken, stands in the way of a number."""
        newest, rolled_back_at = self.used.get(handle.shard.model, (-1, float("-inf")))
        ok = number <= newest or rolled_back_at >= asked.began
        demand(ok or self.strangers, f"R1: {handle} may not publish {number}, but {newest} is the newest: {asked.error}")

    def _blamed(self, handle: Handle, asked: Asked, text: str) -> None:
        """R8: a reader is at fault, before its time is over, only if several unchanged sources have sent it other bytes."""
        mates = [h.asked for h in (handle, *self._mates(handle)) if h.asked is not None and h.asked.key == asked.key]
        several = any(len(mate.damaged) >= CLEARED_MAX for mate in mates)
        late = any(mate.until <= self._cluster.now for mate in mates)
        demand(several or late or self.strangers, f"R8: {handle} is blamed for {[mate.damaged for mate in mates]}: {text}")

    def heard(self, message: FromWorker) -> None:
        """The coordinator is about to learn which memory its owner has given up, or wants to."""
        if isinstance(message, Withdraw):
            handle = self._cluster.by_registration.get(message.registration)
            if handle is not None:
                self._given_up[handle.last_held] = self._cluster.now
        elif isinstance(message, Withdrawn | Register):
            content_id = self._fenced.pop(message.registration, "")
            self._given_up[content_id] = self._cluster.now

    def _left(self, handle: Handle, asked: Asked, text: str) -> None:
        """R12: only where a last holder leaves on purpose nobody waits for it."""
        wanted = {c for n, c in self.published.get(handle.shard.model, {}).items() if text.startswith(f"version {n} of ")}
        gone = any(self._given_up.get(content_id, -inf) >= asked.began for content_id in wanted)
        going = any(
            h.last_held in wanted and h.asked is not None and not h.asked.done and h.asked.what is not asked.what
            for h in self._cluster.all_handles()
        )
        demand(gone or going or not wanted or self.strangers, f"R12: nobody has left what {handle} waited for: {text}")

    def _filled(self, handle: Handle, asked: Asked, call: FillCall) -> None:
        assert asked.version is not None
        number = asked.version.version
        demand(asked.version.content_id not in asked.retired, f"G3: {handle.name} got {number}, which was rolled back")
        if call.selector == LATEST and asked.floor is not None:
            demand(number >= asked.floor, f"G3: {handle.name} got {number} after publish({asked.floor}) returned")
        if call.selector == PREVIOUS:
            newest, _ = self.used.get(handle.shard.model, (-1, 0.0))
            demand(number < newest, f"R12: {handle.name} asked for {PREVIOUS}, and got {number}: {newest} is the newest")
        if isinstance(call.selector, int):
            demand(number == call.selector, f"{handle.name} asked for {call.selector}, got {number}")
        self.check_content(handle)
        if call.kind is OpKind.FETCH:
            self._check_cells(handle, asked.version)

    def resolved(self, handle: Handle, outcome: Outcome) -> None:
        """A rank that was in doubt hears what has become of its operation."""
        if not self._is_forgotten(outcome.key):
            self._learn(outcome.key, handle.shard.rank, outcome.committed, f"{handle.name} was told so")

    def _learn(self, key: OpKey, rank: int, committed: bool, how: str) -> None:
        """G4, R6: no two ranks hear different outcomes, nor another one than what is recorded."""
        if key in self.rolled_back:
            return  # after a restart nobody remembers that it was published
        heard = self.outcomes.setdefault(key, {})
        heard[rank] = (committed, how)
        if self._is_forgotten(key):
            heard.pop(RECORD, None)
        demand(len({outcome for outcome, _ in heard.values()}) == 1, f"G4: {key}: {heard}")

    def _is_forgotten(self, key: OpKey) -> bool:
        """Whether it was a publication, of what nobody has held for so long that the coordinator knows nothing of it."""
        model = self._cluster.coordinator.cluster.models.get(key.model)
        known = model is not None and any(version.publisher == key for version in model.versions.values())
        return key in self.promised and not known

    def registered(self, handle: Handle, message: Registered) -> None:
        """R6: another process in a rank's place makes a new membership epoch."""
        shard = handle.shard
        place = shard.model, shard.group, shard.rank, message.epoch
        before = self._epochs.setdefault(place, shard.registration)
        demand(before == shard.registration, f"R6: {handle} has replaced {before} in the membership epoch {message.epoch}")

    # -- memory

    def served(self, handle: Handle, generation: int, chunks: Iterable[int], version: VersionInfo) -> None:
        """A lane begins to read these chunks there, as that version's (G6: only what is verified), under that generation."""
        demand(generation == handle.generation, f"G9: {handle} serves what was asked of generation {generation}")
        if self.is_spoilt(handle, version.content_id):
            return
        truth = self.truth[version.content_id][handle.shard.number]
        for chunk in chunks:
            cell = handle.cells[chunk]
            if cell != truth[chunk] and handle.was_written(chunk):
                self.spoil(handle, version.content_id, chunk, cell)
                continue
            demand(cell == truth[chunk], f"G6: {handle} serves {cell} as {truth[chunk]} of version {version.version}")

    def announced(self, handle: Handle, content_id: str) -> None:
        """It says to the coordinator that it holds that."""
        demand(handle.changed != content_id, f"R8: {handle} is announced, and it knows that its bytes have changed")

    def fencing(self, handle: Handle, generation: int) -> None:
        """A fence begins."""
        content, asked = handle.member.content, handle.asked
        held = content is not None and content.generation == generation and handle.member.state in HOLDING
        if content is None or asked is None or asked.done or not held:
            return
        call, what = asked.what, f"{handle}, which holds version {content.version.version}"
        if isinstance(call, FillCall) and call.staged and asked.key is not None:
            demand(asked.committed, f"R7: {what}, is overwritten by {call}, which is not committed")
        asks_nobody = isinstance(call, UnpublishCall | CloseCall) and not asked.granted and not self._abandons(handle)
        if asks_nobody and content.retained and not self._keeps(handle, content, call):
            free_at = handle.worker.cut_off_at + (1 + LEASE_MARGIN) * self._cluster.options.lease_s
            ok = self._cluster.now >= free_at - 1e-6
            demand(ok, f"R4: {what} to be kept, is cut off, and leaves before {free_at:.3f}")

    @staticmethod
    def _keeps(handle: Handle, content: Content, call: Call) -> bool:
        """Whether what it holds stays in its worker when it leaves: in a host copy, where it was all of the version."""
        if content.version.world_size > 1 or isinstance(call, CloseCall):
            return False
        copies = (h.member for h in handle.worker.handles if h.shard.purpose is Purpose.RETENTION)
        held = [copy.content for copy in copies if copy.state in HOLDING]
        return any(c is not None and c.version.content_id == content.version.content_id for c in held)

    def told_to_write(self, handle: Handle | None, message: Start | Write) -> None:
        """The coordinator tells a rank that it may overwrite its memory, for the first time: R7, there is a source."""
        if handle is None or handle.member.state is HandleState.FILLING or handle.staging is not None:
            return  # it goes on with what it has begun before
        demand(bool(message.grants), f"R7: {handle} is to be overwritten with {message}, and nobody is said to have it")

    def writes(self, handle: Handle) -> None:
        """A lane writes a chunk of a fill into the memory itself."""
        state = handle.member.state
        demand(state is HandleState.FILLING, f"G2: {handle} is written while it is {state}")

    def spoil(self, handle: Handle, content_id: str, chunk: int, cell: str) -> None:
        """A user writes published memory. Nobody may get those bytes, unless nobody could know better: a publisher's chunk
        of which no digest has been made yet is what it is then.
        """
        held = handle.worker.owner._holdings.get(handle.id)
        if held is not None and held.digests[chunk] is None:
            cells = list(self.truth[content_id][handle.shard.number])
            cells[chunk] = cell
            self.truth[content_id][handle.shard.number] = tuple(cells)
        else:
            self._spoilt.add((handle.id, content_id))

    def is_spoilt(self, handle: Handle, content_id: str) -> bool:
        """Whether its own user has overwritten that there."""
        return (handle.id, content_id) in self._spoilt

    # -- retention

    def _mates(self, handle: Handle) -> list[Handle]:
        """The other ranks of its group."""
        return [h for h in self._cluster.live_handles() if h.shard.group == handle.shard.group and h is not handle]

    @staticmethod
    def _abandons(handle: Handle) -> bool:
        return handle.asked is not None and isinstance(handle.asked.what, CloseCall) and handle.asked.what.abandon

    def retained(self, model: str) -> frozenset[str]:
        """Content ids that must stay: what every `retain` and pin that has returned agrees on (G5)."""
        if self.strangers:
            return frozenset()
        numbers = self.published.get(model, {})
        wanted = [self.policy.get(model, 0), *(latest for name, latest in self.wishes.values() if name == model)]
        newest = sorted(numbers, reverse=True)[: min(wanted)]
        live = self._cluster.coordinator.cluster.workers  # with a pin's worker, or with what is pinned, ends the pin
        pins = {pin: n for pin, (name, n, incarnation) in self.pins.items() if name == model and incarnation in live}
        pinned = [n for pin, n in pins.items() if n in numbers and self._pinned.get(pin) == numbers[n]]
        return frozenset(numbers[number] for number in [*newest, *pinned])

    def wish(self, request: int, model: str, latest: int) -> None:
        """A `retain` is said: from now on it may count."""
        self.wishes[request] = (model, latest)
        self._loosen(model)

    def unpin(self, pin: str) -> None:
        """From now on it may count no more."""
        model, *_ = self.pins.pop(pin, ("", 0, ""))
        if model:
            self._loosen(model)

    def _loosen(self, model: str) -> None:
        """What need not stay now may have been let go by a call that is running, whatever is wished for later."""
        retained = self.retained(model)
        for handle in self._cluster.live_handles():
            if handle.asked is not None and handle.shard.model == model:
                handle.asked.retained &= retained

    def filling(self, handle: Handle, version: VersionInfo) -> None:
        """Its group begins a new replica of that version."""
        self._leaving.pop((handle.shard.group, version.content_id), None)

    def stays(self, handle: Handle, content_id: str) -> None:
        """The coordinator is told again that it holds that, and keeps it: who was let go may not have been fenced in time.
        It serves again, with its whole replica if that does, or alone in a new one (the former has ended).
        """
        key, known = (handle.shard.group, content_id), self._cluster.coordinator.cluster.members.get(handle.id)
        holding = known.holding if known is not None else None
        if handle.asked is not None and holding is not None:
            handle.asked.granted_at = 0.0
        if key not in self._leaving or holding is None or not holding.is_source:
            return  # it stays in a replica that another rank has left
        if holding.replica.state is ReplicaState.READY:
            del self._leaving[key]
        else:
            self._stayed[key].add(handle)

    def let_go(self, handle: Handle) -> None:
        """The coordinator lets this rank go: its replica stops to serve with the first that leaves."""
        content, asked = handle.member.content, handle.asked
        if content is not None and asked is not None and self.has_left(handle, content.version.content_id) is None:
            key = handle.shard.group, content.version.content_id
            self._leaving[key] = handle, asked.granted_at
            # A replica that a new coordinator has not put together again serves piece by piece, as one that is being filled.
            members = self._cluster.coordinator.cluster.members
            books = {mate: members[mate.id].holding for mate in self._mates(handle) if mate.id in members}
            self._stayed[key] = {mate for mate, holding in books.items() if holding is not None and holding.is_source}

    def has_left(self, handle: Handle, content_id: str) -> Handle | None:
        """Which rank was let go first, so that the replica that this one was a part of serves no more. What a worker
        announces to a coordinator that did not know it is a new replica.
        """
        key = handle.shard.group, content_id
        first, when = self._leaving.get(key, (None, 0.0))
        serves = when < handle.worker.known_since or handle in self._stayed.get(key, ())
        return None if serves else first

    def granted(self, handle: Handle) -> None:
        """The coordinator is about to say that this rank may go; with a `close` its process may end from then on."""
        asked, content = handle.asked, handle.member.content
        if asked is None or content is None:
            return
        content_id, asked.granted_at = content.version.content_id, self._cluster.now
        asked.follows = any(self._is_let_go(mate, content_id) for mate in self._mates(handle))
        if asked.follows:
            return  # its replica does not serve any more, whoever of them hears it first
        if isinstance(asked.what, CloseCall | SetAsideCall) and self._is_whole(handle, asked, content_id):
            is_one = handle.shard.purpose is Purpose.RETENTION  # a copy of one shard; its worker's others ask for themselves
            shards = [handle.shard.number] if is_one else list(self.truth[content_id])
            alone = (shard for shard in shards if not self._others(handle, shard, asked, elsewhere=True))
            asked.alone = next(alone, None)

    @staticmethod
    def _is_let_go(handle: Handle, content_id: str) -> bool:
        """Whether the coordinator has said that it may go, and it has not stayed."""
        content, asked = handle.member.content, handle.asked
        holds = content is not None and content.version.content_id == content_id
        return holds and asked is not None and not asked.done and asked.granted_at > 0

    @staticmethod
    def _may_be_on_its_way(handle: Handle, content_id: str) -> bool:
        """Whether it has asked for its leave when that content was anybody's to give up."""
        content, asked = handle.member.content, handle.asked
        holds = content is not None and content.version.content_id == content_id
        leaves = asked is not None and not asked.done and isinstance(asked.what, UnpublishCall | CloseCall)
        return holds and leaves and asked is not None and content_id not in asked.retained

    def _is_whole(self, handle: Handle, asked: Asked, content_id: str) -> bool:
        """Whether, with what this handle holds, every shard of it surely has a reliable holder."""
        for shard in self.truth[content_id]:
            holders = (h for h in self._cluster.all_handles() if h.shard.number == shard and h.shard.serves)
            holders = (h for h in holders if h is handle or self._surely_holds(h, content_id, asked.began, handle))
            if not any(map(self._is_reliable, holders)):
                return False
        return True

    def _others(self, handle: Handle, shard: int, asked: Asked, *, elsewhere: bool) -> bool:
        """Whether some other group keeps that shard of what this handle holds; `elsewhere`: in another process."""
        assert handle.member.content is not None
        content_id = handle.member.content.version.content_id
        holders = (h for h in self._cluster.all_handles() if h.shard.number == shard and h.shard.serves)
        return any(
            h.shard.group != handle.shard.group
            and not (elsewhere and h.worker is handle.worker)
            and self._is_reliable(h)
            and self._seems_to_hold(h, content_id, asked.began)
            for h in holders
        )

    def fenced(self, handle: Handle, generation: int) -> None:
        """Nobody reads that memory any more: a version that must stay must be held by others (G5)."""
        content, asked, model = handle.member.content, handle.asked, handle.shard.model
        self._given_up[handle.last_held] = self._cluster.now
        self._fenced[handle.id] = handle.last_held
        held = content is not None and content.generation == generation and handle.member.state in HOLDING
        unasked = asked is None or (isinstance(asked.what, CloseCall) and asked.what.abandon) or not asked.granted
        if content is None or asked is None or not held or unasked:
            self.lost(handle)  # not by its owner's own wish, or without asking anybody
            return
        content_id = content.version.content_id
        if content_id not in asked.retained & self.retained(model) or self._cluster.is_recording_rollback(model):
            return
        if self.is_spoilt(handle, content_id) or any(self._abandons(mate) for mate in self._mates(handle)):
            return  # nobody wants it, or a rank of its replica does not care
        if asked.follows or self.has_left(handle, content_id) not in (None, handle):
            return  # its replica did not serve any more
        if any(self._may_be_on_its_way(mate, content_id) for mate in self._mates(handle)):
            return  # nor does it, if that mate's leave was granted: its readers are waited for before it hears of that
        if not self._is_reliable(handle) or not self._is_whole(handle, asked, content_id):
            return  # it does not count, or the version was lost before
        lacks = [shard for shard in self.truth[content_id] if not self._others(handle, shard, asked, elsewhere=False)]
        lacks += [asked.alone] if asked.alone is not None else []  # when its process could end
        demand(
            not lacks,
            f"G5: {handle} has left with {asked.what}, and nobody else holds the shards {lacks} of {content.version}",
        )

    def _is_reliable(self, handle: Handle) -> bool:
        """Whether it counts for retention: no rank of its group is spot; nor, for a host copy, anything of its worker that
        the coordinator has heard of.
        """
        group, is_copy = handle.shard.group, handle.shard.medium is Medium.HOST
        known = self._cluster.coordinator.cluster.members
        ranks = {h.shard.rank: h for h in self._cluster.all_handles() if h.shard.group == group}  # the newest of each
        open_ = [h for h in handle.worker.handles if h.shard.serves and h.id in known]
        return not any(h.shard.spot for h in [*ranks.values(), *(open_ if is_copy else ())])

    def _surely_holds(self, handle: Handle, content_id: str, since: float, leaver: Handle) -> bool:
        """Whether the coordinator knew that it holds that when `leaver` was let go: it was told so, and its worker has had
        its lease all the time. (What is only filled, or published without having heard so, may be given up yet.)
        """
        worker = handle.worker
        sure = worker.unsure_at < since and worker.incarnation in self._cluster.coordinator.cluster.workers
        return sure and handle.member.state in HOLDING and self._holds(handle, content_id, leaver)

    def _holds(self, handle: Handle, content_id: str, leaver: Handle | None = None) -> bool:
        """Whether all of it can be read there: held, or filled and voted for, or published without having heard so; or
        staged, from where it comes into place without anybody's help. `leaver`: also if that one has ended its replica.
        """
        content, asked, staged = handle.member.content, handle.asked, handle.member.staged
        if staged is not None and staged.version.content_id == content_id and handle.worker.alive:
            return True
        if asked is not None and not asked.done and asked.key == self._publications[content_id] and handle.worker.alive:
            return self.has_left(handle, content_id) in (None, leaver)
        is_it = content is not None and content.version.content_id == content_id and handle.worker.alive
        is_it = is_it and self.has_left(handle, content_id) in (None, leaver) and not self.is_spoilt(handle, content_id)
        return is_it and content is not None and handle.worker.owner.is_complete(handle.id, content.generation)

    def _seems_to_hold(self, handle: Handle, content_id: str, since: float) -> bool:
        """Whether it holds that as far as anybody could know who lets others go: its user may have overwritten it without
        anybody's notice, or it was lost so late that its lease may have counted.
        """
        content = handle.member.content
        unnoticed = content is not None and content.version.content_id == content_id and not content.spoiled
        unnoticed = unnoticed and self.is_spoilt(handle, content_id) and handle.worker.alive
        unnoticed = unnoticed and self.has_left(handle, content_id) is None
        return unnoticed or self._holds(handle, content_id) or self._lost_since(handle, content_id, since)

    def lost(self, handle: Handle) -> None:
        """What it held is lost, without anybody's leave."""
        content = handle.member.content
        for content_id in (handle.last_held, content.version.content_id if content is not None else ""):
            self._lost[handle.id, content_id] = self._cluster.now

    def _lost_since(self, handle: Handle, content_id: str, when: float) -> bool:
        """Whether that was lost there so late that its lease may have counted."""
        return self._lost.get((handle.id, content_id), float("-inf")) >= when - self._cluster.options.lease_s

    # -- what holds between any two steps

    def check_handle(self, handle: Handle) -> None:
        """Everything about one registration."""
        if not handle.worker.alive:
            return
        handle.member.check_invariants()
        self.check_content(handle)
        if handle.idle and handle.member.state in (HandleState.EMPTY, HandleState.TORN, HandleState.CLOSED):
            self.check_closed(handle)
        self.check_known(handle)
        if handle.pull is not None:
            handle.pull.books.check_invariants()
        demand(len(handle.todo) <= TODO_MAX, f"G10: {handle} has {len(handle.todo)} actions to carry out")

    def check_in_time(self, handle: Handle) -> None:
        """G10: a call ends at its deadline, also where nobody can be told. (A process that is stopped ends nothing; what was
        staged and is committed is put in place; and what was given up is fenced, which waits for the owner's own accesses.)
        """
        asked, worker = handle.asked, handle.worker
        if asked is None or asked.done or (asked.committed and isinstance(asked.what, FillCall) and asked.what.staged):
            return
        if handle.access is not None and handle.fencing_since is not None:
            return
        late_s = self._cluster.now - max(asked.until, worker.stopped_until)
        running = handle.member.running
        demand(late_s <= LATE_S_MAX, f"G10: {handle}: {asked.what} should have ended {late_s:.1f} s ago: {running}")

    def check_known(self, handle: Handle) -> None:
        """R4, R8: what the coordinator counts on, its owner knows."""
        member, content = self._cluster.coordinator.cluster.members.get(handle.id), handle.member.content
        holding = member.holding if member is not None else None
        if content is None or holding is None or holding.generation != content.generation:
            return
        if handle.member.state in HOLDING:
            same = holding.version.info.content_id == content.version.content_id
            demand(same, f"R2: {handle} holds {content.version}, and is thought to hold {holding.version.info}")
        counted = holding.told and holding.kept and handle.member.state in HOLDING
        demand(content.retained or not counted, f"R4: {handle} does not know that it has to stay, and is counted on")

    def check_told(self, message: Done) -> None:
        """R2, R4: when `retain` and `pin` return, that is durable, and every holder knows."""
        request, models = message.request, self._cluster.coordinator.cluster.models
        demand(request not in self._undone, f"R4: {message} is said, and {self._undone.get(request)} is not durable")
        if request in self.pin_wishes:
            model, number = self.pin_wishes[request]
            numbers = [number]
        elif request in self.wishes:
            model, latest = self.wishes[request]
            visible = [v.number for v in models[model].versions.values() if v.visible] if model in models else []
            numbers = sorted(visible, reverse=True)[:latest]
        else:
            return
        versions = models[model].versions if model in models else {}
        for version in [versions[number] for number in numbers if number in versions]:
            for holding in [h for holdings in version.holdings.values() for h in holdings if h.told]:
                handle = self._cluster.by_registration.get(holding.member.registration)
                content = handle.member.content if handle is not None and handle.worker.alive else None
                if content is not None and content.generation == holding.generation:
                    demand(content.retained, f"R4: {handle} has to stay, and does not know it when {message} is said")

    def check_content(self, handle: Handle) -> None:
        """G1: who holds a version holds its publisher's bytes."""
        content = handle.member.content
        if content is not None and handle.member.state in HOLDING:
            handle.last_held = content.version.content_id
            self._check_cells(handle, content.version)

    def _check_cells(self, handle: Handle, version: VersionInfo) -> None:
        if self.is_spoilt(handle, version.content_id):
            return
        truth, cells = self.truth[version.content_id][handle.shard.number], tuple(handle.cells)
        if cells == truth:
            return
        wrong = [n for n, cell in enumerate(cells) if cell != truth[n] and n not in handle.unwanted]
        for chunk in [chunk for chunk in wrong if handle.was_written(chunk)]:
            self.spoil(handle, version.content_id, chunk, cells[chunk])
            wrong.remove(chunk)
        demand(len(cells) == len(truth) and not wrong, f"G1: {handle} holds {[*cells]}, published was {truth}")

    def check_closed(self, handle: Handle) -> None:
        """G2: nobody can begin to read memory that is its owner's to write. (What a broken fill has left in host memory, or
        was set aside, is not: its own worker may read it, under a generation that nobody else knows.)
        """
        if handle.shard.medium is Medium.HOST and handle.member.state in (HandleState.TORN, HandleState.EMPTY):
            return
        held = handle.worker.owner._holdings.get(handle.id)
        demand(held is None or not held.is_open, f"G2: {handle} can still be read under {held}")
