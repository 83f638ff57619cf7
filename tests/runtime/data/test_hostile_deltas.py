"""A source that lies about deltas: its reader takes none that it did not ask for, or that is longer
than the chunk; and what is made of the others is for the digests to judge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import pytest

from tensorhub import deltas
from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import CHAIN_MAX, DeltasFollow
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport import sockets
from tensorhub.transport.base import Arrival, Cutter, ReadFailure, ReadRight
from tensorhub.transport.registry import Local
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, Options, RegistrationId
from tests.runtime.data_rig import CHUNK_BYTES, SECRET, WAIT_S, answers, manifest_of

pytest.importorskip("zstandard", reason="the extra delta is not installed")

CHUNKS = 4
MANIFEST = manifest_of((CHUNKS * CHUNK_BYTES,))
OLD = bytes(CHUNK_BYTES)
NEW = bytes(range(256)) * (CHUNK_BYTES // 256)
DELTA = deltas.encode(memoryview(OLD), memoryview(bytes(8) + OLD[8:-1] + b"x"), 1) or b""
Frame = Sequence[tuple[int, tuple[bytes, ...]]]  # chunks with their deltas


class Reader:
    """It holds zeros, and asks for all chunks."""

    def __init__(self) -> None:
        self.bytes = bytearray(MANIFEST.nbytes)
        memory = ChunkMemory(MANIFEST, [memoryview(self.bytes)])
        self.base = Base(memory, ContentId("old"), [0] * CHUNKS, bytearray([1]) * CHUNKS)
        self.memory = memory

    def receive(self, frame: Frame, request: int = 0) -> Arrival:
        """What comes of this answer to that request."""
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(sockets.listen("127.0.0.1"))
            source = answers(listener, partial(say, frame, request))
            stack.callback(source.join, WAIT_S)
            options = Options(stall_timeout_s=WAIT_S, connect_timeout_s=WAIT_S)
            way = TcpTransport(Local(Incarnation("reader"), (SECRET,), options))
            stack.callback(way.close)
            right = ReadRight(
                LeaseId("lease"),
                Incarnation("source"),
                RegistrationId("r"),
                7,
                ContentId("new"),
                base=self.base,
                full_rate=0.0,
            )
            endpoint = Endpoint("any", sockets.address_of(listener))
            with contextlib.closing(way.open(endpoint, right, self.memory, Cutter())) as channel:
                channel.submit(range(CHUNKS))
                answer = channel.receive(2 * MANIFEST.nbytes)
                assert isinstance(answer, Arrival)
                return answer


def say(frame: Frame, request: int, connection: BlockingConnection) -> None:
    chunks = tuple([(chunk, 1, tuple(map(len, made))) for chunk, made in frame])
    payload = [memoryview(each) for _, made in frame for each in made]
    connection.send_with_payload(DeltasFollow(request, chunks), payload)


REFUSED: dict[str, Frame] = {
    "a chunk twice": [(0, (DELTA,)), (0, (DELTA,))],
    "no chunk": [],
    "a chunk beyond the last one": [(CHUNKS, (DELTA,))],
    "deltas that are together longer than the chunk": [(0, (OLD,) * CHAIN_MAX)],
    "one byte more than the chunk": [(1, (OLD, b"."))],
}


@pytest.mark.parametrize("frame", REFUSED.values(), ids=REFUSED.keys())
def test_what_was_not_asked_for_is_refused_and_nothing_is_written(frame: Frame) -> None:
    reader = Reader()
    with pytest.raises(ReadFailure):
        reader.receive(frame)
    assert not any(reader.bytes)
    assert all(reader.base.has(chunk) for chunk in range(CHUNKS))


def test_a_delta_of_a_chunk_that_has_no_base_any_more_is_refused() -> None:
    reader = Reader()
    reader.base.spoil(2)
    with pytest.raises(ReadFailure, match="no base"):
        reader.receive([(2, (DELTA,))], request=1)  # the second request: for chunk 2, whole
    assert not any(reader.bytes)


TAKEN: dict[str, tuple[bytes, ...]] = {
    "no delta": (),
    "an empty delta": (b"",),
    "empty deltas": (b"",) * CHAIN_MAX,
    "noise": (NEW[:100],),
    "noise behind a delta": (DELTA, NEW[:100]),
    "a delta twice": (DELTA, DELTA),
}


@pytest.mark.parametrize("made", TAKEN.values(), ids=TAKEN.keys())
def test_any_other_delta_writes_its_chunk_only_which_has_no_base_from_then_on(
    made: tuple[bytes, ...],
) -> None:
    reader = Reader()
    arrival = reader.receive([(1, made)])
    assert arrival.chunks == [(1, 1)]
    assert arrival.deltas == {1: made}
    assert not any(reader.bytes[:CHUNK_BYTES])
    assert not any(reader.bytes[2 * CHUNK_BYTES :])
    assert [reader.base.has(chunk) for chunk in range(CHUNKS)] == [True, False, True, True]
