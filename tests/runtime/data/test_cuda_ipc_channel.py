"""Reading out of another process' GPU memory: with a stand-in for the device
(tests/cuda/double.py), within one process.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anyio.to_thread
import pytest

import tensorhub
from tensorhub.cuda import cupy_device
from tensorhub.cuda.device import HANDLE_BYTES, Allocation
from tensorhub.messages import TRANSPORT_BYTES_MAX, ChunksLie, NotThisWay
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport import cuda_ipc as ipc, segments as shm, unix
from tensorhub.transport.base import Channel, Cutter, NotShared, ReadFailure, ReadRight, Unusable
from tensorhub.transport.cuda_ipc import (
    ALLOCATIONS_MAX,
    DIALECT,
    AllocationsAre,
    CudaIpcTransport,
    Imports,
    OnDevice,
)
from tensorhub.transport.one_sided import Piece
from tensorhub.transport.segments import Segment
from tensorhub.transport.shm import Mapped
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, RegistrationId
from tests.cuda.double import Double
from tests.cuda.own import Own
from tests.rig import cluster
from tests.runtime.data_rig import WAIT_S, Nowhere, answers
from tests.transport.patience import local

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shm.fault_here() is not None, reason=str(shm.fault_here())),
]
IS_THIS_PROCESS = unix.is_this_process
RIGHT = ReadRight(LeaseId("l"), Incarnation("source"), RegistrationId("r"), 5, ContentId("c"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _as_if_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_device, "missing", lambda: None)
    monkeypatch.setattr(unix, "is_this_process", lambda descriptor: False)


# --------------------------------------------------------------------------------------------------
# when it is chosen


async def test_a_gpu_reads_a_gpu_and_its_handle_is_opened_once() -> None:
    theirs, mine = Double(), Double()
    mine._allocations = theirs._allocations  # one GPU, two processes
    source, target = Own(theirs, 1), Own(mine, 0)
    async with cluster("trainer", "reader") as made:
        published, weights = (
            await source.register(made.hubs[0]),
            await target.register(made.hubs[1]),
        )
        for version in (1, 2, 3):
            source.fill(version)
            await published.publish(version)
            report = await weights.update()
            assert [(each.transport, each.outcome) for each in report.sources] == [
                ("cuda_ipc", "used")
            ]
            assert target.holds(version)
            assert len(mine.opened) == 1
            await published.unpublish()
        assert theirs.opened == []
    gc.collect()
    assert mine.opened == []


def test_a_forked_child_is_another_process() -> None:
    program = """import os; from tensorhub.transport.cuda_ipc import this_process
before = this_process(); assert len(before) == 16
child = os.fork()
assert (this_process() == before) == bool(child)
if child: raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S).returncode == 0


@pytest.mark.parametrize("where", ["host source", "host reader", "expandable", "left out"])
async def test_else_it_is_tcp(where: str, caplog: pytest.LogCaptureFixture) -> None:
    device = Double()
    source, target = Own(device, 1), Own(device, 0)
    if where == "expandable":
        device.unexported = "it is in an expandable segment of torch: leave expandable_segments out"
    transports = ("tcp",) if where == "left out" else None
    async with cluster("trainer") as made:
        await (await source.register(made.hubs[0], on_host=where == "host source")).publish(1)
        connecting = tensorhub.connect(
            made.coordinator.address, name="reader", token="", transports=transports
        )
        async with connecting as hub:
            report = await (await target.register(hub, on_host=where == "host reader")).replicate()
    assert ([each.transport for each in report.sources], device.opened) == (["tcp"], [])
    assert target.holds(1)
    said = [
        record.getMessage()
        for record in caplog.records
        if "transport_unusable" in record.getMessage()
    ]
    assert len(said) == (1 if where == "expandable" else 0)
    assert all("leave expandable_segments out" in text for text in said)


# --------------------------------------------------------------------------------------------------
# allocations


def test_allocations_are_named_once_and_closed_with_their_last_use() -> None:
    device = Double()
    first, second = device.bytes_of(bytearray(100)), device.bytes_of(bytearray(50))
    places = [
        (second.address, 50),
        (first.address + 90, 10),
        (first.address, 10),
        (first.address + 40, 20),
    ]
    found = ipc.export(device, places)
    assert sorted((each.address, each.nbytes) for each in found) == sorted(
        [(first.address, 100), (second.address, 50)]
    )
    imports = Imports()
    opened = imports.open(device, found)
    assert imports.open(device, found[:1]) == opened[:1]
    assert sorted(device.opened) == sorted([first.address, second.address])
    imports.sweep(kept_s=0)  # a channel uses them still
    assert (len(imports), len(device.opened)) == (0, 2)
    del opened
    gc.collect()
    assert device.opened == []


# --------------------------------------------------------------------------------------------------
# sources that lie


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    made = unix.listen()
    made.setblocking(True)
    yield made
    made.close()


