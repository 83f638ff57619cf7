"""The transport conformance suite: the rules of `tensorhub.transport.base`, as checks that any
transport can be put to.

A transport's author says how a source of the transport is made (`Source`).
`tensorhub.testing.serving.ServedSource` is one that serves as TensorHub's own workers do. Then

    transport_conformance(transport, make_source)

raises ConformanceBroken, with the rule, or returns. `CHECKS` has each by name, for a parametrized
test. The checks drive channels in the calling thread, and in threads of their own that have ended
when a check returns. They take as long as the transport takes to find out that a source is silent.

Responsible for what a channel promises its lane. Not responsible for its speed, nor for what a
source promises to further readers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Final

import xxhash

from tensorhub.cuda.device import Device, DeviceBytes, Spread
from tensorhub.memory.addresses import address_of
from tensorhub.model.strips import Strip
from tensorhub.testing.checking import (
    Check,
    ConformanceBroken,
    MakeSource,
    Source,
    Tear,
    TearingCutter,
    failure_of,
    made,
    receive_all,
    require,
    take,
)
from tensorhub.testing.strided_checks import (
    check_strided_bytes,
    check_strided_lacking,
    check_strided_rights,
    check_strided_torn,
)
from tensorhub.testing.strided_target import CANARY, SIZES, bytes_of, new_bytes
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Cutter,
    Lacking,
    ReadFailure,
    ReadRight,
    Transport,
    Unusable,
)
from tensorhub.types import ContentId, Incarnation, RegistrationId

SOON_S: Final = 60.0  # what must be soon takes less, on any machine, however busy it is
TEARS_MAX: Final = 32  # points of one read at which it is torn


class Target:
    """Where a check's chunks go: memory full of CANARY, with more of it around each chunk."""

    def __init__(self, device: Device | None = None) -> None:
        self.is_digested = True
        self.is_strided = False
        self.sizes: Sequence[int] = SIZES
        self.device = device
        self._buffers = [new_bytes(device, size + 2) for size in SIZES]

    def buffer(self, chunk: int) -> memoryview:
        part = self._buffers[chunk][1:-1]
        if isinstance(part, DeviceBytes):
            raise ConformanceBroken("a destination on a device has no views")
        return part

    def strips(self, chunk: int) -> tuple[Strip, ...]:
        raise ConformanceBroken("each chunk of this destination is one piece")

    def incoming(self, chunk: int) -> Generator[list[memoryview]]:
        raise ConformanceBroken("each chunk of this destination is one piece")

    def take_in(
        self, chunks: Sequence[int], at: int, gathered: Sequence[Spread] = ()
    ) -> Mapping[int, int]:
        raise ConformanceBroken("each chunk of this destination is one piece")

    def address(self, chunk: int) -> int:
        return address_of(self._buffers[chunk]) + 1

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        return sorted((self.address(chunk), size) for chunk, size in enumerate(SIZES))

    def holds(self, chunk: int) -> bytes:
        return bytes_of(self._buffers[chunk])[1:-1]

    def is_untouched(self, chunk: int) -> bool:
        return set(bytes_of(self._buffers[chunk])) == {CANARY}

    def check_edges(self) -> None:
        for chunk, buffer in enumerate(self._buffers):
            found = bytes_of(buffer)
            require(found[0] == found[-1] == CANARY, 1, f"bytes beside chunk {chunk} were written")


def content(chunk: int, salt: int = 0) -> bytes:
    """The bytes that a check has a source hold."""
    return bytes([(chunk * 31 + salt * 7 + 1) % 150]) * SIZES[chunk]


def transport_conformance(transport: Transport, make_source: MakeSource) -> None:
    """Put a transport to every check. Raises ConformanceBroken."""
    for check in CHECKS.values():
        check(transport, make_source)


# --------------------------------------------------------------------------------------------------
# checks


def check_bytes(transport: Transport, make_source: MakeSource) -> None:
    """1, 3: what was submitted arrives, each chunk once, with its digest, and nothing else is
    written.
    """
    with made(make_source) as source, _opened(transport, source) as (channel, target, _):
        wanted = [chunk for chunk in range(len(SIZES)) if chunk != 3]
        _fill(source)
        channel.submit(wanted[:4])
        channel.submit(wanted[4:])
        named = receive_all(channel, len(wanted), bytes_max=5000)
        require(sorted(named) == wanted, 1, f"{wanted} were asked for, and {sorted(named)} arrived")
        for chunk, digest in named.items():
            require(
                target.holds(chunk) == content(chunk),
                1,
                f"chunk {chunk} has other bytes than its source",
            )
            require(
                digest == xxhash.xxh3_64_intdigest(content(chunk)),
                3,
                f"chunk {chunk} came with digest {digest}",
            )
        require(target.is_untouched(3), 1, "a chunk that was not asked for was written")
        target.check_edges()


