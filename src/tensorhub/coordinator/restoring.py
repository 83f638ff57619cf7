"""Versions that an archive has, and this coordinator does not know: it was new, or has forgotten
them (R2, G3).

Such a version comes back as one of a former coordinator, from the store: visible, and without a
holder. Then the archive announces its copies, which are ordinary holdings. A version that a
rollback has ended never comes back. A model without a number takes over the lineage and the mark of
another cluster, so that its next number is a new one.

Not responsible for copies (`registrations`), nor for which versions stay (`versions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import (
    STAND_IN,
    Bounds,
    Publication,
    Restoration,
    bounded,
    counts_in,
)
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Model, PendingWrite, Version, Worker
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import (
    CoordinatorUnavailable,
    StateError,
    TensorHubError,
    VersionConflict,
)
from tensorhub.messages import Restore, Restored
from tensorhub.model.digests import ROOT_BYTES
from tensorhub.model.manifest import ID_BYTES
from tensorhub.types import OpKey

STORED_MAX = 2**63 - 1  # of bytes
LINEAGE_MAX = 2**62  # no cluster was rolled back so often; rollbacks that follow have room


@dataclass(eq=False, repr=False)
class Restorations:
    """Adds the versions; no other component does."""

    _cluster: Cluster
    _versions: Versions
    _testimonies: Testimonies

    def ask(self, worker: Worker, message: Restore) -> None:
        """An archive tells of versions."""
        cluster, model = self._cluster, self._cluster.models.get(message.model)
        error = self._refusal(worker, model, message)
        if error is not None:
            cluster.answer(worker.session, message.request, error)
            return
        model = cluster.model(message.model)
        new = list(self._unknown(model, message))
        self._versions.await_copies(model, message, worker.incarnation)
        if not new and model.mark is not None:
            cluster.answer(worker.session, message.request)
            return
        publications = tuple(
            Publication(
                model.name,
                each.lineage,
                each.version.version,
                each.version.content_id,
                each.version.nbytes,
                each.version.world_size,
                each.layout_id,
                OpKey(model.name, "", 0, 0),
                each.manifest_ids,
            )
            for each in new
        )
        place = message.lineage, message.mark, message.cluster
        entry = Restoration(model.name, *place, publications, tuple([each.roots for each in new]))
        cluster.touch(model)
        cluster.record(PendingWrite(model, message, worker.session, cluster.now), entry)

    # -- what may come back

    def _refusal(
        self, worker: Worker, model: Model | None, message: Restore
    ) -> TensorHubError | None:
        cluster, name = self._cluster, message.model
        pending = [
            write for write in cluster.pending_writes.values() if isinstance(write.message, Restore)
        ]
        if any(write.session == worker.session for write in pending):
            return CoordinatorUnavailable(
                f"versions of {name!r} that this worker restores are being recorded: wait for them"
            )
        if not message.cluster:
            return StateError(f"versions of {name!r} are of a cluster without a name")
        if message.lineage > LINEAGE_MAX:
            return StateError(f"versions of {name!r} cannot be of lineage {message.lineage}")
        for each in message.versions:
            fault = _fault(message, each)
            if fault:
                return StateError(f"version {each.version.version} of {name!r}: {fault}")
        if model is not None and model.history.rollbacks:
            return VersionConflict(
                f"versions of {name!r} cannot be restored now: a rollback is being recorded; "
                f"call again",
                retryable=True,
            )
        if model is None or model.mark is None:
            return self._refusal_to_begin(model, message, pending)
        if message.cluster not in (cluster.id, model.history.origin[0]):
            return StateError(
                f"{name!r} has versions of this cluster ({cluster.id}), up to {model.mark}, and "
                f"the archive has those of another one ({message.cluster}): restore them under a "
                f"name that is new here, start the coordinator with the state_dir of that cluster, "
                f"or give this cluster an archive of its own"
            )
        conflicts = (self._conflict(model, message, each) for each in message.versions)
        return next(
            (each for each in conflicts if each is not None), self._too_many(model, message)
        )

    def _refusal_to_begin(
        self, model: Model | None, message: Restore, pending: list[PendingWrite]
    ) -> TensorHubError | None:
        """Why a model without a number cannot take over these versions, if it cannot."""
        name = message.model
        if message.cluster == self._cluster.id:
            return VersionConflict(
                f"{name!r} has no version here, and the archive says that this cluster "
                f"({self._cluster.id}) has published up to {message.mark}: the state_dir is an "
                f"older one; start the coordinator with the newest one, or with an empty one"
            )
        if model is not None and model.versions:
            return StateError(
                f"{name!r} is being published for the first time in this cluster "
                f"({self._cluster.id}): the versions of {message.cluster} can be restored before "
                f"that, or if it fails",
                retryable=True,
            )
        for write in pending:
            other = write.message
            assert isinstance(other, Restore)
            if other.model == name and _origin(other) != _origin(message):
                return StateError(
                    f"{name!r} is being restored from another archive", retryable=True
                )
        if not self._cluster.has_room_for(name):
            return StateError(f"there are {limits.MODELS_MAX} models here already (MODELS_MAX)")
        return self._too_many(model, message)

    def _conflict(self, model: Model, message: Restore, each: Restored) -> VersionConflict | None:
        number, mark, history = each.version.version, model.mark or 0, model.history
        what = f"version {number} of {model.name!r}"
        if each.lineage > history.lineage:
            return VersionConflict(
                f"{what} is of lineage {each.lineage}, and this coordinator knows "
                f"{history.lineage}: its state_dir is older than the archive; start it with the "
                f"newest one"
            )
        if not self._counts(model, each):
            return None
        origin, most = history.origin
        if message.cluster != self._cluster.id and message.cluster == origin:
            mark = min(mark, most)
        if number > mark:
            return VersionConflict(
                f"{what} cannot be restored: the newest number is {mark} here; if the archive is "
                f"right, start the coordinator with its newest state_dir"
            )
        known = model.versions.get(number)
        if known is None or known.info.content_id == each.version.content_id:
            return None
        if _stands_in(known) and not known.bound:
            return None
        return VersionConflict(
            f"{what} has other content in the archive than here: {each.version.content_id} and "
            f"{known.info.content_id}; one of the two is of another cluster",
            retryable=_stands_in(known),
        )

    @staticmethod
    def _too_many(model: Model | None, message: Restore) -> StateError | None:
        known = [version.info for version in model.versions.values()] if model is not None else []
        infos = {info.version: info for info in (*known, *(r.version for r in message.versions))}
        shards = sum(info.world_size for info in infos.values())
        most, shards_most = limits.RESTORED_VERSIONS_MAX, limits.RESTORED_VERSIONS_SHARDS_MAX
        if len(infos) <= most and shards <= shards_most:
            return None
        return StateError(
            f"versions of {message.model!r} are not restored, since there would be {len(infos)} "
            f"of {shards} shards: at most {most} of {shards_most} shards (RESTORED_VERSIONS_MAX, "
            f"RESTORED_VERSIONS_SHARDS_MAX)"
        )

    @staticmethod
    def _counts(model: Model, each: Restored) -> bool:
        """Whether no rollback has ended it."""
        history = model.history
        return counts_in(history.bounds, history.lineage, each.lineage, each.version.version)

    def _unknown(self, model: Model, message: Restore) -> Iterator[Restored]:
        for each in message.versions:
            known = model.versions.get(each.version.version)
            if (known is None or _stands_in(known)) and (
                model.mark is None or self._counts(model, each)
            ):
                yield each

    # -- recording

    def recorded(self, write: PendingWrite) -> None:
        """They are durable."""
        cluster, model, message = self._cluster, write.model, write.message
        assert isinstance(message, Restore)
        if model.mark is None:
            bounds: Bounds = bounded((), message.lineage, message.mark)
            lineage = message.lineage, message.mark, "", bounds, (message.cluster, message.mark)
            self._versions.begin_lineage(model, *lineage)
        for each in list(self._unknown(model, message)):
            self._add(model, each)
        session = cluster.sessions.get(write.session or 0)
        if session is not None and session.worker is not None:
            self._versions.await_copies(model, message, session.worker.incarnation)
        self._versions.refresh(model)  # a worker that hears Done has heard of the newest version
        cluster.wake_all(model.waiting.unbound)
        cluster.touch(model)
        cluster.answer(write.session, message.request)

    def _add(self, model: Model, each: Restored) -> None:
        known = model.versions.get(each.version.version)
        if known is not None:
            self._versions.retire(known, model, "the archive has it")
        publisher = OpKey(model.name, "", 0, 0)
        version = Version(each.version, each.layout_id, publisher, each.manifest_ids)
        self._versions.recover(version, model)
        self._cluster.note(version, model)
        if each.roots:
            self._testimonies.recover(version, each.roots)
        model.history.remember(version.number)

    def not_recorded(self, write: PendingWrite, reason: str) -> None:
        text = (
            f"the coordinator cannot make restored versions of {write.model.name!r} durable: "
            f"{reason}; see its state_dir"
        )
        self._cluster.touch(write.model)  # it may be forgotten
        self._cluster.answer(write.session, write.message.request, CoordinatorUnavailable(text))


def _origin(message: Restore) -> tuple[str, int, int]:
    return message.cluster, message.lineage, message.mark


def _stands_in(version: Version) -> bool:
    return version.info.content_id.startswith(STAND_IN)


def _fault(message: Restore, each: Restored) -> str:
    """What of that cannot have been published, if anything."""
    info = each.version
    if info.model != message.model:
        return f"it is one of {info.model!r}"
    if info.version > message.mark or each.lineage > message.lineage:
        return "it is newer than the newest"
    if len(each.manifest_ids) != 2 * ID_BYTES * info.world_size:
        return "the ids of its manifests are cut"
    if len(each.roots) not in (0, ROOT_BYTES * info.world_size):
        return "the roots of its digests are cut"
    if info.nbytes > STORED_MAX or each.version.content_id.startswith(STAND_IN):
        return "its size or its content cannot be"
    numbers = [other.version.version for other in message.versions]
    return "it is named twice" if numbers.count(info.version) > 1 else ""
