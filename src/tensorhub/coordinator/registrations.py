"""What a worker registers and announces: whether that fits and has room, and which manifests have
to be asked for.

A Register or a ReadyToWrite may name a manifest by its id. If the coordinator does not know that
manifest, it asks one rank, and all other ranks wait for that answer. So a coordinator that has
restarted is told each manifest once, and not by each of a thousand workers that come back at once.
No rank is registered, or ready, while it waits: it says the message again. A rank that lacks a
manifest that another rank was asked for waits for that manifest first, so that it is asked for the
rest once.

An announcement says what a worker holds after a lost connection or a restart of the coordinator.
`Announcements` decides whether that counts, and makes a holding of it again.

Not responsible for ranks and groups (`membership`), nor for the manifests that are kept
(`layout_holdings`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, nextafter

from tensorhub.coordinator import limits, ways
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import OF_ONE_SHARD, Holding, Member, Trust, Worker
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.states import ReplicaState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import beyond_record
from tensorhub.errors import RegistrationError, TensorHubError
from tensorhub.messages import Held, ReadyAgain, ReadyToWrite, Register, RegisterAgain
from tensorhub.model.manifest import id_of
from tensorhub.types import Medium, Purpose


def misfit(cluster: Cluster, message: Register) -> TensorHubError | None:
    """Why that memory cannot be a rank of that group, if it cannot."""
    if message.rank >= message.world_size:
        return RegistrationError(
            f"rank {message.rank} does not exist in a group of {message.world_size}"
        )
    if (message.medium is Medium.HOST) == (message.purpose is Purpose.USE):
        return RegistrationError(
            f"memory of medium {message.medium} is not registered for {message.purpose}"
        )
    if message.serves and not message.manifest:
        return RegistrationError("memory that serves says with its manifest what it has")
    if len(message.part_ids) not in (0, 3):
        return RegistrationError(
            "a rank's parts are its catalogue, arrangement and coordinates: name all, or none"
        )
    is_copy = message.purpose in OF_ONE_SHARD
    any_shard = is_copy or not (message.serves or message.layout_id)
    if (message.world_size > 1 and (is_copy or not message.serves)) or not (
        any_shard or message.shard == message.rank
    ):
        return RegistrationError(
            "memory that serves holds its own rank's shard; a fetch, and a copy of one shard, is a "
            "group of its own"
        )
    model = cluster.models.get(message.model)
    group = model.groups.get(message.group) if model is not None else None
    if group is None:
        return None
    if group.world_size != message.world_size:
        return RegistrationError(
            f"group {group.name!r} of {message.model!r} has {group.world_size} ranks, not "
            f"{message.world_size}: "
            "give every rank the same world_size, or take another group name",
            retryable=True,  # its ranks may close, or be found dead
        )
    kinds = {(member.said.medium, member.said.purpose) for member in group.members.values()}
    if kinds and kinds != {(message.medium, message.purpose)}:
        return RegistrationError(
            f"group {group.name!r} is registered with other memory: all its ranks take one medium"
        )
    before = group.members.get(message.rank)
    if before is not None and before.worker.session is not None:
        return RegistrationError(
            f"rank {message.rank} of group {group.name!r} of "
            f"{message.model!r} is registered by worker "
            f"{before.worker.name!r}, which is connected: close it "
            "first, or take another group name "
            "(two sets of one model in one process need two groups)",
            retryable=True,  # it may close, or be found dead
        )
    return None


def beyond_decisions(cluster: Cluster, message: Register) -> str | None:
    """What this rank was told that its group has committed to, and the record lacks, so that it is
    older than the rank's memory (R6); None: nothing.
    """
    key, decision = message.committed, cluster.decisions.get((message.model, message.group))
    if key is None:
        return None
    newest = (decision.key.epoch, decision.key.sequence) if decision is not None else (-1, -1)
    may_be_forgotten = decision is None and len(cluster.decisions) >= limits.DECISIONS_MAX
    if (key.epoch, key.sequence) <= newest or may_be_forgotten:
        return None
    here = f"{decision.key} is the newest here" if decision is not None else "none is known here"
    return f"a rank was told that {key} is committed: {here}"


def too_much(
    cluster: Cluster, worker: Worker, message: Register, *parts: tuple[bytes, ...]
) -> TensorHubError | None:
    """Which bound this registration would exceed. Where it is a bound on all workers, there may
    soon be room again.
    """
    bytes_here = cluster.manifest_bytes[worker.incarnation] + sum(
        map(len, (message.manifest, *parts[0]))
    )
    blobs = [
        message.manifest,
        *chain(*parts),
        *([message.held.manifest] if message.held is not None else []),
    ]
    what, in_all = "", False
    if len(worker.members) >= limits.REGISTRATIONS_OF_WORKER_MAX:
        what = f"it has {len(worker.members)} registrations already (REGISTRATIONS_OF_WORKER_MAX)"
    elif bytes_here > limits.MANIFEST_BYTES_OF_WORKER_MAX:
        what = f"its manifests would have {bytes_here} bytes (MANIFEST_BYTES_OF_WORKER_MAX)"
    elif len(cluster.members) >= limits.REGISTRATIONS_MAX:
        what, in_all = (
            f"there are {len(cluster.members)} registrations in all (REGISTRATIONS_MAX)",
            True,
        )
    elif not cluster.manifests.has_room_for(*blobs):
        what, in_all = (
            f"all manifests have {cluster.manifests.nbytes} bytes (MANIFEST_BYTES_MAX)",
            True,
        )
    elif not cluster.has_room_for(message.model):
        what, in_all = f"there are {limits.MODELS_MAX} models in all (MODELS_MAX)", True
    if not what:
        return None
    return RegistrationError(
        f"worker {worker.name!r} cannot register: {what}; close handles first", retryable=in_all
    )


@dataclass(eq=False, repr=False)
class Announcements:
    """Brings back holdings of former sessions."""

    _cluster: Cluster
    _holdings: Holdings
    _testimonies: Testimonies

    def heard(self, member: Member, held: Held, parts: tuple[bytes, ...], request: int) -> bool:
        """A worker of a former session says what it holds. Content that is not the recorded one is
        ordered out (R2).

        What the rank has only voted for does not count: it asks how that ended, and then says again
        what it holds. What it held before does not count either if its vote has committed the group
        to another content.
        """
        cluster, group = self._cluster, member.group
        committed = None
        if (
            group.world_size > 1 and member.said.purpose is Purpose.USE
        ):  # a prefetch may commit to what its handles hold already
            committed = cluster.committed_content(group.model.name, group.name)
        if held.voted:
            return True
        # a copy may be of an archive of another cluster, and a message may have waited for a fence
        # since before the state was lost
        session = member.worker.session
        remembers = session is not None and cluster.sessions[session].remembers
        if held.lineage is not None and member.said.purpose is Purpose.USE and remembers:
            told = held.lineage, held.version, held.content_id
            cluster.outlived(beyond_record(group.model.name, group.model, *told))
        if committed not in (None, held.content_id):
            return True
        if not (member.said.serves and held.manifest):
            return False
        version = group.model.versions.get(held.version)
        if version is None or not version.visible or version.info.content_id != held.content_id:
            return False
        if member.worker.incarnation in version.condemned:
            return False
        is_publishers = held.published and group.name == version.publisher.group
        root = version.root(member.shard)
        # This rank has the bytes of the published shard, even if no other rank of its group comes
        # back.
        is_one = member.is_of_one_shard or group.world_size == version.info.world_size
        is_proven = root != b"" and held.root == root and is_one
        is_known = not held.publication and (member.fits_any_layout or is_publishers or is_proven)
        if not is_known and group.layout_id is None:
            member.wait(request)
            return True  # it says this again once all ranks are here
        is_published = version.is_laid_out_as(group)
        if is_known or (is_published and not held.publication):
            layout = version.holdings
        elif held.publication and not is_published and ways.misfit(group, version) is None:
            published = version.holdings
            if not published.is_described:
                return False  # no reader of its layout could plan
            if held.publication != cluster.describe(version, published):
                return False
            if not cluster.manifests.has_room_for(held.manifest, *parts):
                return False
            layout = cluster.lay_out(version, group)
        else:
            return False
        if member.shard not in layout:
            return False
        if layout is version.holdings and root and held.root not in (b"", root):
            return False  # its bytes are not the published bytes (R8)
        recorded = version.recorded(member.shard) if layout is version.holdings else None
        if recorded is not None and recorded[0] != cluster.manifests.name(held.manifest):
            return False  # nor are these the tensors
        if layout is not version.holdings and not layout.takes(member.shard, parts):
            return False
        is_described = bool(layout.manifests.get(member.shard)) and member.shard in layout.parts
        if not is_described and not cluster.manifests.has_room_for(held.manifest, *parts):
            return False
        cluster.learn(
            version, layout, member.shard, held.manifest, ways.as_known(member, version, parts)
        )
        replica = next(
            (
                r
                for r in group.replicas
                if r.version is version and r.state is not ReplicaState.TORN
            ),
            None,
        )
        if replica is None:
            replica = self._holdings.new_replica(version, member)
        trust = Trust(by_source=not (is_publishers or is_proven))
        holding = Holding(replica, member, held.generation, True, True, layout, trust=trust)
        self._holdings.add(holding)
        if (
            held.published
            and group.name == version.publisher.group
            and member.said.purpose is Purpose.USE
        ):
            self._testimonies.publisher_is_back(holding)
        # if DRAINING: the leaving rank has stayed
        if replica.state is not ReplicaState.READY and replica.is_whole:
            self._holdings.make_ready(replica, "announced again by every rank")
        return True


# of a lease, within which the asked rank must answer; then all waiting ranks are asked
ANSWER = 1 / 8
ANSWER_S_MAX = 5.0  # the longest time for an answer, however long a lease is: callers wait for it

Parts = tuple[bytes, ...]
Again = RegisterAgain | ReadyAgain


class ManifestQuestions:
    """The open questions of one coordinator."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # By id that was asked for: (session, its message then, whether the id is a part's) of each
        # waiting rank.
        self._waiting: dict[str, deque[tuple[int, Again, bool]]] = {}
        self._count = 0  # of all those

    def __repr__(self) -> str:
        return f"<ManifestQuestions: {len(self._waiting)} asked, {self._count} wait>"

    def with_manifests(self, message: Register) -> tuple[Register, Parts, Parts] | None:
        """The message with its manifests, its parts, and the parts of its holding. None: one of
        them has to be asked for.
        """
        find, held = self._cluster.manifests.find, message.held
        mine = message.manifest or (find(message.manifest_id) if message.manifest_id else b"")
        parts = self._parts(message.parts, message.part_ids)
        if mine is None or parts is None:
            return None
        if held is None:
            return replace(message, manifest=mine), parts, ()
        its = held.manifest or (find(held.manifest_id) if held.manifest_id else b"")
        held_parts = self._parts(message.parts, held.part_ids)
        if its is None or held_parts is None:
            return None
        return replace(message, manifest=mine, held=replace(held, manifest=its)), parts, held_parts

    def with_parts(self, session: int, message: ReadyToWrite) -> Parts | None:
        """What it names. None: some of that has to be said first, and it is asked for."""
        parts = self._parts(message.parts, message.part_ids)
        if parts is None:
            said = set(map(id_of, message.parts))
            unknown = [
                ident for ident in message.part_ids if self._cluster.manifests.find(ident) is None
            ]
            missing = dict.fromkeys([ident for ident in unknown if ident not in said], True)
            self._ask(session, missing, ReadyAgain(message.key, message.rank, tuple(unknown)))
        return parts

    def _parts(self, blobs: Parts, part_ids: tuple[str, ...]) -> Parts | None:
        """Those that were said with them, or that are known."""
        if not part_ids:
            return ()
        said = {id_of(blob): blob for blob in blobs if blob}
        found = [said.get(ident) or self._cluster.manifests.find(ident) for ident in part_ids]
        return tuple([blob for blob in found if blob]) if all(found) else None

    def ask(self, session: int, message: Register) -> None:
        """This Register names a manifest that is not known. Sooner or later the rank is told to say
        the message again.
        """
        said = (message,) if message.held is None else (message, message.held)
        named = [each.manifest_id for each in said if each.manifest_id]
        find = self._cluster.manifests.find
        # also where it was said now: it is not kept; so below
        whole = any(find(ident) is None for ident in named)
        parts = dict.fromkeys(
            ident for each in said for ident in each.part_ids if find(ident) is None
        )
        self._ask(
            session,
            dict(self._missing(message)),
            RegisterAgain(message.request, whole, tuple(parts)),
        )

    def _ask(self, session: int, missing: Mapping[str, bool], again: Again) -> None:
        """Tell it this; or let it wait for one of these ids. Of each it is said whether it is a
        part's.
        """
        cluster = self._cluster
        for ident, is_part in missing.items():
            if ident in self._waiting and self._count < limits.WAIT_FOR_MANIFESTS_MAX:
                self._waiting[ident].append((session, again, is_part))
                self._count += 1
                return
        for ident in missing:
            if ident not in self._waiting and len(self._waiting) < limits.WAIT_FOR_MANIFESTS_MAX:
                self._waiting[ident] = deque()
                cluster.timers.set(
                    "manifest",
                    ident,
                    cluster.now + min(cluster.options.lease_s * ANSWER, ANSWER_S_MAX),
                )
        cluster.send(session, again)

    def _missing(self, message: Register) -> Iterator[tuple[str, bool]]:
        """The ids that are neither said nor known, and whether each id is a part's."""
        find, held = self._cluster.manifests.find, message.held
        said = {id_of(blob) for blob in message.parts}
        for each in (message,) if held is None else (message, held):
            if not each.manifest and each.manifest_id and find(each.manifest_id) is None:
                yield each.manifest_id, False
            for ident in each.part_ids:
                if ident not in said and find(ident) is None:
                    yield ident, True

    def came(self, *idents: str) -> None:
        """A message that names these ids was accepted: the ranks that wait for them need not wait
        longer.
        """
        for ident in idents:
            if ident in self._waiting and self._cluster.manifests.find(ident) is not None:
                self._cluster.timers.set("manifest", ident, self._cluster.now)

    def due(self, ident: str) -> None:
        """The manifest is there, or was waited for long enough. Some ranks are told so, and the
        rest in the next steps.
        """
        waiting, is_known = self._waiting[ident], self._cluster.manifests.find(ident) is not None
        for _ in range(min(len(waiting), limits.WOKEN_PER_STEP)):
            session, again, is_part = waiting.popleft()
            self._count -= 1
            if session in self._cluster.sessions:
                again = replace(again, part_ids=(ident,) if is_part and not is_known else ())
                if isinstance(again, RegisterAgain):
                    again = replace(again, whole=not (is_known or is_part))
                self._cluster.send(session, again)
        if waiting:
            # not within this step
            self._cluster.timers.set("manifest", ident, nextafter(self._cluster.now, inf))
        else:
            del self._waiting[ident]
