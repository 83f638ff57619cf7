"""The checks of the conformance suite that read in pieces: for transports with `strides`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Final

import xxhash

from tensorhub.layouts.reading import Selection
from tensorhub.model.strips import Strip, straight
from tensorhub.testing.checking import (
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
from tensorhub.testing.strided_target import (
    LONG,
    OF,
    SELECTION,
    SIZES,
    StridedTarget,
    selected,
    strided_content,
)
from tensorhub.transport.base import Channel, Cutter, Lacking, Transport

STRIDED_TEARS_MAX: Final = 6  # of one in pieces


def _strides(transport: Transport, source: Source) -> bool:
    """Whether there is anything to check."""
    return transport.strides and ("host" if source.device is None else "device") in transport.fills


@contextlib.contextmanager
def _selecting(
    transport: Transport, source: Source, selection: Selection = SELECTION
) -> Iterator[tuple[Channel, StridedTarget]]:
    target = StridedTarget(source.device, selection=selection)
    right = dataclasses.replace(source.right, selection=selection)
    channel = transport.open(source.endpoint, right, target, Cutter())
    try:
        yield channel, target
    finally:
        channel.close()


def check_strided_bytes(transport: Transport, make_source: MakeSource) -> None:
    """1, 3: chunks of many pieces, short and long ones, arrive with the digests of their bytes in
    their order.
    """
    with made(make_source) as source:
        if not _strides(transport, source):
            return
        for chunk in range(len(SIZES)):
            source.fill(chunk, strided_content(chunk))
        for selection, bytes_max in itertools.product((SELECTION, LONG), (2**16, 2**30)):
            with _selecting(transport, source, selection) as (channel, target):
                wanted = [chunk for chunk in range(len(selection.chunks)) if chunk != 4]
                channel.submit(wanted[:3])
                channel.submit(wanted[3:])
                named = receive_all(channel, len(wanted), bytes_max)
                require(
                    sorted(named) == wanted,
                    1,
                    f"{wanted} were asked for, and {sorted(named)} arrived",
                )
                for chunk, digest in named.items():
                    held = selected(selection, chunk)
                    require(
                        target.holds(chunk) == held,
                        1,
                        f"chunk {chunk} has other bytes than its source",
                    )
                    require(
                        digest == xxhash.xxh3_64_intdigest(held),
                        3,
                        f"chunk {chunk} came with digest {digest}",
                    )
                require(
                    target.is_untouched_beside(wanted),
                    1,
                    "bytes beside the pieces of a chunk were written",
                )


def check_strided_lacking(transport: Transport, make_source: MakeSource) -> None:
    """7: no chunk of many pieces is there before all of the source's bytes are."""
    with made(make_source) as source:
        if not _strides(transport, source):
            return
        wanted = list(range(len(OF)))
        for chunk in range(1, len(SIZES)):
            source.fill(chunk, strided_content(chunk))
        with _selecting(transport, source) as (channel, target):
            channel.submit(wanted)
            lacking: list[int] = []
            while len(lacking) < len(wanted):  # several requests may be answered apart
                answer = channel.receive(2**20)
                require(
                    isinstance(answer, Lacking),
                    7,
                    f"a source that is filling answered with {answer}",
                )
                assert isinstance(answer, Lacking)
                lacking += answer.chunks
                require(not answer.has, 7, f"it says that it has {answer.has}")
            require(
                sorted(lacking) == wanted,
                7,
                f"all of {wanted} are lacking, and {lacking} were said to be",
            )
            require(target.is_untouched_beside(()), 7, "a chunk that is lacking was written")
            source.fill(0, strided_content(0))
            channel.submit(wanted)
            require(
                sorted(receive_all(channel, len(wanted))) == wanted,
                7,
                "what has come since does not arrive",
            )
            for chunk in wanted:
                require(
                    target.holds(chunk) == selected(SELECTION, chunk),
                    1,
                    f"chunk {chunk} has other bytes",
                )


def check_strided_torn(transport: Transport, make_source: MakeSource) -> None:
    """2: nothing of many pieces is named that was overwritten while it was copied: see
    `check_torn`.
    """
    for selection in (SELECTION, LONG):
        _check_torn(transport, make_source, selection)


def _check_torn(transport: Transport, make_source: MakeSource, selection: Selection) -> None:
    count = len(selection.chunks)
    for point in range(STRIDED_TEARS_MAX):
        with made(make_source) as source:
            if not _strides(transport, source):
                return
            for chunk in range(len(SIZES)):
                source.fill(chunk, strided_content(chunk))
            tear = Tear(source, point)
            target = StridedTarget(source.device, tear.pass_point, selection)
            right = dataclasses.replace(source.right, selection=selection)
            channel = transport.open(source.endpoint, right, target, TearingCutter(tear))
            named: dict[int, int | None] = {}
            try:
                channel.submit(range(count))
                tear.is_armed = True

                def go_on(channel: Channel = channel, named: dict[int, int | None] = named) -> None:
                    while len(named) < count:
                        take(channel.receive(2**20), named)

                failure = failure_of(go_on)
                tear.is_armed = False
                require(
                    failure is None or failure.reason in ("refused", "lost"),
                    4,
                    f"it failed as {failure}",
                )
                for chunk in named:
                    require(
                        target.holds(chunk) == selected(selection, chunk),
                        2,
                        f"chunk {chunk} was overwritten, and named",
                    )
            finally:
                channel.close()
                tear.end()
        if tear.left >= 0:
            break


def check_strided_rights(transport: Transport, make_source: MakeSource) -> None:
    """4: bytes outside the source's memory are refused."""
    with made(make_source) as source:
        if not _strides(transport, source):
            return
        source.fill(0, strided_content(0))
        for strip in (
            straight(0, 0, 2),
            straight(len(SIZES), 0, 1),
            Strip(0, 0, 1, 0, len(SIZES) + 1, (), 1),
        ):
            beyond = Selection(((strip,),))

            def read(beyond: Selection = beyond) -> None:
                with _selecting(transport, source, beyond) as (channel, _):
                    channel.submit([0])
                    receive_all(channel, 1)

            failure = failure_of(read)
            require(
                failure is not None and failure.reason == "refused",
                4,
                f"{strip} gave {failure}, not a refusal",
            )
