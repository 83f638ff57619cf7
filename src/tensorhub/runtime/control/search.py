"""The search for a coordinator: every address is tried beside the others, again and again, until
one takes the connection.

Responsible for when which address is tried, and for the error that tells of all of them. Not
responsible for what a try is: its caller's `connect` does that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from tensorhub.errors import (
    AuthenticationFailed,
    CoordinatorUnavailable,
    OperationTimeout,
    ProtocolError,
    StateError,
    TensorHubError,
    shortage,
    some,
)
from tensorhub.messages import FromCoordinator
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control.addresses import Addresses

STAGGER_S = 0.05  # an address that does not answer delays the next address by that
RECONNECT_S = 0.25  # at most between two tries of an address
REFUSED_S_MAX = 2.0  # the same where a coordinator refuses this worker: each try costs it something
LOOK_UP_S = 1.0  # between two look-ups of a name

Messages = MessageStream[FromCoordinator]


class Search:
    """One search; `run` it once."""

    def __init__(
        self,
        addresses: Addresses,
        connect: Callable[[str], Awaitable[Messages]],
        failed: Callable[[TensorHubError], None],
        for_s: float,
        *,
        is_first: bool,
    ) -> None:
        """`failed` is called with the error of all addresses, whenever each has failed. `for_s`: no
        address is tried again after that. `is_first`: a refusal that no repetition helps ends the
        search, once each other address has failed, too: something else may have taken the address
        of a coordinator. Else it may be about a token that is being changed.
        """
        self._addresses = addresses
        self._connect = connect
        self._failed = failed
        self._deadline = anyio.current_time() + for_s
        self._is_first = is_first
        # by address or name: whether it has failed, and its newest error
        self._pursued: dict[str, anyio.Event] = {}
        self._errors: dict[str, TensorHubError] = {}
        self._found: list[Messages] = []  # one at most
        self._tasks: anyio.abc.TaskGroup

    def __repr__(self) -> str:
        return f"<Search: {len(self._pursued)} pursued, {len(self._errors)} failed>"

    async def run(self) -> Messages:
        """The first connection. Raises CoordinatorUnavailable, AuthenticationFailed, ProtocolError,
        StateError (this process lacks something).
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                names, known = self._addresses.names(), self._addresses.known()
                self._pursued = {each: anyio.Event() for each in (*names, *known)}
                for name in names:
                    self._tasks.start_soon(self._follow, name)
                for address in known:
                    self._tasks.start_soon(self._try, address)
                    with anyio.move_on_after(STAGGER_S):
                        await self._pursued[address].wait()
        except BaseException:
            await self._close_found()
            raise
        if not self._found:
            raise self._error()
        return self._found[0]

    async def _follow(self, name: str) -> None:
        """Pursue what is found behind a name, too, each time that it is somewhere else."""
        while True:
            try:
                found = await self._addresses.look_up(name)
            except TensorHubError as error:
                if not self._goes_on(name, error):
                    return
            else:
                self._errors.pop(name, None)
                self._pursued[name].set()
                for address in found:
                    if address not in self._pursued:
                        self._pursued[address] = anyio.Event()
                        self._tasks.start_soon(self._try, address)
                if anyio.current_time() >= self._deadline:
                    return
            await anyio.sleep(LOOK_UP_S)

    async def _try(self, address: str) -> None:
        refused_s = RECONNECT_S
        while True:
            try:
                messages = await self._connect(address)
            except (OSError, ConnectionLost, TensorHubError) as raised:
                error = _named(address, raised)
            else:
                if self._found:  # another address at the same time
                    with anyio.CancelScope(shield=True):
                        await messages.aclose()
                else:
                    self._found.append(messages)
                    self._addresses.reached(address)
                self._tasks.cancel_scope.cancel()
                return
            if not self._goes_on(address, error):
                return
            if address not in self._addresses.known():  # its name leads elsewhere by now
                del self._pursued[address], self._errors[address]
                return
            wait_s = RECONNECT_S
            if not error.retryable:
                wait_s = refused_s = min(2 * refused_s, REFUSED_S_MAX)
            # workers that have lost their coordinator together do not come back in step
            await anyio.sleep(random.uniform(wait_s / 2, wait_s))

    def _goes_on(self, pursued: str, error: TensorHubError) -> bool:
        """Note that it has failed. Whether it is to be tried again."""
        self._errors[pursued] = error
        self._pursued[pursued].set()
        if all(each.is_set() for each in self._pursued.values()):
            found = self._error()
            if self._is_first and (isinstance(found, StateError) or not found.retryable):
                self._tasks.cancel_scope.cancel()
            self._failed(found)
        return anyio.current_time() < self._deadline

    def _error(self) -> TensorHubError:
        errors = list(self._errors.values())
        refusals = [each for each in errors if not isinstance(each, CoordinatorUnavailable)]
        for error in (*refusals, *errors):
            if error in refusals or not error.retryable:
                return error
        reasons = some([str(each) for each in errors], "; ")
        if self._errors.keys() <= set(self._addresses.names()):  # what failed says what to do
            return CoordinatorUnavailable(f"no coordinator can be reached ({reasons})")
        hint = "is one running there? (tensorhub serve)"
        if len(self._errors) > 1:
            hint += " One that stands by refuses connections; if none leads, its log says why"
        return CoordinatorUnavailable(f"no coordinator can be reached ({reasons}): {hint}")

    async def _close_found(self) -> None:
        with anyio.CancelScope(shield=True):
            for messages in self._found:
                await messages.aclose()


def _named(address: str, raised: Exception) -> TensorHubError:
    """What a failed try means, with its address."""
    named: TensorHubError
    match raised:
        case AuthenticationFailed() | ProtocolError():
            # a proxy before a coordinator that is gone closes: the error may be retryable
            named = type(raised)(f"{address}: {raised}", retryable=raised.retryable)
        case TensorHubError() if not isinstance(raised, OperationTimeout):
            return raised
        case _:
            causes = _causes(raised)
            lacks = [shortage(each) for each in causes if isinstance(each, OSError)]
            text = f"{address}: {'; '.join(dict.fromkeys(map(_text, causes)))}"
            named = next((each for each in lacks if each is not None), CoordinatorUnavailable(text))
    named.__cause__ = raised
    return named


def _causes(error: BaseException) -> tuple[BaseException, ...]:
    """The causes of an error: anyio's own error for several addresses of a host does not name
    them.
    """
    cause = error.__cause__ if isinstance(error, OSError) and error.errno is None else None
    if isinstance(cause, BaseExceptionGroup):
        return cause.exceptions
    return (cause or error,)


def _text(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    # below 0: of getaddrinfo
    return os.strerror(number) if number is not None and number > 0 else str(error)