def check_bytes_max(transport: Transport, make_source: MakeSource) -> None:
    """`receive` gives one chunk at least, and beyond it no more than it may."""
    with made(make_source) as source, _opened(transport, source) as (channel, _, _):
        _fill(source)
        channel.submit(range(len(SIZES)))
        left = len(SIZES)
        while left:
            answer = channel.receive(5000)
            if isinstance(answer, Arrival):
                chunks = [chunk for chunk, _ in answer.chunks]
                nbytes = sum(SIZES[chunk] for chunk in chunks)
                require(
                    len(chunks) == 1 or nbytes <= 5000,
                    1,
                    f"{nbytes} bytes came, and 5000 were wanted at most",
                )
                left -= len(chunks)


def check_spoilt(transport: Transport, make_source: MakeSource) -> None:
    """3: the digest is the publisher's, so that bytes which have changed since do not have it."""
    with made(make_source) as source, _opened(transport, source) as (channel, target, _):
        source.fill(1, content(1))
        source.spoil(1)
        channel.submit([1])
        named = receive_all(channel, 1)
        found = xxhash.xxh3_64_intdigest(target.holds(1))
        require(
            named[1] == xxhash.xxh3_64_intdigest(content(1)) != found,
            3,
            "a changed chunk came with a digest of its own",
        )


def check_taken_back(transport: Transport, make_source: MakeSource) -> None:
    """2: a named chunk was read under the right's generation, also when that generation ends in
    mid-read; then it is refused.
    """
    with made(make_source) as source, _opened(transport, source) as (channel, target, _):
        _fill(source)
        channel.submit(range(len(SIZES)))
        named: dict[int, int | None] = {}
        take(channel.receive(1), named)
        source.take_back()

        def go_on() -> None:
            while len(named) < len(SIZES):  # what was on its way already may come
                take(channel.receive(1), named)

        failure = failure_of(go_on)
        require(
            failure is None or failure.reason in ("refused", "lost"), 4, f"it failed as {failure}"
        )
        for chunk in named:
            require(
                target.holds(chunk) == content(chunk),
                2,
                f"chunk {chunk} was named, and read after it was taken back",
            )
    with made(make_source) as source:
        source.fill(0, content(0))
        before = source.right
        source.take_back()
        failure = failure_of(lambda: _read_one(transport, source, before))
        require(
            failure is not None and failure.reason == "refused",
            2,
            f"an old generation was read, or failed as {failure}",
        )


def check_torn(transport: Transport, make_source: MakeSource) -> None:
    """2: nothing is named that was overwritten while it was copied. The source takes everything
    back at the n-th point at which the read asks for something of the reader's (where a chunk goes,
    whether it was cut): before, between and after the calls that copy. A reader that looks at the
    generation before it copies, and not afterwards, names torn bytes.
    """
    for bytes_max in (SIZES[5], 2**30):  # digested in the cache, and not
        for point in range(TEARS_MAX):
            with made(make_source) as source:
                _fill(source)
                tear = Tear(source, point)
                target = _TearingTarget(source.device, tear)
                channel = transport.open(source.endpoint, source.right, target, TearingCutter(tear))
                try:
                    _check_torn(channel, target, tear, bytes_max)
                finally:
                    channel.close()
                    tear.end()
            if tear.left >= 0:  # the read has no more points than that
                break


def _check_torn(channel: Channel, target: Target, tear: Tear, bytes_max: int) -> None:
    channel.submit(range(len(SIZES)))
    named: dict[int, int | None] = {}
    tear.is_armed = True

    def go_on() -> None:
        while len(named) < len(SIZES):
            take(channel.receive(bytes_max), named)

    failure = failure_of(go_on)
    tear.is_armed = False
    require(failure is None or failure.reason in ("refused", "lost"), 4, f"it failed as {failure}")
    for chunk in named:
        require(
            target.holds(chunk) == content(chunk),
            2,
            f"chunk {chunk} was overwritten while it was copied, and named",
        )


