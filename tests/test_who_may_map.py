"""Who gets memory to map or to open: the owner's user, root, and whom `Options` names, if they have
the full token.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anyio
import numpy as np
import pytest

import tensorhub
from tensorhub.cuda import cupy_device
from tensorhub.errors import StateError, TensorHubError
from tensorhub.messages import NotThisWay
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.secret import read_only_secret, read_only_token
from tensorhub.testing.serving import ServedSource
from tensorhub.transport import segments as shm, unix
from tensorhub.transport.base import Cutter, NotShared, Unusable
from tensorhub.transport.cuda_ipc import CudaIpcOwner, CudaIpcTransport
from tensorhub.transport.dialect import Find
from tensorhub.transport.registry import Local
from tensorhub.transport.shm import ShmOwner, ShmTransport
from tensorhub.types import UNMAPPED_UID, Incarnation, Options
from tests.cuda.double import Double
from tests.rig import BEST, OPTIONS, WAIT_S, cluster, connect, holds, tensors, write
from tests.runtime.data.test_shm_channel import mappings
from tests.runtime.data_rig import Nowhere, waited_out_s

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shm.fault_here() is not None, reason=str(shm.fault_here())),
]
SECRET = b"secret"
READ_ONLY = "a read-only token gives no memory to map"
OTHER_USER = 54_321  # a user whom nobody has


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def shared(content: int) -> Any:
    made = tensorhub.shared_empty_like(tensors())
    write(made, content)
    return made


# --------------------------------------------------------------------------------------------------
# whole fetches


async def test_a_read_only_reader_maps_nothing_and_reads_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tensorhub")
    content = shared(1)
    async with cluster("trainer", "reader", token="secret") as c:
        await (await c.hubs[0].register("m", content)).publish(1)
        async with tensorhub.connect(
            c.address, token=read_only_token("secret"), options=OPTIONS
        ) as hub:
            fetched: Any = await hub.fetch("m", device="cpu")
            assert holds(fetched, 1)
            assert mappings() == []
            assert f"transport='{BEST}' why=" in caplog.text
            assert READ_ONLY in caplog.text
            assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        mine = tensors()
        report = await (await c.hubs[1].register("m", mine)).replicate()
        assert [each.transport for each in report.sources] == ["shm"]
        assert mappings()


async def test_a_read_only_reader_by_shared_memory_alone_is_told_why_not() -> None:
    async with cluster("trainer", token="secret") as c:
        await (await c.hubs[0].register("m", shared(1))).publish(1)
        token = read_only_token("secret")
        async with tensorhub.connect(
            c.address, token=token, transports=["shm"], options=OPTIONS
        ) as hub:
            with pytest.raises(TensorHubError, match=READ_ONLY):
                await hub.fetch("m", device="cpu", timeout=waited_out_s())
        assert mappings() == []


# ------------------------------------------------------------------------------------------------
# what an owner answers


@pytest.fixture(params=["shm", "cuda_ipc"])
def source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServedSource]:
    monkeypatch.setattr(cupy_device, "missing", lambda: None)
    device = Double() if request.param == "cuda_ipc" else None
    with closing(
        ServedSource(
            SECRET, side=CudaIpcOwner() if device is not None else ShmOwner(), device=device
        )
    ) as made:
        yield made


def opened(source: ServedSource, secret: bytes) -> None:
    """Open the best channel that there is for what the source has."""
    local = Local(
        Incarnation("reader"), (secret,), Options(connect_timeout_s=WAIT_S, stall_timeout_s=WAIT_S)
    )
    transport = ShmTransport(local) if source.device is None else CudaIpcTransport(local)
    with closing(transport):
        transport.open(
            source.endpoint, source.right, Nowhere(device=source.device), Cutter()
        ).close()


def asked(source: ServedSource, secret: bytes) -> NotThisWay:
    """What it says, and that it gives nothing, and goes on."""
    sock = unix.connect(source.endpoint.address, WAIT_S, Cutter())
    with BlockingConnection(sock, stall_timeout_s=WAIT_S) as connection:
        connection.handshake(
            ClientHandshake("reader", "reader", secret, os.urandom(NONCE_BYTES)), WAIT_S
        )
        find = Find(source.right.registration, source.right.generation)
        connection.send(source.side.dialect.request(0, find))
        said = connection.receive(FROM_OWNER)
        connection.send(source.side.dialect.request(1, find))
        again = connection.receive(FROM_OWNER)  # a byte with descriptors would come first
    assert isinstance(said, NotThisWay)
    assert again == NotThisWay(1, said.reason, said.is_usual)
    return said


def test_the_full_token_of_the_same_user_is_given_it(source: ServedSource) -> None:
    opened(source, SECRET)


def test_a_read_only_peer_is_given_none(source: ServedSource) -> None:
    with pytest.raises(NotShared, match=READ_ONLY):
        opened(source, read_only_secret(SECRET))
    assert asked(source, read_only_secret(SECRET)).reason == READ_ONLY


def test_a_process_of_another_user_is_given_none(
    source: ServedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix, "peer_uid", lambda connection: OTHER_USER)
    with pytest.raises(
        Unusable, match=rf"user {OTHER_USER} is given no memory .* Options\.shared_memory_uids"
    ):
        opened(source, SECRET)
    assert str(OTHER_USER) in asked(source, SECRET).reason


# --------------------------------------------------------------------------------------------------
# whoever


@pytest.mark.parametrize("mine", [0, 1000, UNMAPPED_UID])
def test_who_is_given_memory(mine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: mine)
    given = {
        uid for uid in (0, 1, 1000, 1001, UNMAPPED_UID) if not unix.why_not_given(uid, (1001,))
    }
    assert given == {0, 1001, mine} - {UNMAPPED_UID}
    assert not unix.why_not_given(0, ())
    assert "user namespace" in unix.why_not_given(UNMAPPED_UID, (UNMAPPED_UID,))
    said = unix.given_to()
    assert (
        "processes of root" in said
        if mine in (0, UNMAPPED_UID)
        else f"user {mine} and root" in said
    )


@pytest.mark.parametrize(
    "wrong", [1000, [1000], ("me",), (-1,), (2**32 - 1,), (True,), (1, UNMAPPED_UID)]
)
def test_options_name_users(wrong: Any) -> None:
    with pytest.raises(StateError, match=r"Options\.shared_memory_uids"):
        Options(shared_memory_uids=wrong)
    assert Options(shared_memory_uids=(0, 1000)).shared_memory_uids == (0, 1000)


# --------------------------------------------------------------------------------------------------
# other users' processes

# It has all that it imports, before it is somebody else and may read no file of root's any more.
READS = """
import os, sys
import numpy as np
from tensorhub import sync
from tensorhub.transport.cuda_ipc import CudaIpcOwner
from tensorhub.transport.shm import ShmOwner
from tensorhub.types import Options

