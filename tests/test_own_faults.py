"""What fails in a reader's own process is said to be the reader's: its source is not blamed, and is
read as before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub.errors import RegistrationError
from tests.rig import BEST, CHUNK_BYTES, cluster, equal, holds, tensors, write

_libc = ctypes.CDLL(None, use_errno=True)
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def protect(tensor: Any, access: int) -> None:
    """The pages of a tensor that begins with a page."""
    address, nbytes = (
        tensor.__array_interface__["data"][0],
        -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE,
    )
    assert not _libc.mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(access)
    )


def protectable(content: int | None = None) -> dict[str, Any]:
    """As `tensors`, each in pages of its own."""
    made = {
        name: np.frombuffer(mmap.mmap(-1, each.nbytes, PRIVATE), np.uint8)
        for name, each in tensors().items()
    }
    if content is not None:
        write(made, content)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """With the bytes of `tensors(1)`, one tensor behind the other."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"".join(each.tobytes() for each in tensors(1).values()))
    return path


def mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of the file in a read-only mapping, as a loader of checkpoints makes them."""
    with file.open("rb") as opened:
        whole = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        # torch says itself that this cannot be written
        warnings.simplefilter("ignore", UserWarning)
        nbytes = 4 * CHUNK_BYTES
        return {
            name: torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=place * nbytes)
            for place, name in enumerate("abc")
        }


async def test_a_read_only_mapping_is_published_and_not_filled(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tensorhub")
    theirs, mine = mapped(file), tensors()  # longer than the cluster: the mapping has a descriptor
    async with cluster("trainer", "rollout") as c:
        weights = await c.hubs[0].register("m", theirs)
        await weights.publish(1)
        stuck = await c.hubs[1].register(
            "m", {"a": mine["a"], **{name: theirs[name] for name in "bc"}}
        )
        for call in (stuck.replicate, stuck.update, stuck.prefetch) * 2:
            with pytest.raises(
                RegistrationError, match=rf"^2 tensor\(s\) .*'b' \(a mapping of {file}\), 'c' "
            ) as caught:
                await call()
            assert (caught.value.memory, caught.value.retryable) == ("intact", False)
        assert stuck.state == "empty"
        assert not mine["a"].any()
        await stuck.close()
        reader = await c.hubs[1].register("m", mine)
        report = await reader.replicate(1)
        assert [(each.transport, each.outcome) for each in report.sources] == [(BEST, "used")]
        assert holds(mine, 1)
        assert not [
            each for each in caplog.messages if "source_failed" in each or "transport_left" in each
        ]


async def test_what_is_left_alone_need_not_be_writable(file: Path) -> None:
    given, mine, kept = tensors(1), tensors(), mapped(file)
    kept |= {name: torch.from_numpy(mine[name]) for name in "ab"}
    async with cluster("trainer", "rollout") as c:
        await (await c.hubs[0].register("m", given)).publish(1)
        reader = await c.hubs[1].register("m", kept, sources={"c": []}, partial=True)
        await reader.replicate(1)
        assert equal({name: mine[name] for name in "ab"}, {name: given[name] for name in "ab"})


@pytest.mark.parametrize("transport", ["tcp", "cma"])
async def test_memory_that_becomes_read_only_is_named_when_it_is_written(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """More often than a transport may fail before it is left. The kernel says the same of either
    end's memory.
    """
    if transport == "cma" and BEST != "cma":
        pytest.skip("cma cannot be used here")
    caplog.set_level(logging.INFO, "tensorhub")
    async with cluster("trainer", "rollout", transports=[transport]) as c:
        given, mine = tensors(1), protectable()
        weights = await c.hubs[0].register("m", given)
        await weights.publish(1)
        reader = await c.hubs[1].register("m", mine)
        await reader.replicate(1)
        for version in range(2, 7):
            async with weights.mutate(version):
                write(given, version)
            protect(mine["b"], mmap.PROT_READ)
            with pytest.raises(
                RegistrationError, match=r"^1 tensor\(s\) .*cannot be written.*: 'b'\. "
            ) as caught:
                await reader.update(version)
            assert (caught.value.memory, reader.state) == ("torn", "torn")
            protect(mine["b"], mmap.PROT_READ | mmap.PROT_WRITE)
            report = await reader.update(version)
            assert [(each.transport, each.outcome) for each in report.sources] == [
                (transport, "used")
            ]
            assert holds(mine, version)
        assert not [
            each for each in caplog.messages if "source_failed" in each or "transport_left" in each
        ]
