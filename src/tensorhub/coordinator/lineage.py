"""Rollback (R2): a new lineage that inherits the versions up to a number; the later ones are retired and fenced.

Responsible for the order of rollbacks and other entries: no entry on its way to the store is undone, and nothing is recorded
into a lineage that is about to end. Not responsible for what becomes of operations (`operations`), versions (`versions`) and
holders (`readers`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensorhub.coordinator import actions
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import FORGOTTEN_KEPT_MAX, Model, PendingWrite
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.operations import Operations
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import CoordinatorUnavailable, TensorHubError, VersionConflict
from tensorhub.messages import Rollback

ROLLBACKS_PER_MODEL_MAX = 64  # that wait


@dataclass(eq=False, repr=False)
class Lineages:
    """Changes models' lineages; nobody else does."""

    _cluster: Cluster
    _versions: Versions
    _holdings: Holdings
    _operations: Operations

    def ask(self, session: int | None, message: Rollback) -> None:
        """A trainer goes back to an older version."""
        model = self._cluster.models.get(message.model)
        if model is None:
            self._cluster.answer(session, message.request, self._refusal(None, message))
            return
        known = next((write for write in model.rollbacks if _call(write).ident == message.ident), None)
        if known is not None:
            known.message, known.session = replace(message, to=_call(known).to), session  # a retry; what is recorded stays
        elif len(model.rollbacks) >= ROLLBACKS_PER_MODEL_MAX:
            error = CoordinatorUnavailable(f"too many rollbacks of {model.name!r} wait to be recorded; call again")
            self._cluster.answer(session, message.request, error)
        else:
            model.rollbacks.append(PendingWrite(model, message, session, self._cluster.now))
            self._cluster.touch(model)

    def settle(self, model: Model) -> None:
        """Let the first one go on as soon as nothing else of this model is being recorded."""
        while model.rollbacks and model.rollbacks[0].record is None and not self._is_recording(model):
            write = model.rollbacks[0]
            message = _call(write)
            error, done = self._refusal(model, message), message.ident in model.rolled_back_by.split("\n")[:-1]
            if done or error is not None:
                self._decide(write, None if done else error)
                continue
            write.record = self._cluster.persist(actions.Rollback(model.name, model.lineage + 1, message.to, message.ident))
            self._cluster.pending_writes[write.record] = write

    def _is_recording(self, model: Model) -> bool:
        return any(operation.group.model is model for operation in self._cluster.records.values())

    @staticmethod
    def _refusal(model: Model | None, message: Rollback) -> VersionConflict | None:
        if model is None or model.mark is None:
            return VersionConflict(f"{message.model!r} cannot be rolled back: nothing was published under it yet")
        if message.to > model.mark:
            return VersionConflict(
                f"{message.model!r} cannot be rolled back to {message.to}: its newest number is {model.mark}; "
                f"give {model.mark} or less"
            )
        return None

    def recorded(self, write: PendingWrite) -> None:
        """The new lineage is durable: it begins."""
        model, message = write.model, _call(write)
        model.lineage, model.mark = model.lineage + 1, message.to
        model.rolled_back_by = actions.rolled_back_by(message.ident, model.rolled_back_by)
        self._operations.rolled_back(model, message.to)
        forgotten = [number for number in model.forgotten if number <= message.to]
        if len(model.forgotten) == FORGOTTEN_KEPT_MAX and not forgotten:
            forgotten = [message.to]  # so long ago that nobody knows: it may have been published
        model.forgotten.clear()
        model.forgotten.extend(forgotten)
        model.lost = tuple(sorted(forgotten)[-2:])
        reason = f"{model.name!r} was rolled back to {message.to}"
        for version in [v for v in model.versions.values() if v.number > message.to]:
            for holding in [h for layout in version.layouts for holdings in layout.values() for h in holdings]:
                self._holdings.order_out(holding, reason)
            for pin in [pin for pin in model.pins.values() if pin.number == version.number]:
                self._cluster.remove_pin(model, pin.pin)
            self._versions.retire(version, model, reason)
        self._versions.refresh(model)  # who hears Done has heard what is newest now
        self._cluster.wake_all(model.unbound)  # another one may be the newest, or the one before it
        self._decide(write, None)

    def not_recorded(self, write: PendingWrite, reason: str) -> None:
        text = f"the coordinator cannot make the rollback of {write.model.name!r} durable: {reason}; see its state_dir"
        self._decide(write, CoordinatorUnavailable(text))

    def _decide(self, write: PendingWrite, error: TensorHubError | None) -> None:
        """A rollback is over: its asker hears how, and what waited for it goes on."""
        write.model.rollbacks.remove(write)
        self._cluster.answer(write.session, write.message.request, error)
        self._operations.reconsider(write.model)
        self._cluster.touch(write.model)


def _call(write: PendingWrite) -> Rollback:
    assert isinstance(write.message, Rollback)
    return write.message
