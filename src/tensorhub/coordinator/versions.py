"""The versions of a model: numbers and marks, visibility, selectors.

Responsible for G3 (the meaning of `latest`) and R1, R2, R12. Not responsible for sources, or for
durability itself: a number counts as used once its publication is on its way to the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from tensorhub.coordinator import ways
from tensorhub.coordinator.actions import STAND_IN, Bounds, Decision
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Model, Operation, Version
from tensorhub.coordinator.refusals import held_text, nothing_available
from tensorhub.coordinator.states import OperationState, VersionState
from tensorhub.errors import VersionConflict, VersionUnavailable
from tensorhub.messages import Announce, Begun, Fill, Restore
from tensorhub.types import LATEST, PREVIOUS, OpKind, Selector, VersionInfo


def beyond_record(
    name: str, model: Model | None, lineage: int, number: int | None, content_id: str = ""
) -> str | None:
    """What a worker was told that the record of this model contradicts, so that it is older than
    the worker's memory (G3); None: nothing. `number` None: of no version.
    """
    recorded = (model.history.lineage, model.mark) if model is not None else (0, None)
    version = model.versions.get(number) if model is not None and number is not None else None
    is_other = (
        version is not None
        and version.visible
        and version.info.lineage == lineage
        and content_id not in ("", version.info.content_id)
        and not version.info.content_id.startswith(STAND_IN)
    )
    told, known = [(of, -1 if at is None else at) for of, at in ((lineage, number), recorded)]
    if told <= known and not is_other:
        return None
    here = f"number {recorded[1]} of lineage {recorded[0]} is the newest here"
    what = "other content" if is_other else here
    which = "no version" if number is None else f"version {number}"
    return f"a worker was told of {which} of {name!r}, lineage {lineage}: {what}"


@dataclass(eq=False, repr=False)
class Versions:
    """Changes versions and marks; no other component does."""

    _cluster: Cluster

    # -- publishing

    def conflict(self, model: Model, number: int) -> VersionConflict | None:
        """Why `number` cannot be published now, if it cannot."""
        staged = model.versions.get(number)
        if staged is not None and not staged.visible:
            return VersionConflict(
                f"version {number} of {model.name!r} is being published by group "
                f"{staged.publisher.group!r}; "
                "take another number, or try again if that one fails",
                retryable=True,
            )
        return self.overtaken(model, number)

    def overtaken(self, model: Model, number: int) -> VersionConflict | None:
        """Why `number`, staged or not, is not above all numbers that are recorded or being recorded
        (R1); None: it is.
        """
        if model.mark is not None and number <= model.mark:
            return VersionConflict(
                f"version {number} of {model.name!r} cannot be published: the newest number so far "
                f"is {model.mark}; publish "
                f"{model.mark + 1} or more, or go back first: hub.rollback({model.name!r}, to=N), "
                f"N less than {number}. Does another trainer publish {model.name!r}? Each needs a "
                f"model name of its own"
            )
        if model.history.rollbacks:
            return VersionConflict(
                f"version {number} of {model.name!r} cannot be published now: a rollback is being "
                f"recorded; call again",
                retryable=True,
            )
        if model.mark is None and self._cluster.is_restored(model):
            return VersionConflict(
                f"version {number} of {model.name!r} cannot be published now: its versions are "
                f"being restored from an archive; call again",
                retryable=True,
            )
        recorded = [
            op
            for op in self._cluster.records.values()
            if op.kind is OpKind.PUBLISH and op.group.model is model
        ]
        newer = [op.bound.number for op in recorded if op.state is OperationState.PREPARED]
        if newer and number <= max(newer):
            return VersionConflict(
                f"version {number} of {model.name!r} is overtaken: {max(newer)} is being recorded; "
                f"take a larger number, "
                "or try again if that one fails",
                retryable=True,
            )
        return None

    def stage(self, operation: Operation, number: int) -> Version:
        """The version that this publish will make, invisible until then. Its content id is minted
        here (R1).
        """
        group = operation.group
        model = group.model
        place = number, self._cluster.new_id(), 0, group.world_size, model.history.lineage
        version = Version(VersionInfo(model.name, *place), group.layout_id or "", operation.key)
        group.model.versions[number] = version
        self._cluster.note(version, group.model)
        return version

    def show(self, version: Version, model: Model) -> None:
        """Its publication is durable, and its first replica is READY: it is visible from now on."""
        self._cluster.become(version, VersionState.AVAILABLE, "published")
        model.mark = version.number
        model.history.shown_at = self._cluster.now
        self._cluster.has_news(model)
        self._cluster.touch(model)

    def discard(self, version: Version, model: Model) -> None:
        """Its publication was aborted: the number stays unused."""
        self._cluster.become(version, VersionState.DISCARDED, "publication aborted")
        self._cluster.note(model)
        self._cluster.unlearn(version)
        del model.versions[version.number]

    def retire(self, version: Version, model: Model, why: str) -> None:
        """The version is no more, although ranks may still hold it."""
        self._cluster.become(version, VersionState.RETIRED, why)
        self._cluster.unlearn(version)
        del model.versions[version.number]

    def recover(self, version: Version, model: Model) -> None:
        """A version of a former coordinator, from the store or an archive: visible, without live
        memory until holders are back.
        """
        version.lay_out(version.layout_id)
        self._cluster.become(version, VersionState.AVAILABLE, "recovered")
        self._cluster.become(version, VersionState.UNAVAILABLE, "no holder is known yet")
        model.versions[version.number] = version
        model.mark = max(version.number, -1 if model.mark is None else model.mark)
        self._cluster.has_news(model)

    @staticmethod
    def await_copies(model: Model, message: Restore, incarnation: str) -> None:
        """That worker is about to announce copies of those of these versions that have no holder
        yet.
        """
        for each in message.versions:
            version = model.versions.get(each.version.version)
            is_it = version is not None and version.info.content_id == each.version.content_id
            if version is not None and is_it and not version.holdings.has_holders:
                version.seen.restorer = incarnation

    @staticmethod
    def begin_lineage(
        model: Model,
        lineage: int,
        mark: int | None,
        rolled_back_by: str,
        bounds: Bounds,
        origin: tuple[str, int],
    ) -> None:
        """That is the lineage of the model from now on, as it is recorded."""
        history, model.mark = model.history, mark
        history.lineage, history.rolled_back_by, history.bounds = lineage, rolled_back_by, bounds
        history.origin = origin

    # -- resolving (R12)

    def resolve(
        self,
        model: Model,
        selector: Selector,
        at_least: int | None,
        operation: Operation | None = None,
    ) -> Version | None:
        """The visible version that a selector means; None: the call waits for it.

        Raises VersionUnavailable at once for a number that is not visible, and for an unknown
        selector. The error says which versions `operation` can have.
        """
        if isinstance(selector, int):
            version = model.versions.get(selector)
            if version is None or not version.visible:
                raise VersionUnavailable(
                    self._unknown(model, selector, operation),
                    retryable=model.mark is None or selector > model.mark,
                )
            return version
        if selector not in (LATEST, PREVIOUS):
            raise VersionUnavailable(
                f"{selector!r} is no selector that this coordinator knows", retryable=False
            )
        version = model.newest_visible(skip=0 if selector == LATEST else 1)
        if version is not None and at_least is not None and version.number < at_least:
            return None
        return version

    def available(self, operation: Operation, at_least: int | None) -> Version | None:
        """The newest version of which a complete copy can be read now, and that is not older than
        the version that a rank holds.

        None: the call waits. Nothing was published yet, or a silent worker that has a complete copy
        may come back. Raises VersionUnavailable at once if there is no complete copy of any
        published version.
        """
        least, held = self._least(operation, at_least)
        version, waits = self._newest_readable(operation, least)
        model = operation.group.model
        # The ranks of a call that is repeated have lost what they read: they wait for the next
        # version.
        repeated = any(
            isinstance(part.call, Fill) and part.call.former for part in operation.parts.values()
        )
        published = any(
            number >= least for number in (*model.history.lost, *(v.number for v in model.visible))
        )
        if version is not None or waits or repeated or not published:
            return version
        raise nothing_available(operation, least, held)

    def newest_available(self, operation: Operation, at_least: int | None) -> Version | None:
        """What "available" names now, if that can be read now."""
        return self._newest_readable(operation, self._least(operation, at_least)[0])[0]

    @staticmethod
    def _least(operation: Operation, at_least: int | None) -> tuple[int, int | None]:
        """The oldest version that the ranks may get, and the newest one that a rank holds and has
        not overwritten.
        """
        held = max(
            (holding.version.number for holding in _kept(operation) if holding is not None),
            default=None,
        )
        return max(at_least or 0, held or 0), held

    def _newest_readable(self, operation: Operation, least: int) -> tuple[Version | None, bool]:
        """The newest version from `least` on that all ranks hold or can read now. Without one,
        whether the call waits for a worker that is silent or, after a restart, not back yet.
        """
        waits = self._cluster.is_recovering
        for version in operation.group.model.visible:
            if version.number < least:
                break
            if all(
                holding is not None and holding.version is version for holding in _kept(operation)
            ):
                return version, False
            way = ways.of(version, operation)
            if way.can_be_read:
                return version, False
            if self._may_come_back(version):
                return None, True
            # After a restart a version may not be described yet: then readers of another layout
            # wait.
            waits = waits or way.serves or (not way.is_known and version.has_live_source())
        return None, waits

    def _may_come_back(self, version: Version) -> bool:
        """After a restart: whether a group that has recorded a commit of this version is not back
        with every rank yet.
        """
        if not self._cluster.is_recovering:
            return False
        decisions = self._cluster.decisions.values()
        return any(
            d.content_id == version.info.content_id and not self._is_back(d) for d in decisions
        )

    def _is_back(self, decision: Decision) -> bool:
        group = self._cluster.models[decision.model].groups.get(decision.key.group)
        return group is not None and len(group.members) == group.world_size

    @staticmethod
    def resumed(model: Model, begun: Begun) -> Version:
        """The very content that a fill had begun. Raises VersionUnavailable if it is not known any
        more.
        """
        version = model.versions.get(begun.version)
        if version is None or not version.visible or version.info.content_id != begun.content_id:
            raise VersionUnavailable(
                f"version {begun.version} of {model.name!r}, which this call was fetching when its "
                f"coordinator restarted, "
                "is not known any more: it was rolled back, or is old; call again"
            )
        return version

    def _unknown(self, model: Model, number: int, operation: Operation | None) -> str:
        if model.mark is None:
            return (
                f"version {number} of {model.name!r} does not exist: nothing was published "
                f"under that model yet"
            )
        if number > model.mark:
            return (
                f"version {number} of {model.name!r} is not published yet (the newest is "
                f"{model.mark}); "
                f"wait_for() waits for a version; {held_text(model, operation)}"
            )
        gone = (
            "was published, and no worker holds it any more"
            if number in model.history.forgotten
            else "was never published, or no worker holds it any more"
        )
        return f"version {number} of {model.name!r} {gone}; {held_text(model, operation)}"

    @staticmethod
    def waiting_text(
        model: Model, selector: Selector, at_least: int | None, operation: Operation | None = None
    ) -> str:
        """Why nothing is bound yet, for the error at the deadline."""
        newest = model.newest_visible()
        if newest is None and model.mark is not None:
            lost = (
                f"version {model.history.lost[-1]} of {model.name!r}, which a rollback has made "
                f"the newest, is held by no worker any more"
                if model.history.lost
                else f"no version of {model.name!r} up to {model.mark}, its newest number, is known"
            )
            return f"{lost}; {held_text(model, operation)}"
        if newest is None:
            return f"nothing was published under the model {model.name!r} (is the name right?)"
        if at_least is not None and newest.number < at_least:
            what = (
                f"version {at_least} of {model.name!r} was not published; the newest is "
                f"{newest.number}"
            )
            return f"{what}; {held_text(model, operation)}"
        if selector == PREVIOUS and model.newest_visible(skip=1) is None:
            return (
                f"{model.name!r} has one version only; there is no 'latest-1'; "
                f"{held_text(model, operation)}"
            )
        what = (
            f"no live worker holds {selector!r} of {model.name!r} (the newest version is "
            f"{newest.number})"
        )
        return f"{what}; {held_text(model, operation)}"

    # -- consequences

    def refresh(self, model: Model) -> None:
        """Work out which versions are available or retired. Tell the watchers if another version is
        the newest.
        """
        astir = self._astir(model)
        before = [(version, version.state) for version in astir]
        others_changed = self._refresh_others(astir)
        for version in astir:
            live = version.visible and version.is_held
            if version.seen.restorer and version.holdings.has_holders:
                version.seen.restorer = ""
            if live and version.seen.outlived:
                version.seen.outlived = False
                self._cluster.note(version)
            for layout in version.layouts:
                if layout.abandoned and layout.have_sources():
                    layout.abandoned = False
                    self._cluster.note(version)
            if live and version.state is VersionState.UNAVAILABLE:
                self._cluster.become(version, VersionState.AVAILABLE, "held again")
            elif not live and version.state is VersionState.AVAILABLE:
                self._cluster.become(version, VersionState.UNAVAILABLE, "no live holder")
            if version.state is not VersionState.UNAVAILABLE or not self._is_left(version):
                is_certain = version.state is VersionState.AVAILABLE or version.seen.restorer
                version.seen.rests_at = version.holdings.changes if is_certain else -1
                continue
            if version.bound:
                self._outlive(version, model)
            else:
                # manifests are large, and a holder that comes back tells them again
                self._cluster.unlearn(version)
                if self._is_old(model, version):
                    self.retire(version, model, "old, not retained, without a holder")
                    model.history.forget(version.info)
        newest = model.newest_visible()
        info = newest.info if newest is not None else None
        if (
            others_changed
            or info != model.history.announced
            or any(version.state is not state for version, state in before)
        ):
            self._cluster.wake_all(model.waiting.unbound)
            for version, _ in before:  # a selector may name another version now
                self._cluster.wake_all(version.starving)
                for operation in version.bound.values():
                    if not operation.writing:
                        self._cluster.wake(operation)
        if info != model.history.announced:  # after a rollback it is an older one, or none
            model.history.announced = info
            for session in sorted(self._cluster.watchers.get(model.name, ())):
                news = Announce(model.name, info, model.history.lineage)
                self._cluster.send(session, news)

    def _astir(self, model: Model) -> list[Version]:
        """The versions of which something has changed since the last look that can change their
        state. There may be thousands of other ones, in an archive.
        """
        workers = self._cluster.workers
        return [
            version
            for version in model.versions.values()
            if (seen := version.seen).rests_at != (holdings := version.holdings).changes
            or holdings.uncounted
            or version.bound
            or version.others
            or (seen.restorer and seen.restorer not in workers)
        ]

    def _refresh_others(self, versions: Iterable[Version]) -> bool:
        """Forget layouts in which no rank holds the version any more. Whether other groups can read
        it now, or cannot any more: the state of the version does not tell that while it can be read
        in another layout or out of one. A call that waits for holders to come back fails once a
        layout has none.
        """
        changed = False
        for version in versions:
            if version.others:
                self._cluster.forget_layouts(version)
            can_read = [
                (
                    layout.layout_id,
                    layout.have_sources(),
                    layout.is_described and layout.has_each_class(),
                )
                for layout in (version.layouts if version.visible else ())
                if layout.has_holders
            ]
            if can_read != version.seen.readable_in:
                version.seen.readable_in, changed = can_read, True
        return changed

    def _outlive(self, version: Version, model: Model) -> None:
        """Read-only calls that neither read nor answer would keep the version: they are looked at
        once it is old.
        """
        if not version.seen.outlived and self._is_old(model, version):
            version.seen.outlived = True
            self._cluster.note(version)
            for operation in version.bound.values():
                self._cluster.wake(operation)

    def _is_left(self, version: Version) -> bool:
        """Whether nothing but read-only calls holds, fills or is about to announce any of it. (An
        archive that has restored it is about to.)
        """
        held = any(layout.has_holders for layout in version.layouts)
        held = held or version.seen.restorer in self._cluster.workers
        bound = any(not operation.is_read_only for operation in version.bound.values())
        return not (self._cluster.is_recovering or bound or held)

    @staticmethod
    def _is_old(model: Model, version: Version) -> bool:
        newer = [other.number > version.number for other in islice(model.newest(), 2)]
        return newer == [True, True] and version.number not in model.retained()


def _kept(operation: Operation) -> list[Holding | None]:
    """What each rank holds, without what the rank's memory is being filled with."""
    parts = operation.parts.values()
    return [
        part.member.holding if part.member.holding is not part.holding else None for part in parts
    ]