class _TearingTarget(Target):
    def __init__(self, device: Device | None, tear: Tear) -> None:
        super().__init__(device)
        self._tear = tear

    def buffer(self, chunk: int) -> memoryview:
        self._tear.pass_point()
        return super().buffer(chunk)

    def address(self, chunk: int) -> int:
        self._tear.pass_point()
        return super().address(chunk)


def check_rights(transport: Transport, make_source: MakeSource) -> None:
    """4: another registration, generation, content or incarnation is not read, and nothing is
    written.
    """
    with made(make_source) as source:
        source.fill(0, content(0))
        right = source.right
        for other, reasons in (
            (dataclasses.replace(right, registration=RegistrationId("another")), ("refused",)),
            (dataclasses.replace(right, generation=right.generation + 1), ("refused",)),
            (dataclasses.replace(right, content_id=ContentId("another")), ("refused",)),
            (dataclasses.replace(right, incarnation=Incarnation("another")), ("unreachable",)),
        ):
            failure = failure_of(lambda other=other: _read_one(transport, source, other))  # type: ignore[misc]
            require(
                failure is not None and failure.reason in reasons,
                4,
                f"{other} gave {failure}, not {reasons}",
            )


def check_again(transport: Transport, make_source: MakeSource) -> None:
    """1: what a transport keeps from one channel for the next brings nothing that the next one has
    not asked for.
    """
    with made(make_source) as source:
        _fill(source)
        for unread in ([], [0, 5], []):
            with _opened(transport, source) as (channel, target, _):
                channel.submit([2])
                named = receive_all(channel, 1)
                require(
                    list(named) == [2] and target.holds(2) == content(2),
                    1,
                    f"2 was asked for, and {named} arrived",
                )
                if unread:
                    channel.submit(unread)
            require(
                target.is_untouched(0) and target.is_untouched(5),
                1,
                "a chunk came that was not waited for",
            )


def check_lacking(transport: Transport, make_source: MakeSource) -> None:
    """7: a source that lacks chunks says so soon, and what it has; they can be asked for again."""
    with made(make_source) as source, _opened(transport, source) as (channel, target, _):
        source.fill(1, content(1))
        source.fill(2, content(2))
        channel.submit([0, 1, 2, 3])
        named: dict[int, int | None] = {}
        lacking: list[int] = []
        while len(named) + len(lacking) < 4:  # several requests may be answered apart
            started = time.monotonic()
            answer = channel.receive(2**20)
            require(time.monotonic() - started < SOON_S, 7, "it takes long to say what is lacking")
            if isinstance(answer, Lacking):
                lacking += answer.chunks
                require(
                    list(answer.has) == [(1, 2)], 7, f"it has chunks 1 and 2, and says {answer.has}"
                )
            else:
                take(answer, named)
        require(
            sorted(named) == [1, 2], 7, f"chunks 1 and 2 are there, and {sorted(named)} arrived"
        )
        require(
            sorted(lacking) == [0, 3],
            7,
            f"chunks 0 and 3 are lacking, and {lacking} were said to be",
        )
        require(
            target.is_untouched(0) and target.is_untouched(3),
            7,
            "a chunk that is lacking was written",
        )
        source.fill(0, content(0))
        channel.submit([0])
        require(0 in receive_all(channel, 1), 7, "what has come since does not arrive")


def check_cut(transport: Transport, make_source: MakeSource) -> None:
    """5: a cut, from any thread, ends a call that waits, and one that is still to come."""
    with made(make_source) as source, _opened(transport, source) as (channel, _, cutter):
        channel.submit([0])  # which the source lacks
        found: list[ReadFailure | None] = []

        def ask_on() -> None:
            while True:
                _ask_again(channel, channel.receive(1))

        def wait() -> None:
            found.append(failure_of(ask_on))

        thread = threading.Thread(target=wait)
        thread.start()
        cutter.cut()
        thread.join(SOON_S)
        require(not thread.is_alive(), 5, "a call went on after the cut")
        require(found != [None], 5, "a call that was cut off has not failed")
    with made(make_source) as source:
        source.fill(0, content(0))
        cutter = Cutter()
        cutter.cut()
        require(
            failure_of(lambda: _read_one(transport, source, source.right, cutter)) is not None,
            5,
            "it was cut, and reads",
        )


