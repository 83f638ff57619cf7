"""What a source says of where its regions are is hostile: it costs the reader an error, and no byte
of anybody else.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensorhub.errors import ProtocolError
from tensorhub.layouts.reading import Selection
from tensorhub.memory.addresses import address_of
from tensorhub.memory.strided import Stream, blocks
from tensorhub.model.strips import Strip, straight
from tensorhub.transport import cma, dialect
from tensorhub.transport.base import Destination
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.dialect import FindRegions, RegionsAre
from tensorhub.transport.one_sided import StridedSource
from tensorhub.transport.segments import MappedSegment, Segment
from tensorhub.transport.shm import Mapped

NEVER = (1, 2**62, 2**63 - 2**20)  # addresses of nothing


class Client:
    """Whose source says that its regions are there."""

    def __init__(self, selection: Selection, addresses: Sequence[int]) -> None:
        self.right = SimpleNamespace(selection=selection, registration="r", generation=7)
        self.asked: list[int] = []
        self._addresses = addresses

    def ask(self, asked: FindRegions, reply: type[RegionsAre]) -> RegionsAre:
        self.asked.append(asked.first)
        return reply(tuple(self._addresses[asked.first : asked.first + dialect.REGIONS_MAX]))


def places(client: Client) -> StridedSource:
    destination = SimpleNamespace(sizes=client.right.selection.sizes)
    return StridedSource(cast(ReadClient, client), cast(Destination, destination))


def test_only_the_pages_that_are_needed_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "REGIONS_MAX", 4)
    monkeypatch.setattr("tensorhub.transport.one_sided.REGIONS_MAX", 4)
    client = Client(
        Selection(((straight(1, 0, 8), Strip(9, 3, 1, 0, 2, (), 5)),)), range(1000, 1012)
    )
    source = places(client)
    assert client.asked == [0, 8]
    (one, two) = source.stream(0).take(18)
    assert (one.cells, list(two.cells)) == ([1001], [1012, 1013])
    assert source.run_bytes == 6


def test_all_pages_between_the_ends_of_a_strip_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialect, "REGIONS_MAX", 4)
    monkeypatch.setattr("tensorhub.transport.one_sided.REGIONS_MAX", 4)
    client = Client(Selection(((Strip(1, 0, 1, 0, 9, (), 2),),)), range(1000, 1012))
    (run,) = places(client).stream(0).take(18)
    assert client.asked == [0, 4, 8]
    assert list(run.cells) == list(range(1001, 1010))


def test_a_source_with_too_few_regions_lies() -> None:
    with pytest.raises(ProtocolError, match="a source with 3 regions has chunks in 5"):
        places(Client(Selection(((straight(4, 0, 8),),)), [0, 0, 0]))


@pytest.mark.skipif(cma.fault_here() is not None, reason=str(cma.fault_here()))
@pytest.mark.parametrize("address", NEVER)
def test_cma_reads_nothing_where_nothing_is(address: int) -> None:
    room = bytearray(96)
    made = Stream(blocks([Strip(0, 0, 0, 0, 1, ((3, 4096),), 32)], [address])).take(96)
    with pytest.raises(OSError, match=r"."):
        cma.gather(os.getpid(), made, address_of(memoryview(room)))


@pytest.mark.parametrize(
    "strip", [Strip(0, 0, 0, 0, 1, ((3, 4096),), 32), Strip(0, 5000, 0, -4999, 2, (), 60)]
)
def test_shm_reads_nothing_beyond_a_segment(strip: Strip) -> None:
    segment = Segment(8192)
    memory: Any = segment.bytes_at(0, 8192)
    memory[:] = os.urandom(8192)
    mapped = MappedSegment(segment.descriptor, segment.nbytes)
    source = Mapped([(10**12, mapped)])
    room = bytearray(200)
    here = address_of(memoryview(room))
    with pytest.raises(OSError, match="nothing that was shared"):
        source.gather(list(blocks([strip], [10**12 + 4096])), here)
    with pytest.raises(OSError, match="nothing that was shared"):
        source.gather(list(blocks([strip], [10**12 - 8])), here)
    assert not any(room)
    assert source.is_short
    source.gather(list(blocks([strip._replace(loops=(), length=1)], [10**12])), here)
    assert room[: strip.run] == ctypes.string_at(address_of(memory) + strip.offset, strip.run)
