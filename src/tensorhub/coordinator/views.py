"""Answers to questions that every peer may ask, joined or not: Describe, GetManifest, GetPart,
GetPublication, Check, CheckStamp.

The answers change nothing. (The description of a publication is made when it is first asked for,
and kept with the version.)

`describe` tells a large model in parts, by the names of its workers. Each part has a bounded number
of rows, and a part costs as much as its rows, however large the model is. (Only to find the next
workers, each part looks at all registrations of the model.) The counts of a model are made when
they are asked for, in one pass over the groups of the model: they cost nothing until then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, nlargest, nsmallest

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import (
    Holding,
    Member,
    Model,
    Operation,
    RankPart,
    ReadLease,
    Replica,
    Version,
    Worker,
)
from tensorhub.coordinator.refusals import held_text
from tensorhub.coordinator.states import OperationState, PartState, ReplicaState, WorkerState
from tensorhub.coordinator.versions import Versions
from tensorhub.coordinator.waiting import reads_across
from tensorhub.errors import IntegrityError, VersionUnavailable
from tensorhub.flows.what_if import COMPARED_MAX, helping
from tensorhub.messages import (
    Check,
    CheckStamp,
    Describe,
    Description,
    Events,
    Explain,
    Explained,
    GetEvents,
    GetManifest,
    GetPart,
    GetPublication,
    GetUpdates,
    ManifestReply,
    PublicationReply,
    Updates,
    VersionReply,
)
from tensorhub.observed import Explanation
from tensorhub.types import (
    AVAILABLE,
    MISSING_TOLD_MAX,
    CallsSummary,
    LayoutSummary,
    LeaseView,
    ModelInfo,
    ModelSummary,
    OpKind,
    ReplicaView,
    Selector,
    ShardView,
    SilentWorker,
    VersionSummary,
    VersionView,
    WorkerView,
)


def explained(
    cluster: Cluster, now: float, model: str, version: int | None, group: str | None
) -> Explanation:
    """Of the newest update that fits, with what would have helped. Raises VersionUnavailable."""
    found = cluster.observations.explanation(now, model, version, group)
    others = cluster.observations.committed(now, model, COMPARED_MAX)
    sites = {worker.name: worker.location.site for worker in cluster.workers.values()}
    return replace(found, help=helping(found, others, sites))


@dataclass(eq=False, repr=False)
class Answers:
    """Each is sent to the session that asked."""

    _cluster: Cluster
    _versions: Versions

    def describe(self, session: int, message: Describe) -> None:
        """One model, or a part of it, or a page of all."""
        if message.model is None:
            models, more, is_cut = page(self._cluster, message.after, message.workers_max)
            self._cluster.send(session, Description(message.request, models, more, is_cut))
            return
        model = self._model(session, message, message.model)
        if model is None:
            return
        if message.version is not None and message.version not in model.versions:
            error = VersionUnavailable(
                f"version {message.version} of {model.name!r} is not known here; {held_text(model)}"
            )
            self._cluster.answer(session, message.request, error)
            return
        after = None if message.after is None else (message.after, message.incarnation)
        found, is_cut = describe(
            model, self._cluster.now, message.version, after, message.workers_max
        )
        self._cluster.send(session, Description(message.request, (found,), is_cut=is_cut))

    def _model(
        self, session: int, message: Describe | GetPublication | CheckStamp, name: str
    ) -> Model | None:
        """The model of this name; if there is none, the asker hears which ones there are."""
        model = self._cluster.models.get(name)
        if model is None:
            known = ", ".join(self._cluster.model_names[:20]) or "none yet"
            error = VersionUnavailable(f"no model {name!r} is known here; known models: {known}")
            self._cluster.answer(session, message.request, error)
        return model

    def manifest(self, session: int, message: GetManifest) -> None:
        """That of one shard of a content."""
        model = self._cluster.models.get(message.model)
        for version in model.versions.values() if model is not None else ():
            if version.info.content_id == message.content_id and message.shard in version.manifests:
                self._cluster.send(
                    session, ManifestReply(message.request, version.manifests[message.shard])
                )
                return
        error = VersionUnavailable(
            f"shard {message.shard} of {message.model!r} in that version is not known: since the "
            f"coordinator began, no worker that holds it has come; the next version ends that"
        )
        self._cluster.answer(session, message.request, error)

    def part(self, session: int, message: GetPart) -> None:
        """The part of a layout that is kept under that id."""
        blob = self._cluster.manifests.find(message.part_id)
        if blob is None:
            error = VersionUnavailable(
                "that part of a layout is not known, or not any more: no worker holds its version"
            )
            self._cluster.answer(session, message.request, error)
        else:
            self._cluster.send(session, ManifestReply(message.request, blob))

    def publication(self, session: int, message: GetPublication) -> None:
        """The description of the version that a selector means now."""
        model = self._model(session, message, message.model)
        if model is None:
            return
        try:
            version = self._resolved(model, message.selector)
        except VersionUnavailable as error:
            self._cluster.answer(session, message.request, error)
            return
        blob = self._cluster.manifests.find(self._cluster.describe(version, version.holdings))
        assert blob is not None
        self._cluster.send(
            session, PublicationReply(message.request, version.info, version.layout_id, blob)
        )

    def events(self, session: int, message: GetEvents) -> None:
        """A page of what has happened since."""
        seen = self._cluster.observations
        page, more = seen.events_after(message.after)
        following = page[-1].number if page else seen.last_event
        about = following, self._cluster.epoch, more, seen.clock(self._cluster.now)
        self._cluster.send(session, Events(message.request, page, *about))

    def explain(self, session: int, message: Explain) -> None:
        """Where the seconds of an update went."""
        try:
            found = explained(
                self._cluster, self._cluster.now, message.model, message.version, message.group
            )
        except VersionUnavailable as error:
            self._cluster.answer(session, message.request, error)
        else:
            self._cluster.send(session, Explained(message.request, found))

    def updates(self, session: int, message: GetUpdates) -> None:
        """Which updates ran lately."""
        rows = self._cluster.observations.updates(self._cluster.now, message.model)
        self._cluster.send(session, Updates(message.request, rows))

    def _resolved(self, model: Model, selector: Selector) -> Version:
        """A version that can be described. VersionUnavailable: there is none that the selector
        means now.
        """
        version = (
            next((v for v in model.visible if v.copies or self._is_of_classes(v)), None)
            if selector == AVAILABLE
            else self._versions.resolve(model, selector, None)
        )
        if version is None:
            raise VersionUnavailable(
                self._versions.waiting_text(model, selector, None), retryable=True
            )
        if not version.holdings.is_described:
            text = (
                f"no worker that is here now has said what is in version {version.number} of "
                f"{model.name!r}"
            )
            raise VersionUnavailable(f"{text}; {held_text(model)}", retryable=True)
        return version

    @staticmethod
    def _is_of_classes(version: Version) -> bool:
        """Whether each class of shards can be read, though perhaps not each shard."""
        return version.holdings.is_described and version.holdings.can_each_class_be_read()

    def check(self, session: int, message: Check) -> None:
        """Whether a number can still be published."""
        # Not `conflict`: another rank of the asker's own group may be publishing this very number.
        model = self._cluster.models.get(message.model)
        conflict = self._versions.overtaken(model, message.version) if model is not None else None
        self._cluster.answer(session, message.request, conflict)

    def check_stamp(self, session: int, message: CheckStamp) -> None:
        """Whether the content of a stamp was published as its version."""
        model = self._model(session, message, message.model)
        if model is None:
            return
        version = model.versions.get(message.version)
        info = model.history.forgotten.get(message.version)
        if version is not None:
            info = version.info if version.visible else None
        name = f"version {message.version} of {message.model!r}"
        if info is None or info.lineage != message.lineage:
            its = "" if info is None else f" (it knows one of lineage {info.lineage})"
            text = (
                f"{name} in lineage {message.lineage} is not known here{its}: it was never "
                f"published, is forgotten, or was rolled back; an archive of the model may have it"
            )
            self._cluster.answer(session, message.request, VersionUnavailable(text))
        elif info.content_id != message.content_id:
            text = (
                f"{name} is another content than the stamp's, which is another cluster's, or was "
                f"changed"
            )
            self._cluster.answer(session, message.request, IntegrityError(text))
        elif version is not None and not self._may_be_root(version, message.root):
            text = f"no shard of {name} has digests of the stamp's root: the stamp was changed"
            self._cluster.answer(session, message.request, IntegrityError(text))
        else:
            self._cluster.send(session, VersionReply(message.request, info))

    @staticmethod
    def _may_be_root(version: Version, root: bytes) -> bool:
        """Whether a shard has digests of that root, as far as is known. Empty: it is not said."""
        known = [each.root for each in version.testimonies.values() if each.root]
        return not root or root in known or len(known) < version.info.world_size


Waiting = tuple[str, str, float, str]  # a call, what it waits for, since when, its caller


def summarize(model: Model, now: float) -> tuple[ModelSummary, dict[int, VersionSummary]]:
    """Its workers, the calls that are under way, and the replicas of its newest versions, by
    number.
    """
    workers = {
        m.worker.incarnation: m.worker for g in model.groups.values() for m in g.members.values()
    }
    suspects = [worker for worker in workers.values() if worker.state is not WorkerState.LIVE]
    replicas: dict[Version, _Replicas] = {
        version: _Replicas() for version in model.versions.values()
    }
    for group in model.serving.values():
        for replica in group.replicas:
            if replica.version not in replicas:
                replicas[replica.version] = _Replicas()
            replicas[replica.version].add(replica)
    summary = ModelSummary(
        workers=len(workers),
        suspect=len(suspects),
        groups=len(model.groups),
        shards=sum(each.shards for each in replicas.values()),
        reads=len(model.leases),
        versions_known=len(model.versions),
        calls=_calls(_waiting(model), now),
        silent=tuple(
            SilentWorker(worker.name, worker.incarnation, max(0.0, now - worker.heard_at))
            for worker in nsmallest(
                limits.SUMMARIZED_SILENT_MAX, suspects, key=lambda worker: worker.heard_at
            )
        ),
    )
    newest = nlargest(
        limits.SUMMARIZED_VERSIONS_MAX, model.versions.values(), key=lambda version: version.number
    )
    return summary, {version.number: replicas[version].summary(version) for version in newest}


@dataclass(slots=True)
class _Replicas:
    """The replicas of one version, counted."""

    states: list[ReplicaState] = field(default_factory=list)  # of each
    # those of which memory is left
    by_layout: dict[str, list[Replica]] = field(default_factory=dict)
    shards: int = 0
    doubtful: int = 0
    quarantined: int = 0
    readers: int = 0

    def add(self, replica: Replica) -> None:
        self.states.append(replica.state)
        for layout_id in {holding.layout.layout_id for holding in replica.holdings.values()}:
            self.by_layout.setdefault(layout_id, []).append(replica)
        for holding in replica.holdings.values():
            self.shards += 1
            self.readers += holding.traffic.active_readers
            if holding.trust.quarantined:
                self.quarantined += 1
            elif holding.member.worker.state is not WorkerState.LIVE:
                self.doubtful += 1

    def summary(self, version: Version) -> VersionSummary:
        return VersionSummary(
            copies=version.copies,
            ready=self.states.count(ReplicaState.READY),
            filling=self.states.count(ReplicaState.FILLING),
            draining=self.states.count(ReplicaState.DRAINING),
            torn=self.states.count(ReplicaState.TORN),
            doubtful=self.doubtful,
            quarantined=self.quarantined,
            readers=self.readers,
            layouts_known=len(self.by_layout),
            layouts=tuple(self._layouts(version)),
            missing=len(version.holdings.missing()),
        )

    def _layouts(self, version: Version) -> Iterator[LayoutSummary]:
        """Nothing, where there is only the published one."""
        if self.by_layout.keys() <= {version.layout_id}:
            return
        in_order = sorted(
            self.by_layout.items(),
            key=lambda item: (item[0] != version.layout_id, -len(item[1]), item[0]),
        )
        for layout_id, replicas in in_order[: limits.SUMMARIZED_LAYOUTS_MAX]:
            held = [holding for replica in replicas for holding in replica.holdings.values()]
            yield LayoutSummary(
                layout_id,
                layout_id == version.layout_id,
                replicas=len(replicas),
                ready=sum(replica.state is ReplicaState.READY for replica in replicas),
                bridging=len(
                    {id(holding.member.group) for holding in held if reads_across(holding)}
                ),
                shards=len(held),
                chunks=sum(holding.chunks for holding in held),
                chunks_verified=sum(holding.chunks_verified for holding in held),
            )


def _calls(waiting: Iterable[Waiting], now: float) -> tuple[CallsSummary, ...]:
    """As many rows as there are kinds of calls and things to wait for."""
    rows: dict[tuple[str, str], tuple[int, float, str]] = {}
    for call, waits_for, since, who in waiting:
        count, longest_since, longest_who = rows.get((call, waits_for), (0, math.inf, ""))
        longest = (since, who) if since < longest_since else (longest_since, longest_who)
        rows[call, waits_for] = count + 1, *longest
    in_order = sorted(rows.items(), key=lambda item: (item[1][1], item[0]))
    return tuple(
        CallsSummary(call, waits_for, count, max(0.0, now - since), who)
        for (call, waits_for), (count, since, who) in in_order
    )


def _waiting(model: Model) -> Iterator[Waiting]:
    """The model's calls that are under way."""
    for group in model.groups.values():
        if group.operation is not None:
            waits_for, parts = _waits_for(group.operation)
            since = min((part.moved_at for part in parts), default=0.0)
            yield group.operation.kind.value, waits_for, since, group.name
    for withdrawal in model.withdrawals.values():
        waits_for = "readers" if withdrawal.begun else "successor"
        yield "leave", waits_for, withdrawal.asked_at, withdrawal.holding.member.worker.name
    for waits_for, writes in (
        ("store", model.history.rollbacks),
        ("holders", model.notices.unanswered),
    ):
        for write in writes:
            yield type(write.message).__name__.lower(), waits_for, write.asked_at, ""