def said_by(
    listener: socket.socket, device: Double, say: Callable[[BlockingConnection], object]
) -> Channel:
    """A channel to a source that answers so to the question for its allocations."""

    thread = answers(listener, say)
    endpoint = Endpoint("cuda_ipc", unix.address_of(listener))
    transport = CudaIpcTransport(local())
    try:
        return transport.open(endpoint, RIGHT, Nowhere(device=device), Cutter())
    finally:
        transport.close()  # it may have kept the connection
        thread.join(WAIT_S)


HANDLE = bytes(HANDLE_BYTES)
TELLS = AllocationsAre(b"p" * 16, ((1, 2, HANDLE),), (0, 4096))


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (NotThisWay(0, "expandable", is_usual=False), Unusable, "expandable"),
        (NotThisWay(0, "read-only", is_usual=True), NotShared, "read-only"),
        (TELLS, Unusable, "its memory cannot be opened"),
        (replace(TELLS, words=(0, 2**40)), Unusable, "is said to have"),
        (replace(TELLS, allocations=((1, 2, b"short"),)), ReadFailure, "a handle has 64 bytes"),
        (ChunksLie(0, ((0, 0, 0),), 0), ReadFailure, "a ChunksLie is no message of cuda_ipc"),
    ],
)
async def test_what_cannot_be_opened_is_said_with_the_reason(
    listener: socket.socket, said: Any, error: type[Exception], text: str
) -> None:
    device, segment = Double(), Segment(4096)

    def say(connection: BlockingConnection) -> None:
        is_told = isinstance(said, AllocationsAre)
        connection.send(DIALECT.reply(0, said) if is_told else said)
        if is_told:
            connection.send_descriptors([segment.descriptor])

    with pytest.raises(error, match=text):
        await anyio.to_thread.run_sync(said_by, listener, device, say)
    assert device.opened == []


PRETENDER = """import contextlib, sys
from tensorhub.errors import TensorHubError
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.handshake import NONCE_BYTES, ServerHandshake
from tensorhub.transport import unix
from tensorhub.transport.cuda_ipc import DIALECT, AllocationsAre
from tensorhub.transport.segments import Segment
listener = unix.listen()
listener.setblocking(True)
print(unix.address_of(listener), flush=True)
accepted, _ = listener.accept()
words = Segment(4096)
said = AllocationsAre(bytes.fromhex(sys.argv[1]), ((4096, 2**40, bytes(64)),), (0, 4096))
with contextlib.suppress(TensorHubError, OSError), BlockingConnection(accepted, stall_timeout_s=120) as connection:
    connection.handshake(ServerHandshake("owner", "source", [b"a secret of the test"], bytes(NONCE_BYTES)), 120)
    connection.receive(FROM_READER)
    connection.send(DIALECT.reply(0, said))
    connection.send_descriptors([words.descriptor])
    connection.receive(FROM_READER)
"""


def test_who_only_says_that_it_is_this_process_is_not_read_by_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be anything: a copy from there would end this process. (Each reader is told its
    name.)
    """
    monkeypatch.setattr(unix, "is_this_process", IS_THIS_PROCESS)
    device = Double()
    transport = CudaIpcTransport(local())
    with subprocess.Popen(
        [sys.executable, "-c", PRETENDER, ipc.this_process().hex()],
        stdout=subprocess.PIPE,
        text=True,
    ) as pretender:
        assert pretender.stdout is not None
        endpoint = Endpoint("cuda_ipc", pretender.stdout.readline().strip())
        with pytest.raises(Unusable, match="its memory cannot be opened"):
            transport.open(endpoint, RIGHT, Nowhere(device=device), Cutter())
        assert pretender.wait(WAIT_S) == 0


def test_only_what_was_opened_is_read() -> None:
    device, segment = Double(), Segment(4096)
    theirs, mine = device.bytes_of(bytearray(b"12345678")), device.allocate(8)
    words = Mapped([(50_000, shm.MappedSegment(segment.descriptor, 4096))])
    source = OnDevice(device, [(1000, 8, theirs.address)], words)

    def read(there: int, word: int) -> bool:
        source.copy([Piece(mine.address, there, 8)])
        return source.is_unchanged(word, 5)

    for there, word in ((999, 50_000), (1001, 50_000), (1000, 49_999), (1000, 50_000 + 4089)):
        with pytest.raises(OSError, match="it is in nothing"):
            read(there, word)
    segment.bytes_at(8, 8)[:] = (5).to_bytes(8, "little")
    assert not read(1000, 50_000)
    assert read(1000, 50_008)
    assert bytes(mine.storage) == b"12345678"  # type: ignore[call-overload]
    assert not source.is_unchanged(50_000, 0)
    handle = theirs.address.to_bytes(HANDLE_BYTES, "little")
    assert ipc.export(device, [(theirs.address, 8)]) == [Allocation(theirs.address, 8, handle)]
    assert ALLOCATIONS_MAX * (HANDLE_BYTES + 22) < TRANSPORT_BYTES_MAX - 1000  # they fit a message
