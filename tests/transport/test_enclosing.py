"""Selections that are read with the source's own chunks that enclose them: what comes out, and what a source may say."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import xxhash

from tensorhub.digests import pack, root_of
from tensorhub.layouts.reading import Part, Reading, Selection
from tensorhub.layouts.resharded import ReshardedManifest, resharded, root_of_grid
from tensorhub.manifest import Digest, Manifest, TensorDescription, build_manifest
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.strips import Strip, straight
from tensorhub.testing.strided_target import SELECTION, SIZES, StridedTarget, selected, strided_content
from tensorhub.transport import enclosing
from tensorhub.transport.base import Arrival, Lacking, NotShared, ReadFailure
from tensorhub.transport.enclosing import EnclosingChannel, Enclosure, Vouched

CHUNK_BYTES = 50_000  # of the source's own chunks: those of the larger regions are several


@cache
def manifest_of(digest: Digest = "xxh3-64") -> Manifest:
    tensors = [TensorDescription(f"t{n}", "uint8", (size,), n << 40, size) for n, size in enumerate(SIZES)]
    return build_manifest(tensors, CHUNK_BYTES, digest)


@cache
def held(digest: Digest = "xxh3-64") -> ChunkMemory:
    return ChunkMemory(manifest_of(digest), [memoryview(strided_content(n)) for n in range(len(SIZES))])


def values_of(memory: ChunkMemory) -> bytes:
    return pack(memory.digests(range(len(memory.sizes))), memory.width)


@dataclass
class SourceDouble:
    """A source, as an `Enclosure` asks it (`listed`) and as the channel of its own chunks. What it says can be changed."""

    memory: ChunkMemory
    manifest: bytes = b""
    values: bytes = b""
    into: Enclosure | None = None
    spoils: Callable[[int, memoryview], object] = lambda chunk, view: None  # what it sends
    makes: bool = True  # its channel makes digests of what has come
    answers: Callable[[Sequence[int]], Arrival | Lacking | None] = lambda chunks: None
    asked: deque[int] = field(default_factory=deque)
    sent: list[int] = field(default_factory=list)
    is_closed: bool = False

    def listed(self, *, digests: bool) -> bytes:
        if digests:
            return self.values or values_of(self.memory)
        return self.manifest or self.memory.manifest.encode()

    def submit(self, chunks: Sequence[int]) -> None:
        self.asked.extend(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        assert self.into is not None
        assert len(self.asked) <= enclosing.SLOTS
        if (said := self.answers(self.asked)) is not None:
            return said
        chunk = self.asked.popleft()
        view = self.into.buffer(chunk)
        if self.memory.is_strided:
            view[:] = b"".join([each for views in self.memory.outgoing(chunk) for each in views])
        else:
            view[:] = self.memory.buffer(chunk)
        self.spoils(chunk, view)
        self.sent.append(chunk)
        made = {chunk: self.into.digest(view)} if self.makes else {}
        return Arrival([(chunk, self.memory.digest(chunk))], 0.0, 0.0, made)

    def close(self) -> None:
        self.is_closed = True


def opened(
    source: SourceDouble, target: Any, selection: Selection = SELECTION, digest: Digest = "xxh3-64"
) -> EnclosingChannel:
    enclosure = Enclosure(selection, Vouched(manifest_of(digest).manifest_id, root_of(values_of(held(digest)))))
    enclosure.learn(source)  # type: ignore[arg-type]
    source.into = enclosure
    return EnclosingChannel(source, enclosure, target)


def read_all(channel: EnclosingChannel, count: int) -> tuple[dict[int, int | None], int]:
    found: dict[int, int | None] = {}
    excess = 0
    channel.submit(range(count))
    while len(found) < count:
        answer = channel.receive(2**20)
        assert isinstance(answer, Arrival)
        assert answer.made == dict(answer.chunks)
        found.update(answer.chunks)
        excess += answer.excess_bytes
    return found, excess


@pytest.mark.parametrize("digest", ["xxh3-64", "sha-256"])
@pytest.mark.parametrize("makes", [True, False])
@pytest.mark.parametrize("group_bytes", [1, 200_000, 2**30])
def test_every_form_of_strips_arrives(
    digest: Digest, makes: bool, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enclosing, "GROUP_BYTES", group_bytes)
    target, source = StridedTarget(), SourceDouble(held(digest), makes=makes)
    channel = opened(source, target, digest=digest)
    found, excess = read_all(channel, len(SELECTION.chunks))
    of = held(digest).selected(SELECTION)
    for chunk in range(len(SELECTION.chunks)):
        assert target.holds(chunk) == selected(SELECTION, chunk)
        assert found[chunk] == of.digest(chunk)
    assert target.is_untouched_beside(range(len(SELECTION.chunks)))
    assert excess == max(0, sum(held().sizes[chunk] for chunk in source.sent) - sum(SELECTION.sizes)) or group_bytes < 2**30
    if group_bytes == 2**30:
        assert source.sent == sorted(set(source.sent))  # each of its own chunks once
    assert channel.receive(1) == Arrival((), 0.0, 0.0)
    channel.close()
    assert source.is_closed


def test_what_own_chunks_have_of_a_selection_is_all_of_it() -> None:
    """Of selections at random: bytes that are put together from own chunks are those of the strips, in their order."""
    made = random.Random(7)
    for _ in range(60):
        region = made.choice((1, 2, 5))
        run = made.randint(1, 40)
        loops = tuple((made.randint(1, 9), made.randint(run, 300)) for _ in range(made.randint(0, 2)))
        extent = sum((times - 1) * apart for times, apart in loops) + run
        length = made.randint(1, 4)
        step = made.randint(-200, 400)
        reach = abs(step) * (length - 1)
        first = made.randint(0, SIZES[region] - extent - reach) if extent + reach < SIZES[region] else None
        if first is None:
            continue
        strip = Strip(region, first + (reach if step < 0 else 0), 0, step if length > 1 else 0, length, loops, run)
        selection = Selection(((strip, straight(0, 0, 1)),))
        target, source = StridedTarget(selection=selection), SourceDouble(held())
        read_all(opened(source, target, selection), 1)
        assert target.holds(0) == selected(selection, 0), strip


@pytest.mark.parametrize("what", ["manifest", "digests", "too few digests"])
def test_a_source_that_has_another_grid_is_not_read(what: str) -> None:
    source, target = SourceDouble(held()), StridedTarget()
    if what == "manifest":
        source.manifest = replace(manifest_of(), metadata=b"other").encode()
    else:
        values = values_of(held())
        source.values = values[:-8] if what == "too few digests" else values[:-1] + bytes([values[-1] ^ 1])
    with pytest.raises(ReadFailure, match=r"corrupt: the source has (another manifest|other digests)") as caught:
        opened(source, target)
    assert caught.value.chunk is None
    assert target.is_untouched_beside(())


def test_a_selection_that_is_not_of_the_source_is_refused() -> None:
    with pytest.raises(ReadFailure, match="refused: that selection is not of this memory"):
        read_all(opened(SourceDouble(held()), StridedTarget(), Selection(((straight(0, 0, 2),),))), 1)


@pytest.mark.parametrize("makes", [True, False])
def test_damaged_bytes_are_found_although_they_come_with_their_digest(makes: bool) -> None:
    def spoil(chunk: int, view: memoryview) -> None:
        view[chunk % view.nbytes] ^= chunk == 6

    source, target = SourceDouble(held(), spoils=spoil, makes=makes), StridedTarget()
    channel = opened(source, target)
    with pytest.raises(ReadFailure, match="corrupt: its own chunk 6 does not have its digest") as caught:
        read_all(channel, len(SELECTION.chunks))
    assert caught.value.chunk == 6
    assert caught.value.bytes_discarded == sum(held().sizes[chunk] for chunk in source.sent)
    assert target.is_untouched_beside(())  # nothing was put where it belongs


def test_a_source_that_lacks_its_own_chunks_or_is_lost_is_given_up() -> None:
    source = SourceDouble(held(), answers=lambda chunks: Lacking(tuple(chunks), ()))
    with pytest.raises(ReadFailure, match="refused: it lacks a chunk of its own"):
        read_all(opened(source, StridedTarget()), 1)

    source = SourceDouble(held())

    def lose(chunks: Sequence[int]) -> None:
        if len(source.sent) == 2:
            raise ReadFailure("lost", "gone", bytes_discarded=5)

    source.answers = lose
    with pytest.raises(ReadFailure, match="lost: gone") as caught:
        read_all(opened(source, StridedTarget()), len(SELECTION.chunks))
    assert caught.value.bytes_discarded == 5 + sum(held().sizes[chunk] for chunk in source.sent)


def test_a_transport_that_tells_nothing_of_the_grid_is_no_way() -> None:
    enclosure = Enclosure(SELECTION, Vouched("", b""))
    with pytest.raises(NotShared):
        _ = enclosure.sizes
    assert enclosure.spans == []


# ------------------------------------------------------------------------------- a source that has read it in another layout

ROWS, WIDTH, CUT = 60, 300, 110  # its region, which it has read of two others: the columns before CUT, and the rest


@cache
def resharded_grid() -> ReshardedManifest:
    places = [
        Strip(0, row * WIDTH + first, 0, 0, 1, ((10, WIDTH),), end - first)
        for row in range(0, ROWS, 10)
        for first, end in ((0, CUT), (CUT, WIDTH))
    ]
    parts = tuple(Part(n, (n,), Selection((), of=f"rank {n}"), tuple(range(n, len(places), 2))) for n in range(2))
    reading = Reading(tuple([(each,) for each in places]), tuple([each.nbytes for each in places]), parts)
    tensor = TensorDescription("w", "uint8", (ROWS, WIDTH), 0, ROWS * WIDTH)
    return resharded(build_manifest([tensor], CHUNK_BYTES, "xxh3-64"), "xxh3-64", CHUNK_BYTES, reading, "its grid")


def of_another_layout(selection: Selection) -> tuple[SourceDouble, Enclosure, StridedTarget, bytes]:
    """A source, what it must be, where a selection of it goes, and its bytes."""
    content = random.Random(3).randbytes(ROWS * WIDTH)
    memory = ChunkMemory(resharded_grid(), [memoryview(bytearray(content))])
    # What is known of it has no regions: `layouts.origin_grids`.
    found = ReshardedManifest((), (), CHUNK_BYTES, "xxh3-64", "", b"", resharded_grid().reading, "its grid")
    vouched = Vouched("its grid", root_of_grid(found, values_of(memory)), found)
    return SourceDouble(memory), Enclosure(selection, vouched), StridedTarget(selection=selection), content


ROWS_OF_IT = Selection(tuple([(straight(0, first * WIDTH, 7 * WIDTH),) for first in range(0, ROWS - 7, 7)]))
COLUMNS_OF_IT = Selection(tuple([(Strip(0, first, 0, 0, 1, ((ROWS, WIDTH),), 50),) for first in (0, 100, 250)]))


@pytest.mark.parametrize("selection", [ROWS_OF_IT, COLUMNS_OF_IT])
def test_what_a_source_has_read_in_another_layout_encloses(selection: Selection) -> None:
    source, enclosure, target, content = of_another_layout(selection)
    enclosure.learn(source)  # type: ignore[arg-type]
    source.into = enclosure
    assert enclosure.is_strided
    found, _ = read_all(EnclosingChannel(source, enclosure, target), len(selection.chunks))
    for chunk, strips in enumerate(selection.chunks):
        places = [at + n for strip in strips for _, at in strip.places() for n in range(strip.run)]
        wanted = bytes([content[at] for at in places])
        assert target.holds(chunk) == wanted
        assert found[chunk] == xxhash.xxh3_64_intdigest(wanted)


def test_chunks_of_its_that_have_nothing_of_a_selection_are_not_read() -> None:
    """Though they lie between those that have."""
    source, enclosure, target, _ = of_another_layout(Selection((COLUMNS_OF_IT.chunks[0],)))
    enclosure.learn(source)  # type: ignore[arg-type]
    source.into = enclosure
    read_all(EnclosingChannel(source, enclosure, target), 1)
    assert sorted(source.sent) == [*range(0, len(enclosure.sizes), 2)]


@pytest.mark.parametrize("what", ["bytes", "digests", "which of them"])
def test_a_source_of_another_layout_that_lies_is_found(what: str) -> None:
    source, enclosure, target, _ = of_another_layout(ROWS_OF_IT)
    if what == "bytes":
        source.memory = spoilt(source.memory)
        source.values = values_of(of_another_layout(ROWS_OF_IT)[0].memory)
    elif what == "digests":
        source.memory = spoilt(source.memory)
    else:  # those of one selection for those of the other
        values = values_of(source.memory)
        source.values = values[8:] + values[:8]

    def read() -> None:
        enclosure.learn(source)  # type: ignore[arg-type]
        source.into = enclosure
        read_all(EnclosingChannel(source, enclosure, target), len(ROWS_OF_IT.chunks))

    with pytest.raises(ReadFailure, match=r"corrupt: (the source has other digests|its own chunk \d+ does not)"):
        read()
    assert target.is_untouched_beside(())


def spoilt(memory: ChunkMemory) -> ChunkMemory:
    region = bytearray(random.Random(3).randbytes(ROWS * WIDTH))
    region[1234] ^= 1
    return ChunkMemory(memory.manifest, [memoryview(region)])