def _waits_for(operation: Operation) -> tuple[str, list[RankPart]]:
    """What an undecided operation waits for, and the parts of it that do; see `CallsSummary`."""
    parts = list(operation.parts.values())
    if not operation.gathered:
        return "ranks", parts
    if operation.staying:
        return "successor", parts
    if operation.version is None:
        return "version", parts
    if operation.state is OperationState.PREPARED or operation.kind is OpKind.PUBLISH:
        return "store", parts
    if not operation.writing:
        unready = [part for part in parts if not part.ready]
        if unready:
            return "before_write", unready
        return "store" if operation.all_voted else "source", parts
    reading = [part for part in parts if part.reads]
    starving = [part for part in reading if not part.leases]
    if reading:
        return ("source", starving) if starving else ("chunks", reading)
    claiming = [part for part in parts if part.state is PartState.CLAIMING]
    return ("digests", claiming) if claiming else ("store", parts)


# among workers: a name and an incarnation; None: after all of that name
Place = tuple[str, str | None]
Found = tuple[ModelInfo, bool]  # a part of a model, and whether the rest is still to be told


def page(
    cluster: Cluster, after: str | None, workers_max: int | None = None
) -> tuple[tuple[ModelInfo, ...], bool, bool]:
    """The models after that name, as many as one answer has room for but one at least; whether
    there are more; and whether the last of them is told in part.
    """
    models, entries, counted = list[ModelInfo](), 0, 0
    for model in cluster.models_after(after):
        if entries >= limits.DESCRIBED_MAX or counted >= limits.SUMMARIZED_MAX:
            return tuple(models), True, False
        info, is_cut = describe(model, cluster.now, workers_max=workers_max)
        models.append(info)
        if is_cut:
            return tuple(models), True, True
        shards = sum(len(replica.shards) for replica in info.replicas)
        entries += (
            1
            + len(info.versions)
            + len(info.replicas)
            + shards
            + len(info.leases)
            + len(info.workers)
        )
        counted += 0 if info.summary is None else info.summary.groups + info.summary.shards
    return tuple(models), False, False


