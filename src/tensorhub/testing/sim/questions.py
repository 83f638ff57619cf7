"""What a simulated worker asks the coordinator for itself, and which pins it wants."""

from __future__ import annotations

from tensorhub.coordinator import Retention
from tensorhub.errors import TensorHubError
from tensorhub.messages import Done, Pin, Refused, Retain, Rollback, Unpin
from tensorhub.testing.sim.ports import SimWorkerPort
from tensorhub.testing.sim.sites import MODEL


class SimQuestions:
    """The questions of one worker. Each returns the number of its request; the answer will be in
    `answers`.
    """

    def __init__(self, worker: SimWorkerPort) -> None:
        self._worker = worker
        self._cluster = worker.cluster
        self.answers: dict[int, TensorHubError | None] = {}  # by request
        self.pins: dict[str, tuple[str, int]] = {}  # that it wants: model and version, by id
        # pins that it has ended, and has not heard the end of: their models, by id
        self.unpinned: dict[str, str] = {}
        # by request: those that were said, and not answered
        self.rollbacks: dict[int, Rollback] = {}
        self._asked_unpins: dict[int, str] = {}  # by request

    def rollback(self, to: int, model: str = MODEL, ident: str = "") -> int:
        request = next(self._cluster.numbers)
        ident = ident or f"rollback{request}"
        self._cluster.guarantees.retained.asks(request, ident)
        self.rollbacks[request] = Rollback(request, ident, model, to)
        self._worker.say(self.rollbacks[request])
        return request

    def retain(self, latest: int, model: str = MODEL) -> int:
        request = next(self._cluster.numbers)
        if self._worker.link is not None:
            self._cluster.guarantees.retained.asks(request, Retention(model, latest))
        self._worker.say(Retain(request, model, latest))
        return request

    def pin(self, version: int, model: str = MODEL, pin: str = "") -> tuple[str, int]:
        """A new pin (or `pin` again), and the request that asked for it."""
        request = next(self._cluster.numbers)
        if not pin:
            pin = f"pin{request}"
            self._cluster.guarantees.retained.asks(request, pin)
        self.pins[pin] = (model, version)
        self._worker.say(Pin(request, pin, model, version))
        return pin, request

    def say_pins(self) -> None:
        """Over a new connection."""
        for pin, (model, version) in list(self.pins.items()):
            self.pin(version, model, pin)

    def unpin(self, pin: str) -> int:
        request = next(self._cluster.numbers)
        model = self.unpinned.get(pin) or self.pins.pop(pin)[0]
        self.unpinned[pin] = model
        self._asked_unpins[request] = pin
        self._cluster.guarantees.history.unpinned(pin)
        self._worker.say(Unpin(request, pin, model))
        return request

    def answered(self, message: Done | Refused) -> None:
        """Also an answer to a question of the process's own code."""
        request, refused = message.request, isinstance(message, Refused)
        self._cluster.guarantees.history.answered(self._worker, message)
        self.answers[request] = message.error.error() if isinstance(message, Refused) else None
        self.rollbacks.pop(request, None)
        ended = self._asked_unpins.pop(request, "")
        if ended and not refused:
            self.unpinned.pop(ended, None)
