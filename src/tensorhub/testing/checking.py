"""What the checks of the conformance suite share: the source that they read, what tears it, demands
and receives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from tensorhub.cuda.device import Device
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Cutter,
    Lacking,
    ReadFailure,
    ReadRight,
    Transport,
)
from tensorhub.types import Endpoint

HELD_UP_S: Final = 0.2  # for what is taken back there: an owner that copies by itself does so first


class ConformanceBroken(AssertionError):
    """The transport does not keep a rule. The text names the rule, and what happened."""


class Source(Protocol):
    """A source of `len(SIZES)` chunks of these sizes, none of which is available at first. Each
    chunk is a region. One thread uses it. A source inherits the usual behaviour from it.
    """

    endpoint: Endpoint
    right: ReadRight  # under which it may be read now
    device: Device | None = None  # on which destinations are to be; None: they are in host memory

    def fill(self, chunk: int, content: bytes) -> None:
        """Have these bytes there, and let them be read, with their XXH3-64 as the digest."""

    def spoil(self, chunk: int) -> None:
        """Change a byte of an available chunk, of which the owner knows nothing."""

    def take_back(self) -> None:
        """Fence all of it as `unpublish` does; when this returns, every byte of it is overwritten
        with other ones.
        """

    def freeze(self) -> bool:
        """Have the source answer nothing any more, its connections open. False: this source has no
        process that could be silent.
        """

    def die(self) -> None:
        """End the source, with its connections, as the end of its process does."""

    def close(self) -> None:
        """Release everything, after whatever else was called."""


MakeSource = Callable[[], Source]
Check = Callable[[Transport, MakeSource], None]


class Tear:
    """Has the source take everything back at one of the read's points."""

    def __init__(self, source: Source, point: int) -> None:
        self.left = point  # points until then; -1: it has been taken back
        self.is_armed = False
        self._thread = threading.Thread(target=source.take_back)

    def pass_point(self) -> None:
        if not self.is_armed or self.left < 0:
            return
        self.left -= 1
        if self.left < 0:
            self._thread.start()
            self._thread.join(HELD_UP_S)

    def end(self) -> None:
        """Wait until the source has it back, if it was taken."""
        if self.left < 0:
            self._thread.join()


class TearingCutter(Cutter):
    __slots__ = ("_tear",)

    def __init__(self, tear: Tear) -> None:
        super().__init__()
        self._tear = tear

    @property
    def is_cut(self) -> bool:
        self._tear.pass_point()
        return super().is_cut


def require(holds: bool, rule: int, text: str) -> None:
    if not holds:
        raise ConformanceBroken(f"rule {rule} of tensorhub.transport.base: {text}")


@contextlib.contextmanager
def made(make_source: MakeSource) -> Iterator[Source]:
    source = make_source()
    try:
        yield source
    finally:
        source.close()


def take(answer: Arrival | Lacking, named: dict[int, int | None]) -> None:
    require(
        isinstance(answer, Arrival), 7, f"the source has every chunk, and lacks {answer.chunks}"
    )
    for chunk, digest in answer.chunks if isinstance(answer, Arrival) else ():
        require(chunk not in named, 1, f"chunk {chunk} arrived twice")
        named[chunk] = digest


def receive_all(channel: Channel, count: int, bytes_max: int = 2**20) -> dict[int, int | None]:
    named: dict[int, int | None] = {}
    while len(named) < count:
        take(channel.receive(bytes_max), named)
    return named


def failure_of(read: Callable[[], object]) -> ReadFailure | None:
    """How a read fails, if it does."""
    try:
        read()
    except ReadFailure as failure:
        return failure
    return None