def describe(
    model: Model,
    now: float,
    version: int | None = None,
    after: Place | None = None,
    workers_max: int | None = None,
) -> Found:
    """Versions, replicas, leases and workers of one model, each in a stable order. The first part
    has the counts, too, unless it is a page of so many workers.

    With `version`, only what concerns it. Of the workers after a place, the next `workers_max`
    (None: all; 0: counts only), with what they hold and read; fewer, if there are too many rows.
    With the last worker come torn replicas of which no memory is left, and leases of lost readers.
    """
    rows = _Rows(model, version)
    is_cut = workers_max != 0 and rows.add(after, workers_max)
    counts = None if after is not None or workers_max else summarize(model, now)
    return _info(rows, counts, counts_only=workers_max == 0), is_cut


@dataclass(slots=True)
class _Rows:
    """The rows about workers."""

    model: Model
    version: int | None
    shards: dict[Replica, list[Holding]] = field(default_factory=dict)
    leases: list[ReadLease] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    def add(self, after: Place | None, workers_max: int | None) -> bool:
        """The rows of the next workers; whether there are further ones."""
        model, version = self.model, self.version
        known = _members(model)
        ahead = [(members[0].worker.name, incarnation) for incarnation, members in known.items()]
        if after is not None:
            ahead = [
                place
                for place in ahead
                if (place > after if after[1] is not None else place[0] > after[0])
            ]
        heapify(ahead)
        rows = 0
        while (
            ahead
            and rows < limits.DESCRIBED_ROWS_MAX
            and (workers_max is None or len(self.workers) < workers_max)
        ):
            members = known[heappop(ahead)[1]]
            replicas = (
                (replica, member.rank) for member in members for replica in member.group.replicas
            )
            held = [
                holding
                for replica, rank in replicas
                if (holding := replica.holdings.get(rank)) and _is_of(holding, version)
            ]
            read = [
                lease
                for m in members
                for lease in m.reads.values()
                if _is_of(lease.holding, version)
            ]
            if version is None or held or read:
                self.workers.append(members[0].worker)
                self.leases += read
                for holding in held:
                    self.shards.setdefault(holding.replica, []).append(holding)
                rows += 1 + len(held) + len(read)
        if not ahead:
            for replica in (
                replica for group in model.serving.values() for replica in group.replicas
            ):
                if not replica.holdings and version in (None, replica.version.number):
                    self.shards[replica] = []
            for lease in model.leases.values():
                reader = lease.part.member
                if reader.group.members.get(reader.rank) is not reader and _is_of(
                    lease.holding, version
                ):
                    self.leases.append(lease)
        return bool(ahead)