def check_death(transport: Transport, make_source: MakeSource) -> None:
    """4: the end of a source is a failure, in mid-read and before."""
    with made(make_source) as source, _opened(transport, source) as (channel, _, _):
        _fill(source)
        channel.submit([0])
        receive_all(channel, 1)
        source.die()

        def go_on() -> None:
            channel.submit([1, 2])
            receive_all(channel, 2)

        failure = failure_of(go_on)
        require(
            failure is not None and failure.reason in ("lost", "refused"),
            4,
            f"its source has ended: {failure}",
        )
        try:
            failure = failure_of(lambda: _read_one(transport, source, source.right))
        except Unusable:  # another transport may tell more
            return
        require(
            failure is not None and failure.reason in ("unreachable", "refused"),
            4,
            f"it connects to nobody: {failure}",
        )


def check_silence(transport: Transport, make_source: MakeSource) -> None:
    """6: a source that says nothing any more is given up."""
    with made(make_source) as source, _opened(transport, source) as (channel, _, _):
        source.fill(0, content(0))
        if not source.freeze():
            return

        def go_on() -> None:
            channel.submit([0])
            receive_all(channel, 1)

        failure = failure_of(go_on)
        require(
            failure is not None and failure.reason == "stalled",
            6,
            f"a silent source is no failure: {failure}",
        )


def check_threads(transport: Transport, make_source: MakeSource) -> None:
    """8: as many threads as the transport says may drive a channel, and each chunk comes to one of
    them.
    """
    with made(make_source) as source, _opened(transport, source) as (channel, target, _):
        _fill(source)
        named: list[int] = []
        failures: list[BaseException] = []
        lock, submitted = threading.Lock(), threading.Event()

        def drive(chunks: Sequence[int]) -> None:
            try:
                if chunks:
                    channel.submit(chunks)
                    submitted.set()
                while submitted.wait(SOON_S) and len(named) < len(SIZES):
                    answer = channel.receive(4096)
                    with lock:
                        if isinstance(answer, Arrival):
                            named.extend(chunk for chunk, _ in answer.chunks)
            except BaseException as error:
                failures.append(error)

        shares = [
            list(range(len(SIZES)))[first :: transport.lanes] for first in range(transport.lanes)
        ]
        threads = [threading.Thread(target=drive, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
        require(
            not any(thread.is_alive() for thread in threads),
            8,
            "a thread waits for what another one has",
        )
        require(not failures, 8, f"a thread failed: {failures[:1]}")
        require(sorted(named) == list(range(len(SIZES))), 8, f"{sorted(named)} arrived")
        require(
            all(target.holds(chunk) == content(chunk) for chunk in named),
            8,
            "a chunk has other bytes",
        )


CHECKS: Final[Mapping[str, Check]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_bytes,
        check_bytes_max,
        check_spoilt,
        check_taken_back,
        check_torn,
        check_rights,
        check_again,
        check_lacking,
        check_cut,
        check_death,
        check_silence,
        check_threads,
        check_strided_bytes,
        check_strided_lacking,
        check_strided_torn,
        check_strided_rights,
    )
}


# --------------------------------------------------------------------------------------------------
# tools


def _fill(source: Source) -> None:
    for chunk in range(len(SIZES)):
        source.fill(chunk, content(chunk))


@contextlib.contextmanager
def _opened(
    transport: Transport,
    source: Source,
    right: ReadRight | None = None,
    cutter: Cutter | None = None,
) -> Iterator[tuple[Channel, Target, Cutter]]:
    target, cutter = Target(source.device), cutter or Cutter()
    channel = transport.open(source.endpoint, right or source.right, target, cutter)
    try:
        yield channel, target, cutter
    finally:
        channel.close()


def _read_one(
    transport: Transport, source: Source, right: ReadRight, cutter: Cutter | None = None
) -> None:
    target = Target(source.device)
    try:
        with _opened(transport, source, right, cutter) as (channel, target, _):
            channel.submit([0])
            receive_all(channel, 1)
    except ReadFailure:
        require(target.is_untouched(0), 2, "what was refused was written")
        raise


def _ask_again(channel: Channel, answer: Arrival | Lacking) -> None:
    if isinstance(answer, Lacking):
        channel.submit(sorted(answer.chunks))
