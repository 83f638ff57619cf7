"""What the async API's calls return where that is no coroutine. A wrong use raises an error that
says what to write.

Responsible for forms only: `await` and `async with`, and the errors of a plain `with`, `for` or an
attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from tensorhub.errors import StateError
from tensorhub.runtime.loop_thread import AsyncMode, BlockingMode, CallerMode, finish_blocking


def wrong_use(text: str) -> Callable[..., NoReturn]:
    """A method that raises TypeError with that text."""

    def refuse(self: object, *_: object) -> NoReturn:
        raise TypeError(text)

    return refuse


class Unpicklable:
    """What belongs to its process."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process, and can neither be pickled nor "
            f"copied: in the other process, "
            "connect (and register) there"
        )


class AsyncClosable(Protocol):
    async def close(self) -> None: ...


T = TypeVar("T", bound=AsyncClosable)


class Opening(Generic[T]):
    """`await` it for what it opens, which is then closed by its `close()`, or `async with` it.
    Nothing happens before.
    """

    def __init__(self, opens: Callable[[CallerMode], Coroutine[Any, Any, T]], call: str) -> None:
        """`opens`: told how its caller waits. `call`: its name, for errors."""
        self._opens = opens
        self._call = call
        self._is_used = False
        self._opened: T | None = None  # for the end of its block

    def __repr__(self) -> str:
        return f"<tensorhub.{self._call}(...): await it, or use it by `async with`>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self._call}(...) can neither be pickled nor copied: call it in the process that is "
            f"to use it"
        )

    def __await__(self) -> Generator[Any, Any, T]:
        return self._open().__await__()

    async def _open(self) -> T:
        if self._is_used:
            raise StateError(
                f"this {self._call}() was opened already: call {self._call}() again for another one"
            )
        self._is_used = True
        return await self._opens(AsyncMode())

    def finish_blocking(self) -> T:
        """What it opens, for a caller without a loop."""
        return finish_blocking(self._opens(BlockingMode()))

    async def __aenter__(self) -> T:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        opened, self._opened = self._opened, None
        assert opened is not None
        await close_after(opened, error)

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(
                f"write `async with tensorhub.{self._call}(...)`; without an event loop: "
                f"tensorhub.sync"
            )

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> NoReturn:
            how = (
                f"`x = await tensorhub.{self._call}(...)` or `async with "
                f"tensorhub.{self._call}(...) as x:`"
            )
            raise AttributeError(
                f"{self._call}() has no {name!r} before it is open: write {how}, then `x.{name}`"
            )


async def close_after(opened: AsyncClosable, error: BaseException | None) -> None:
    """Close at the end of a block; an error of the block's body takes precedence over an error of
    closing.
    """
    try:
        await opened.close()
    except Exception:
        if error is None:
            raise


class Block:
    """A block that begins and ends by awaiting."""

    def __init__(self, block: AbstractAsyncContextManager[None], call: str) -> None:
        self._block = block
        self._call = call
        self._is_used = self._is_open = False

    async def __aenter__(self) -> None:
        if self._is_used:
            raise StateError(
                f"this {self._call}() was entered already: call "
                f"{self._call}() again for another block"
            )
        self._is_used = True
        await self._block.__aenter__()
        self._is_open = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if not self._is_open:
            raise StateError(
                f"this {self._call}() is no open block: use it by `with`, or `async with`"
            )
        self._is_open = False
        return await self._block.__aexit__(kind, error, trace)

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(
                f"write `async with {self._call}(...):`; without an event loop: tensorhub.sync"
            )

        def __exit__(self, *_: object) -> None: ...

        def __await__(self) -> NoReturn:
            raise TypeError(f"{self._call}() is a block: write `async with {self._call}(...):`")