def _members(model: Model) -> dict[str, list[Member]]:
    """Its registrations by their workers' incarnations."""
    found: dict[str, list[Member]] = {}
    for group in model.groups.values():
        for member in group.members.values():
            found.setdefault(member.worker.incarnation, []).append(member)
    return found


def _is_of(holding: Holding, version: int | None) -> bool:
    return version is None or holding.version.number == version


def _info(
    rows: _Rows, counts: tuple[ModelSummary, dict[int, VersionSummary]] | None, *, counts_only: bool
) -> ModelInfo:
    model, retained = rows.model, rows.model.retained()
    summary, by_version = counts or (None, {})
    told = [
        number
        for number in (by_version if counts_only else model.versions)
        if rows.version in (None, number)
    ]
    versions = tuple(
        VersionView(
            version=v.number,
            content_id=v.info.content_id,
            state=v.state.value,
            nbytes=v.info.nbytes,
            world_size=v.info.world_size,
            lineage=v.lineage,
            retained=v.number in retained,
            layout_id=v.layout_id,
            missing=tuple(v.holdings.missing()[:MISSING_TOLD_MAX]),
            summary=by_version.get(v.number),
        )
        for v in (model.versions[number] for number in sorted(told))
    )
    in_order = sorted(
        rows.shards, key=lambda replica: (replica.group.name, replica.version.number, replica.id)
    )
    return ModelInfo(
        model.name,
        model.history.lineage,
        model.mark,
        model.retain,
        versions,
        tuple(_replica(replica, rows.shards[replica]) for replica in in_order),
        tuple(_lease(lease) for lease in rows.leases),
        tuple(
            WorkerView(w.name, w.incarnation, w.state.value, w.location, w.endpoints, w.release)
            for w in rows.workers
        ),
        summary,
    )


