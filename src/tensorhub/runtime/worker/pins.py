"""A worker's pins. Each is sent again after a lost connection, and ended also if no caller waits
for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVarTuple

import anyio

from tensorhub.errors import CoordinatorUnavailable, LeaseLost, OperationTimeout, TensorHubError
from tensorhub.logs import get_logger
from tensorhub.messages import Pin, Unpin
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient

SAID_AGAIN_S = 2.0  # after an end of a pin that could not be said

log = get_logger("tensorhub.worker")

Arguments = TypeVarTuple("Arguments")


class Tasks(Protocol):
    """Where a worker's tasks run, while it does."""

    def start_soon(
        self, func: Callable[[*Arguments], Coroutine[Any, Any, None]], *args: *Arguments
    ) -> object: ...


@dataclass(slots=True)
class _Pin:
    """One version that this worker keeps."""

    model: str
    version: int
    held: bool = False  # the coordinator has agreed once
    lost: TensorHubError | None = None  # why it did not agree again
    # of the task that says it again
    again: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def __str__(self) -> str:
        return f"the pin of version {self.version} of {self.model!r}"


class Pins:
    """`question_s`: how long one attempt to say something takes at most where no caller waits for
    it.
    """

    def __init__(self, coordinator: CoordinatorClient, question_s: float) -> None:
        self._coordinator = coordinator
        self._question_s = question_s
        self._pins: dict[str, _Pin] = {}  # by the pin's id
        self.tasks: Tasks | None = None  # the worker's, while it runs

    def __repr__(self) -> str:
        return f"<Pins: {len(self._pins)}>"

    @property
    def lost(self) -> list[TensorHubError]:
        """Why pins that are still in use do not count any more."""
        return [pin.lost for pin in self._pins.values() if pin.lost is not None]

    def welcomed(self) -> None:
        """A session is up: say them again; perhaps as a new incarnation, or to a coordinator that
        knows nothing.
        """
        for ident, pin in self._pins.items():
            if pin.held and pin.lost is None and self.tasks is not None:
                pin.again.cancel()
                pin.again = anyio.CancelScope()
                self.tasks.start_soon(self._say_again, ident, pin)

    async def pin(self, model: str, version: int, timeout_s: float) -> str:
        """Keep one version until `unpin`; durable, and known to every live holder, on return. The
        id of the pin.
        """
        ident = self._coordinator.new_id()
        self._pins[ident] = pin = _Pin(model, version)
        try:
            await self._say(ident, pin, timeout_s)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.unpin(ident, 0)  # it may have come through
            raise
        pin.held = True
        return ident

    async def _say(self, ident: str, pin: _Pin, timeout_s: float) -> None:
        await self._coordinator.ask(
            lambda request: Pin(request, ident, pin.model, pin.version), str(pin), timeout_s
        )

    async def _say_again(self, ident: str, pin: _Pin) -> None:
        with pin.again:
            try:
                await self._say(ident, pin, self._question_s)
            except (CoordinatorUnavailable, OperationTimeout):
                pass  # it is said on the next connection
            except TensorHubError as error:
                pin.lost = error
                log.warning("pin_lost", model=pin.model, version=pin.version, reason=str(error))

    async def unpin(self, ident: str, timeout_s: float) -> None:
        """End a pin: within `timeout_s` if the coordinator can be reached, else later. Raises
        LeaseLost if it was lost.
        """
        pin, ended = self.drop(ident)
        with anyio.move_on_after(timeout_s):
            await ended.wait()
        if pin.lost is not None:
            raise LeaseLost(
                f"{pin} was lost while its worker was taken for dead, or its coordinator had lost "
                f"its state: {pin.lost}"
            )

    def drop(self, ident: str) -> tuple[_Pin, anyio.Event]:
        """Have the coordinator told, as soon as can be, that a pin is over; the event is set when
        it has heard.
        """
        pin, ended = self._pins.pop(ident), anyio.Event()
        pin.again.cancel()
        if self.tasks is not None:
            self.tasks.start_soon(self._say_ended, ident, pin, ended)
        return pin, ended

    async def _say_ended(self, ident: str, pin: _Pin, ended: anyio.Event) -> None:
        while True:
            with contextlib.suppress(TensorHubError):
                await self._coordinator.ask(
                    lambda request: Unpin(request, ident, pin.model),
                    f"end of {pin}",
                    self._question_s,
                )
                ended.set()
                return
            await anyio.sleep(SAID_AGAIN_S)
