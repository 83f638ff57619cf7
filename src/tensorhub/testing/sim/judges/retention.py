"""Which ranks were let go, and whether retained versions had other holders then (R4, R5, G5).

Responsible for each rank that leaves. The reference model knows which versions callers have
retained. The coordinator's own books are used as little as may be.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub.coordinator import Entry, Pinned, Retention, Rollback
from tensorhub.coordinator.entities import Holding, Member
from tensorhub.coordinator.states import ReplicaState
from tensorhub.messages import Done
from tensorhub.testing.sim.assertion import CUT_OFF_LEASES, HOLDING, demand
from tensorhub.testing.sim.judges.archives import ArchiveJudge
from tensorhub.testing.sim.judges.call_history import CallHistory
from tensorhub.testing.sim.judges.contents import Contents
from tensorhub.testing.sim.judges.ports import JudgedCall, JudgedHandle, JudgedWorld
from tensorhub.testing.sim.judges.reference_model import Pinning, Retaining
from tensorhub.testing.sim.layouts import is_of_other_layout
from tensorhub.types import Medium, Purpose, VersionInfo, host_group
from tensorhub.worker.calls import CloseCall, UnpublishCall


class RetentionJudge:
    """Whether what must stay in one cluster does."""

    def __init__(
        self,
        world: JudgedWorld,
        contents: Contents,
        history: CallHistory,
        archived: ArchiveJudge,
    ) -> None:
        self._world = world
        self._archived = archived
        self._contents = contents
        self._history = history
        # by request: what has to be durable before it returns
        self._undone: dict[int, Retention | str] = {}
        # By group and content: the first rank that was let go, and when; its replica serves no
        # more.
        self._leaving: dict[tuple[str, str], tuple[JudgedHandle, float]] = {}
        # ranks that serve again, in a newer replica
        self._stayed: dict[tuple[str, str], set[JudgedHandle]] = {}
        # when which registration has lost which content without leave
        self._lost: dict[tuple[str, str], float] = {}
        # By group and content: the rank that gave it up as its lease was over, without a leave, and
        # when.
        self._given_up: dict[tuple[str, str], tuple[JudgedHandle, float]] = {}
        # host copies that end with their handles, which were closed with `abandon`: without a leave
        self._abandoned: set[JudgedHandle] = set()

    def asks(self, request: int, what: Retention | str) -> None:
        """A request that must be durable before its answer: a `retain`, or the name of a pin or of
        a rollback.
        """
        if not any(
            isinstance(entry, Rollback) and entry.ident == what for entry in self._world.store
        ):
            self._undone[request] = what

    def stored(self, entry: Entry) -> None:
        """It is durable now."""
        match entry:
            case Retention():
                done: Retention | str = entry
            case Pinned():
                done = entry.pin
            case Rollback():
                done = entry.ident
            case _:
                return
        self._undone = {request: what for request, what in self._undone.items() if what != done}

    def _must_stay(self, handle: JudgedHandle, content_id: str) -> bool:
        """Whether that has had to stay ever since this handle's call began (G5)."""
        record = handle.last_call
        return record is not None and content_id in self._history.must_stay(
            handle.shard.model, record.judged
        )

    # -- leaves

    def filling(self, handle: JudgedHandle, version: VersionInfo) -> None:
        """Its group begins a new replica of that version."""
        self._leaving.pop((handle.shard.group, version.content_id), None)
        self._given_up.pop((handle.shard.group, version.content_id), None)

    def stays(self, handle: JudgedHandle, content_id: str) -> None:
        """The coordinator is told again that the handle holds that content, and keeps it: a rank
        that was let go may not have been fenced in time. It serves again, with its whole replica if
        that does, or alone in a new one (the former has ended).
        """
        key, known = (
            (handle.shard.group, content_id),
            self._world.core_of(handle.worker).cluster.members.get(handle.id),
        )
        holding = known.holding if known is not None else None
        if handle.last_call is not None and holding is not None:
            handle.last_call.granted_at = 0.0
        if key not in self._leaving or holding is None or not holding.is_source:
            return  # it stays in a replica that another rank has left
        if holding.replica.state is ReplicaState.READY:
            del self._leaving[key]
        else:
            self._stayed[key].add(handle)

    def let_go(self, handle: JudgedHandle) -> None:
        """The coordinator lets this rank go: its replica stops to serve with the first that
        leaves.
        """
        content, record = handle.member.content, handle.last_call
        if (
            content is not None
            and record is not None
            and self.has_left(handle, content.version.content_id) is None
        ):
            key = handle.shard.group, content.version.content_id
            self._leaving[key] = handle, record.granted_at
            members = self._world.core_of(handle.worker).cluster.members
            mates = [mate for mate in self._world.mates(handle) if mate.id in members]
            self._stayed[key] = {
                mate
                for mate in mates
                if self._serves_alone(members[mate.id], content.version.content_id)
            }

    @staticmethod
    def _serves_alone(known: Member, content_id: str) -> bool:
        """Whether it serves that without its mates. A replica that a new coordinator has not put
        together again serves piece by piece, as a replica that is being filled. And a rank that
        fills that now is in a new replica once the fill is decided.
        """
        bound = known.part.operation.version if known.part is not None else None
        fills = bound is not None and bound.info.content_id == content_id
        return fills or (
            known.holding is not None and known.holding.replica.state is ReplicaState.FILLING
        )

    def has_left(self, handle: JudgedHandle, content_id: str) -> JudgedHandle | None:
        """The rank that was let go first, so that the replica of this rank serves no more. A
        replica that a worker announces to a coordinator that did not know it is a new replica.
        """
        key = handle.shard.group, content_id
        first, when = self._leaving.get(key, (None, 0.0))
        serves = when < handle.worker.known_since or handle in self._stayed.get(key, ())
        return None if serves else first

    def refused(self, handle: JudgedHandle) -> None:
        """Its leave has ended with an error: it stays. A coordinator that has let it go and that
        cannot be reached hears so later, see `stays`: until then its mates serve no more.
        """
        left, record = (handle.shard.group, handle.last_held), handle.last_call
        if not handle.worker.is_online and record is not None and record.granted_at > 0:
            self._leaving.setdefault(left, (handle, record.granted_at))
            self._stayed.setdefault(left, set())
        elif left in self._leaving and self._leaving[left][0] is handle:
            del self._leaving[left]

    def granted(self, handle: JudgedHandle) -> None:
        """The coordinator is about to say that this rank may go; with a `close` its process may end
        from then on.
        """
        record, content = handle.last_call, handle.member.content
        if record is None or content is None or not content.version.content_id:
            return  # (without an id: an answer to what it has asked before it voted for that)
        content_id, record.granted_at = content.version.content_id, self._world.now
        goes = any(self._is_let_go(mate, content_id) for mate in self._world.mates(handle))
        record.follows = goes or self._goes_before(handle, content_id)
        if record.follows:
            return  # its replica does not serve any more, whichever rank hears it first
        # A copy that the coordinator drops goes alone: its process ends only after the leaves of
        # what its users hold there, each of which is judged.
        known = self._world.core_of(handle.worker).cluster.members.get(handle.id)
        is_dropped = known is not None and known.dropped
        is_close = isinstance(record.what, CloseCall) and not is_dropped
        if is_close and self._is_whole(handle, record, content_id):
            # a copy of one shard; its worker's others ask for themselves
            is_one = handle.shard.purpose is Purpose.RETENTION
            alone = self._lacks(handle, record, elsewhere=True)
            alone = [shard for shard in alone if shard == handle.shard.number or not is_one]
            record.alone = next(iter(alone), None)

    def _goes_before(self, handle: JudgedHandle, content_id: str) -> bool:
        """Whether a mate's leave is decided, and waits for the mate's readers. (It is judged when
        the readers are gone.)
        """
        model = self._world.core_of(handle.worker).cluster.models[handle.shard.model]
        begun = (each.holding for each in model.withdrawals.values() if each.begun)
        mates = (
            held
            for held in begun
            if held.member.group.name == handle.shard.group
            and held.member.rank != handle.shard.rank
        )
        return any(held.version.info.content_id == content_id for held in mates)

    @staticmethod
    def _is_let_go(handle: JudgedHandle, content_id: str) -> bool:
        """Whether the coordinator has said that it may go, and it has not stayed."""
        content, record = handle.member.content, handle.last_call
        holds = content is not None and content.version.content_id == content_id
        return holds and record is not None and not record.done and record.granted_at > 0

    def _may_be_on_its_way(self, handle: JudgedHandle, content_id: str) -> bool:
        """Whether it has asked for its leave when every holder was free to give that content up."""
        content, record = handle.member.content, handle.last_call
        holds = content is not None and content.version.content_id == content_id
        return (
            holds
            and _asks_to_leave(handle)
            and record is not None
            and not self._must_stay(handle, content_id)
        )

    def fenced(self, handle: JudgedHandle, generation: int) -> None:
        """No reader reads that memory any more: other holders must have a version that must stay
        (G5).
        """
        content, record, model = handle.member.content, handle.last_call, handle.shard.model
        held = (
            content is not None
            and content.generation == generation
            and handle.member.state in HOLDING
        )
        unasked = record is None or self.is_abandoned(handle) or not record.granted
        if content is None or record is None or not held or unasked:
            if content is not None and held and _asks_to_leave(handle):
                self._given_up[handle.shard.group, content.version.content_id] = (
                    handle,
                    self._world.now,
                )
            self.lost(handle)  # not by its owner's own wish, or without a leave
            return
        content_id = content.version.content_id
        cluster = self._world.core_of(handle.worker).cluster
        if not self._must_stay(handle, content_id) or self._world.is_recording_rollback(model):
            return
        if handle.id not in cluster.members and not cluster.is_recovering:
            # its worker was taken for lost before it heard that it may go: all that it held was
            # lost then
            return
        if self._contents.is_spoilt(handle, content_id) or any(
            self.is_abandoned(mate) for mate in self._world.mates(handle)
        ):
            return  # it is spoiled, or a rank of its replica abandons it
        if (
            record.follows
            or self.has_left(handle, content_id) not in (None, handle)
            or self._is_left(handle, content_id)
        ):
            return  # its replica did not serve any more
        if any(self._may_be_on_its_way(mate, content_id) for mate in self._world.mates(handle)):
            # nor does it, if that mate's leave was granted: its readers are waited for before it
            # hears of that
            return
        if not self._is_reliable(handle) or not self._is_whole(handle, record, content_id):
            return  # it does not count, or the version was lost before
        lacks = self._lacks(handle, record, elsewhere=False)
        lacks += [record.alone] if record.alone is not None else []  # when its process could end
        demand(
            not lacks,
            "retention: {} has left with {}, and no other holds the shards {} of {}",
            handle,
            record.what,
            lacks,
            content.version,
        )

    def _is_left(self, handle: JudgedHandle, content_id: str) -> bool:
        """Whether a mate has given that up without a leave, and says so, since it is back: the
        replica serves no more. (What a worker announces to a coordinator that did not know it is a
        new replica.)
        """
        mate, when = self._given_up.get((handle.shard.group, content_id), (handle, 0.0))
        return mate is not handle and mate.worker.is_online and when >= handle.worker.known_since

    def closed(self, handle: JudgedHandle) -> None:
        """It is closed. With `abandon` its host copy ends, too, and asks for no leave (R5)."""
        shard = handle.shard
        place = shard.model, host_group(shard.group), shard.rank
        if abandons(handle):
            self._abandoned.update(
                h
                for h in handle.worker.handles
                if (h.shard.model, h.shard.group, h.shard.rank) == place
            )

    def is_abandoned(self, handle: JudgedHandle) -> bool:
        """Whether its user gives it up, whatever becomes of what it holds."""
        return abandons(handle) or handle in self._abandoned

    def lost(self, handle: JudgedHandle) -> None:
        """The handle's content is lost, without leave."""
        content = handle.member.content
        for content_id in (
            handle.last_held,
            content.version.content_id if content is not None else "",
        ):
            self._lost[handle.id, content_id] = self._world.now

    # -- holders

    def _is_whole(self, handle: JudgedHandle, record: JudgedCall, content_id: str) -> bool:
        """Whether this handle holds it as it was published, and every shard of it surely has a
        reliable holder.
        """
        if not is_as_published(handle):
            return False
        holders = (h for h in self._world.all_handles() if h.shard.serves and is_as_published(h))
        holders = (
            h
            for h in holders
            if h is handle or self._surely_holds(h, content_id, record.began, handle)
        )
        holders = (
            h for h in holders if not any(map(self.is_abandoned, (h, *self._world.mates(h))))
        )
        return not self._missing(content_id, filter(self._is_reliable, holders))

    def _lacks(self, handle: JudgedHandle, record: JudgedCall, *, elsewhere: bool) -> list[int]:
        """The published shards of this handle's content that no second group keeps. `elsewhere`: in
        another process.
        """
        assert handle.member.content is not None
        content_id, holders = handle.member.content.version.content_id, list[JudgedHandle]()
        for h in self._world.all_handles():
            is_other = h.shard.group != handle.shard.group and not (
                elsewhere and h.worker is handle.worker
            )
            if (
                is_other
                and h.shard.serves
                and self._is_reliable(h)
                and self._seems_to_hold(h, content_id, record.began)
            ):
                holders.append(h)
        return self._missing(content_id, filter(is_as_published, holders))

    def _missing(self, content_id: str, holders: Iterable[JudgedHandle]) -> list[int]:
        """The published shards that none of these holds."""
        there = {h.shard.number for h in holders}
        return [shard for shard in self._contents.truth[content_id] if shard not in there]

    def _is_reliable(self, handle: JudgedHandle) -> bool:
        """Whether it counts for retention: no rank of its group is spot; nor, for a host copy,
        anything of its worker that the coordinator has heard of.
        """
        group, is_copy = handle.shard.group, handle.shard.medium is Medium.HOST
        known = self._world.core_of(handle.worker).cluster.members
        # the newest of each
        ranks = {h.shard.rank: h for h in self._world.all_handles() if h.shard.group == group}
        open_ = [h for h in handle.worker.handles if h.shard.serves and h.id in known]
        return not any(h.shard.spot for h in [*ranks.values(), *(open_ if is_copy else ())])

    def _surely_holds(
        self, handle: JudgedHandle, content_id: str, since: float, leaver: JudgedHandle
    ) -> bool:
        """Whether the coordinator knew that it holds that when `leaver` was let go: it was told so,
        and its worker has had its lease all the time. (Content that is only filled, or published
        without a word of it, may be given up yet. And a worker that was lost says over each handle
        alone that it is back, so one handle may leave before the rest is known.)
        """
        worker = handle.worker
        cluster = self._world.core_of(leaver.worker).cluster
        sure = worker.unsure_at < since and handle.id in cluster.members
        if (
            _asks_to_leave(handle)
            and handle.last_call is not None
            and handle.last_call.began < leaver.worker.known_since
        ):
            # while `leaver` was lost every holder was free to give that up: it goes, and may not
            # know yet
            return False
        model = cluster.models.get(handle.shard.model)  # a new coordinator may know nothing of it
        leave = model.withdrawals.get(handle.id) if model is not None else None
        if self._is_let_go(handle, content_id) or (leave is not None and leave.begun):
            return False  # it goes, and is judged itself
        holds = handle.member.state in HOLDING and self._holds(handle, content_id, leaver)
        return sure and holds and not self._is_left(handle, content_id)

    def _holds(
        self, handle: JudgedHandle, content_id: str, leaver: JudgedHandle | None = None
    ) -> bool:
        """Whether all of it can be read there: held, or filled and voted for, or published without
        having heard so; or staged, from where it comes into place by itself. `leaver`: also if that
        one has ended its replica.
        """
        content, record, staged = handle.member.content, handle.last_call, handle.member.staged
        if staged is not None and staged.version.content_id == content_id and handle.worker.alive:
            return True
        if (
            record is not None
            and not record.done
            and record.key == self._contents.publications[content_id]
            and handle.worker.alive
        ):
            return self.has_left(handle, content_id) in (None, leaver)
        is_it = (
            content is not None and content.version.content_id == content_id and handle.worker.alive
        )
        is_it = (
            is_it
            and self.has_left(handle, content_id) in (None, leaver)
            and not self._contents.is_spoilt(handle, content_id)
        )
        return (
            is_it
            and content is not None
            and (
                handle.worker.owner.is_complete(handle.id, content.generation)
                or self._archived.has(handle, content_id)
            )
        )

    def _seems_to_hold(self, handle: JudgedHandle, content_id: str, since: float) -> bool:
        """Whether it holds that as far as the coordinator could know: its user may have overwritten
        the memory unnoticed, or it was lost so late that its lease may have counted.
        """
        content = handle.member.content
        unnoticed = (
            content is not None and content.version.content_id == content_id and not content.spoiled
        )
        unnoticed = (
            unnoticed and self._contents.is_spoilt(handle, content_id) and handle.worker.alive
        )
        unnoticed = unnoticed and self.has_left(handle, content_id) is None
        return (
            unnoticed
            or self._holds(handle, content_id)
            or self._lost_since(handle, content_id, since)
        )

    def _lost_since(self, handle: JudgedHandle, content_id: str, when: float) -> bool:
        """Whether that was lost there so late that its lease may have counted."""
        return (
            self._lost.get((handle.id, content_id), float("-inf"))
            >= when - self._world.options.lease_s
        )

    # -- what is said

    def check_known(self, handle: JudgedHandle) -> None:
        """R4, R8: what the coordinator counts on, its owner knows."""
        member, content = (
            self._world.core_of(handle.worker).cluster.members.get(handle.id),
            handle.member.content,
        )
        holding = member.holding if member is not None else None
        if holding is not None:
            self._check_counted(handle, holding)
        if content is None or holding is None or holding.generation != content.generation:
            return
        if handle.member.state not in HOLDING:
            return
        thought = holding.version.info
        demand(
            thought.content_id == content.version.content_id,
            "durable mark: {} holds {}, and is thought to hold {}",
            handle,
            content.version,
            thought,
        )
        demand(
            content.retained or not holding.member.keeps,
            "leaving: {} does not know that it has to stay, and is counted on",
            handle,
        )

    def _check_counted(self, handle: JudgedHandle, holding: Holding) -> None:
        """R4: an owner that is cut off may give its content up when its lease is over; until then,
        and no longer, a second holder may leave because the owner holds the content.
        """
        worker, core = handle.worker, self._world.core_of(handle.worker)
        cluster = core.cluster
        if worker.is_online or cluster.members[handle.id].worker.incarnation != worker.incarnation:
            return
        free_at = worker.when(worker.cut_off_at + CUT_OFF_LEASES * self._world.options.lease_s)
        counted = holding.version.retained and core._retentions.is_reliable(holding)
        demand(
            # `cluster.now`: when it could last grant a leave, by its clock
            cluster.now / self._world.clock_rate < free_at or not counted,
            "leaving: {} is counted on, was cut off at {:.3f}, may have gone since {:.3f}",
            handle,
            worker.when(worker.cut_off_at),
            free_at,
        )

    def check_told(self, message: Done) -> None:
        """R2, R4: when `retain` and `pin` return, that is durable, and every holder knows."""
        request, models = message.request, self._world.coordinator.cluster.models
        demand(
            request not in self._undone,
            "leaving: {} is said, and {} is not durable",
            message,
            self._undone.get(request),
        )
        model, call = self._history.questions.get(request, ("", None))
        if isinstance(call, Pinning) and request in self._history.new_pins:
            numbers = [call.number]
        elif isinstance(call, Retaining):
            visible = (
                [v.number for v in models[model].versions.values() if v.visible]
                if model in models
                else []
            )
            numbers = sorted(visible, reverse=True)[: call.latest]
        else:
            return
        versions = models[model].versions if model in models else {}
        for version in [versions[number] for number in numbers if number in versions]:
            held = (h for layout in version.layouts for there in layout.values() for h in there)
            for holding in [h for h in held if h.told]:
                handle = self._world.handle_of(holding.member.registration)
                content = (
                    handle.member.content if handle is not None and handle.worker.alive else None
                )
                # A fill that was committed in this very step hears of the notice with its Outcome.
                if handle is None or handle.member.state not in HOLDING:
                    continue
                if content is not None and content.generation == holding.generation:
                    demand(
                        content.retained,
                        "leaving: {} has to stay, and does not know it when {} is said",
                        handle,
                        message,
                    )


def is_as_published(handle: JudgedHandle) -> bool:
    """Whether it holds what it holds, or held last, in the published layout."""
    content, staged = handle.member.content, handle.member.staged
    manifest = (
        content.manifest
        if content is not None
        else staged.manifest
        if staged is not None
        else handle.grid
    )
    return not is_of_other_layout(manifest)


def _asks_to_leave(handle: JudgedHandle) -> bool:
    """Whether it waits for the word that it may go."""
    return (
        handle.last_call is not None
        and not handle.last_call.done
        and isinstance(handle.last_call.what, UnpublishCall | CloseCall)
    )


def abandons(handle: JudgedHandle) -> bool:
    """Whether its user closes it, whatever becomes of what it holds."""
    return (
        handle.last_call is not None
        and isinstance(handle.last_call.what, CloseCall)
        and handle.last_call.what.abandon
    )