def _lease(lease: ReadLease) -> LeaseView:
    return LeaseView(
        lease=lease.id,
        reader=lease.part.member.worker.name,
        source=lease.holding.member.worker.name,
        version=lease.holding.version.number,
        rank=lease.holding.shard,
        state=lease.state.value,
        across=lease.need is not None,
        deltas=lease.flow.deltas,
    )


def _replica(replica: Replica, holdings: list[Holding]) -> ReplicaView:
    group = replica.group
    shards = tuple(
        ShardView(
            rank=holding.shard,
            worker=holding.member.worker.name,
            state=_shard_state(holding),
            chunks_verified=holding.chunks_verified,
            chunks=holding.chunks,
            readers=holding.traffic.active_readers,
        )
        for holding in sorted(holdings, key=lambda holding: holding.rank)
    )
    return ReplicaView(
        group=group.name,
        version=replica.version.number,
        state=replica.state.value,
        medium=replica.medium.value,
        purpose=replica.purpose.value,
        layout_id=next(
            (h.layout.layout_id for h in replica.holdings.values()), group.layout_id or ""
        ),
        spot=group.spot,
        shards=shards,
        replica=replica.id,
        bridging=sum(reads_across(holding) for holding in holdings),
    )


def _shard_state(holding: Holding) -> str:
    if holding.trust.quarantined:
        return "quarantined"
    if holding.member.worker.state is not WorkerState.LIVE:
        return "doubtful"
    return "complete" if holding.complete else "filling"
