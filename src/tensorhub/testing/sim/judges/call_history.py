"""What simulated callers call and return, and what they are told, as the reference model of each
model hears it.

Responsible for the calls that a handle's and a worker's actions stand for. What is possible is the
model's affair.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

from tensorhub.errors import LeaseLost, VersionConflict, VersionUnavailable
from tensorhub.messages import (
    Announce,
    Done,
    FromWorker,
    Join,
    Pin,
    Refused,
    Retain,
    Rollback,
    Unpin,
    Watch,
)
from tensorhub.testing.sim.assertion import HOLDING, demand
from tensorhub.testing.sim.judges.contents import Contents
from tensorhub.testing.sim.judges.ports import JudgedCall, JudgedHandle, JudgedWorker, JudgedWorld
from tensorhub.testing.sim.judges.reference_model import (
    Call,
    Pinning,
    Publishing,
    Reading,
    ReferenceModel,
    Retaining,
    RollingBack,
)
from tensorhub.types import VersionInfo
from tensorhub.worker.calls import Call as Called, FillCall, PublishCall


class CallHistory:
    """One cluster's callers. Where some callers are outsiders, it judges nothing."""

    def __init__(self, world: JudgedWorld, contents: Contents) -> None:
        self._world = world
        self._contents = contents
        self.models: defaultdict[str, ReferenceModel] = defaultdict(ReferenceModel)
        # by request: of which model a worker itself asks what
        self.questions: dict[int, tuple[str, Call]] = {}
        self.new_pins: set[int] = set()  # of these: pins that are said for the first time
        self._said: set[str] = set()  # the ids of all pins
        # by id: those that may count, and their models
        self._pins: dict[str, tuple[str, Pinning]] = {}
        # Watches of the present connections, by incarnation and model. When one is said again,
        # older news may be coming.
        self._watches: set[tuple[str, str]] = set()
        # by model: the moment at which the last leader was deposed that went on
        self._deposed: dict[str, int] = {}
        self.rolled_back_to: dict[str, int] = {}  # by model: the lowest number that was asked for
        self._rollbacks: dict[str, RollingBack] = {}  # by the names under which they are said again

    def deposed(self) -> None:
        """Another coordinator leads from now on, beside the one that led until now."""
        self._deposed = {name: model.moment for name, model in self.models.items()}

    def answered_by(self, worker: JudgedWorker, call: Call, model: str) -> None:
        """The worker's coordinator answers. One whose clock is wrong may have been deposed: then
        the call takes effect at some moment since.
        """
        if self._world.is_behind(worker):
            call.began = min(call.began, self._deposed.get(model, 0))

    def state_lost(self) -> None:
        """The coordinator will be back without its state, as a new cluster."""
        self._pins.clear()
        for model in self.models.values():
            model.state_lost()

    # -- handles

    def begins(self, handle: JudgedHandle, what: Called) -> Call:
        """A handle is called."""
        shard, content = (
            handle.shard,
            handle.member.content if handle.member.state in HOLDING else None,
        )
        call = Call(handle.name)
        if isinstance(what, PublishCall):
            call = Publishing(shard.group, what.version)
        elif isinstance(what, FillCall):
            holds = content.version if content is not None else None
            if holds is not None and self._contents.is_spoilt(handle, holds.content_id):
                holds = None  # it does not count
            call = Reading(handle.name, what.selector, what.at_least, holds)
        self.models[shard.model].begins(call)
        return call

    @staticmethod
    def crashed(record: JudgedCall) -> None:
        """Its process is no more."""
        if isinstance(record.judged, Publishing):
            record.judged.left = True

    def ended(self, handle: JudgedHandle, record: JudgedCall) -> None:
        """That call has returned, or raised."""
        model, call, error, version = (
            self.models[handle.shard.model],
            record.judged,
            record.error,
            record.version,
        )
        in_doubt = isinstance(error, LeaseLost) or getattr(error, "memory", "") == "in_doubt"
        if self._contents.has_outsiders:
            return
        match call:
            case Publishing() if version is not None:
                model.published(call, version)
            case Publishing() if in_doubt:
                call.left = True
            case Publishing():
                model.not_published(
                    call, taken=isinstance(error, VersionConflict) and not error.retryable
                )
            case Reading() if version is not None:
                model.read(call, version)
            case Reading(selector=int(number)) if _says_there_is_none(error):
                model.denied(call, number)
            case _:
                pass

    # -- workers

    def says(self, worker: JudgedWorker, message: FromWorker) -> None:
        """A worker asks for something itself."""
        match message:
            case Join():
                self._watches = {watch for watch in self._watches if watch[0] != worker.incarnation}
            case Watch() if (worker.incarnation, message.model) not in self._watches:
                self._watches.add((worker.incarnation, message.model))
                self.models[message.model].listens(worker.incarnation)
            case Rollback():
                least = self.rolled_back_to.get(message.model, message.to)
                self.rolled_back_to[message.model] = min(least, message.to)
                rollback = self._rollbacks.get(message.ident)
                if rollback is None:
                    rollback = self._rollbacks[message.ident] = RollingBack(worker.name, message.to)
                    self.models[message.model].begins(rollback)
                self.questions[message.request] = message.model, rollback
            case Retain():
                retain = Retaining(worker.name, message.latest)
                self.models[message.model].begins(retain)
                self.questions[message.request] = message.model, retain
            case Pin():
                self.unpinned(message.pin)
                pin = Pinning(worker.incarnation, message.version)
                self.models[message.model].begins(pin)
                self.questions[message.request] = self._pins[message.pin] = message.model, pin
                if message.pin not in self._said:
                    self._said.add(message.pin)
                    self.new_pins.add(message.request)
            case Unpin():
                self.unpinned(message.pin)
            case _:
                pass

    def cut_off(self, worker: JudgedWorker) -> None:
        """Its pins count for a lease; no caller can rely on them until they are sent again."""
        for pin in [
            pin
            for pin, (_, call) in self._pins.items()
            if call.who.rpartition(".")[0] == worker.name
        ]:
            self.unpinned(pin)

    def unpinned(self, pin: str) -> None:
        """No caller can count on that pin any more, until it is sent again."""
        if pin in self._pins:
            model, call = self._pins.pop(pin)
            self.models[model].unpinned(call)

    def announced(self, worker: JudgedWorker, message: Announce) -> None:
        """A worker is told which version is the newest."""
        if not self._contents.has_outsiders:
            is_behind = self._world.is_behind(worker)
            since = self._deposed.get(message.model, 0) if is_behind else inf
            self.models[message.model].announced(worker.incarnation, message.newest, since)

    def finds_loss(self, worker: JudgedWorker, message: Announce) -> None:
        """A worker tells its callers that the coordinator has an older copy of its state."""
        demand(
            self._world.was_older,
            "durable mark: {} takes the state for an older copy by {}, which it never was",
            worker,
            message,
        )

    def goes_on(self, worker: JudgedWorker, before: VersionInfo | None, message: Announce) -> None:
        """G3: numbers go back by a rollback only, or after the word that state was lost."""
        newest, least = message.newest, self.rolled_back_to.get(message.model, inf)
        demand(
            before is None
            or newest is None
            or newest.version >= before.version
            or least < before.version,
            "visibility: {} was told of {}, and then of {}, and not that state was lost",
            worker,
            before,
            newest,
        )

    def answered(self, worker: JudgedWorker, message: Done | Refused) -> None:
        """A worker hears what became of what it has asked for."""
        name, call = self.questions.pop(message.request, ("", None))
        model, error = (
            self.models[name],
            message.error.error() if isinstance(message, Refused) else None,
        )
        if self._contents.has_outsiders:
            return
        if call is not None:
            self.answered_by(worker, call, name)
        match call:
            case RollingBack() if call.ended < inf:
                pass  # it was answered before
            case RollingBack() if error is None:
                model.rolled_back(call)
            case RollingBack():
                is_beyond = isinstance(error, VersionConflict) and not self._world.has_unheard(name)
                model.not_rolled_back(call, beyond=is_beyond)
            case Retaining() if error is None:
                self._end_earlier(worker, message.request)
                model.retained(call)
            case Retaining():
                model.not_retained(call, unknown=False)
            case Pinning() if error is None:
                model.pinned(call)
            case Pinning() if _says_there_is_none(error):
                model.denied(call, call.number)
            case _:
                pass

    def _end_earlier(self, worker: JudgedWorker, request: int) -> None:
        """What it said before is recorded by now, or never will be: records keep the order in which
        they were asked for.
        """
        for earlier, (model, call) in list(self.questions.items()):
            if isinstance(call, Retaining) and call.who == worker.name and earlier < request:
                del self.questions[earlier]
                self.models[model].not_retained(call, unknown=True)

    # -- what must stay

    def must_stay(self, model: str, since: Call) -> frozenset[str]:
        """Content ids that have had to stay since that call began."""
        if self._contents.has_outsiders:
            return frozenset()
        live = self._world.coordinator.cluster.workers
        for pin in [pin for pin, (_, call) in self._pins.items() if call.who not in live]:
            self.unpinned(pin)  # it ends with its worker
        return self.models[model].must_stay(since)


def _says_there_is_none(error: Exception | None) -> bool:
    """Whether the error says that a number is not published, or not any more; not: it has no
    holder.
    """
    texts = ("does not exist", "is not published", "no worker holds it any more")
    return isinstance(error, VersionUnavailable) and any(text in str(error) for text in texts)