def reads(address, uid):
    mine = {name: np.zeros(4 * 65536, np.uint8) for name in "abc"}
    with sync.connect(address, name=f"of-{uid}", token="secret", options=Options(op_timeout_s=30)) as hub:
        report = hub.register("m", mine).replicate()
    print(report.version, [source.transport for source in report.sources], int(sum(map(np.sum, mine.values()))), flush=True)

address, *uids = sys.argv[1:]
for uid in map(int, uids):
    os.seteuid(0)
    os.setegid(uid)
    os.seteuid(uid)
    reads(address, uid)
"""


@pytest.mark.heavy
@pytest.mark.root
async def test_processes_of_other_users_map_nothing_unless_they_are_named() -> None:
    content = shared(1)
    total = int(sum(np.sum(tensor) for tensor in content.values()))
    named = Options(
        op_timeout_s=WAIT_S, chunk_bytes=OPTIONS.chunk_bytes, shared_memory_uids=(OTHER_USER,)
    )
    users = [0, OTHER_USER, OTHER_USER + 1, UNMAPPED_UID]
    async with cluster(token="secret") as c, connect(c.address, "trainer", named, "secret") as hub:
        await (await hub.register("m", content)).publish(1)
        command = [sys.executable, "-c", READS, c.address, *map(str, users)]
        done = await anyio.run_process(command, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
    rows = done.stdout.decode().splitlines()
    assert len(rows) == len(users)
    for uid, row in zip(users, rows, strict=True):
        assert ("'shm'" in row) == (uid in (0, OTHER_USER)), row
        assert (row[:3], row.rpartition(" ")[2]) == ("1 [", str(total))
    for uid in users[2:]:
        assert f"user {uid}" in done.stderr.decode()
