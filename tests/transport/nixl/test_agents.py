"""Agents: what they expose and for how long, and reads that nobody waits for any more. Without
NIXL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pytest

from tensorhub.errors import TransportUnavailable
from tensorhub.transport.base import NotShared
from tensorhub.transport.nixl import agents as nixl, reading as nixl_reading
from tensorhub.transport.nixl.agents import Exposures, OnGpu
from tensorhub.transport.nixl.reading import (
    LANDINGS_MAX,
    SLOT_BYTES,
    Agents,
    Remote,
    check_metadata,
)
from tensorhub.transport.one_sided import Piece
from tensorhub.types import RegistrationId
from tests.cuda.double import Double
from tests.runtime.fake_nixl import Fabric, fabric

__all__ = ["fabric"]

Array = ctypes.Array[ctypes.c_char]
R = RegistrationId("r")


def place_of(array: Array) -> tuple[int, int]:
    return ctypes.addressof(array), ctypes.sizeof(array)


class Rig:
    """Bytes that are exposed, and where they are read to."""

    def __init__(self, nbytes: int = 5 * SLOT_BYTES + 7) -> None:
        self.there = ctypes.create_string_buffer(os.urandom(nbytes), nbytes)
        self.here = ctypes.create_string_buffer(nbytes)
        self.exposures, self.agents = Exposures(), Agents()
        self.exposed = self.exposures.of(R, [place_of(self.there)], self)
        self.is_over = False

    def remote(self, stall_timeout_s: float = 5.0) -> Remote:
        return Remote(
            self.agents,
            self.exposed.name,
            self.exposed.metadata,
            lambda: self.is_over,
            stall_timeout_s,
        )

    def whole(self) -> list[Piece]:
        return [Piece(place_of(self.here)[0], *place_of(self.there))]

    def close(self) -> None:
        self.agents.close()
        self.exposures.close()


# --------------------------------------------------------------------------------------------------
# sources


def test_memory_is_kept_and_read_until_its_exposure_ends(fabric: Fabric) -> None:
    rig = Rig()
    places = [place_of(rig.there)]
    assert rig.exposures.of(R, places, rig) is rig.exposed
    other = rig.exposures.of(R, [place_of(rig.here)], rig)  # it is elsewhere now
    assert other is not rig.exposed
    assert rig.exposed.memory is None
    assert rig.exposed.name not in fabric.agents
    rig.exposures.end(R)
    rig.exposures.end(R)
    assert other.name not in fabric.agents
    rig.close()
    assert not fabric.agents
    with pytest.raises(TransportUnavailable, match="about to end"):
        rig.exposures.of(R, places, rig)


def test_what_is_too_much_for_an_agent_is_read_otherwise(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, exposures = mmap.PAGESIZE, Exposures()
    with pytest.raises(NotShared, match="pack_bytes"):
        exposures.of(R, [(2 * page * n, 1) for n in range(nixl.PLACES_MAX + 1)], None)
    monkeypatch.setattr(nixl, "AGENT_BYTES_MAX", 64)
    with pytest.raises(NotShared, match="pack_bytes"):
        exposures.of(R, [(4096, 1)], None)
    assert not fabric.agents


def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'tensorhub-ros\[nixl\]'"):
        Agents()


def test_an_environment_without_rdma_is_left_as_it_was(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_MODULES", raising=False)
    Agents().close()
    assert "UCX_MODULES" not in os.environ


# --------------------------------------------------------------------------------------------------
# readers


def test_what_is_read_is_copied_whole(fabric: Fabric) -> None:
    rig = Rig()
    remote = rig.remote()
    for _ in range(3):
        remote.copy(rig.whole())
        assert rig.here.raw == rig.there.raw
        ctypes.memset(rig.here, 0, ctypes.sizeof(rig.here))
    assert "1 landings, 0 reads left" in repr(remote)
    start = place_of(rig.there)[0]
    at = -start % 8
    word = int.from_bytes(rig.there.raw[at : at + 8], sys.byteorder)
    assert remote.is_unchanged(start + at, word)
    assert not remote.is_unchanged(start + at, word ^ 1)
    remote.close()
    rig.close()
    assert not fabric.agents


def test_what_is_not_exposed_is_not_read(fabric: Fabric) -> None:
    rig = Rig()
    remote = rig.remote()
    for wrong in (
        Piece(place_of(rig.here)[0], place_of(rig.there)[0] - 1, 8),
        Piece(place_of(rig.here)[0], 0, 8),
    ):
        with pytest.raises(OSError, match="cannot read there"):
            remote.copy([wrong])
    remote.copy(rig.whole())
    remote.close()
    rig.close()


def test_a_read_that_was_given_up_writes_nowhere_and_its_agent_is_replaced(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reading, "GRACE_S", 0.0)
    rig = Rig()
    first, second = rig.remote(), rig.remote()
    fabric.holds = rig.is_over = True
    with pytest.raises(OSError, match="has ended"):
        first.copy(rig.whole())
    spent = set(fabric.agents)
    fabric.let_go()  # what it had asked for comes now
    assert not any(rig.here.raw)
    rig.is_over = False
    third = rig.remote()  # by a new agent, beside those that still use the old one
    (fresh,) = set(fabric.agents) - spent
    second.copy(rig.whole())
    assert rig.here.raw == rig.there.raw
    first.close()
    assert set(fabric.agents) > spent
    second.close()
    assert set(fabric.agents) == {rig.exposed.name, fresh}
    third.copy(rig.whole())
    third.close()
    rig.close()
    assert not fabric.agents


def test_a_read_that_brings_nothing_has_stalled(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_reading, "GRACE_S", 0.0)
    rig = Rig()
    remote = rig.remote(stall_timeout_s=0.01)
    fabric.holds = True
    with pytest.raises(TimeoutError, match=r"brought nothing for 0\.01 s"):
        remote.copy(rig.whole())
    remote.close()
    rig.close()
    assert not fabric.agents


def test_a_read_that_fails_ends_its_agent(fabric: Fabric) -> None:
    rig = Rig()
    remote = rig.remote()
    fabric.fails = True
    with pytest.raises(OSError, match="has ended as ERR"):
        remote.copy(rig.whole())
    remote.close()
    assert set(fabric.agents) == {rig.exposed.name}
    rig.close()


def test_memory_to_read_into_is_bounded(fabric: Fabric) -> None:
    rig = Rig()
    remote = rig.remote()
    remote._agent._landings_made = LANDINGS_MAX
    with pytest.raises(OSError, match="threads read by NIXL already"):
        remote.copy(rig.whole())
    remote.close()
    rig.close()


def test_metadata_is_that_of_the_agent_that_it_is_said_to_be_of(fabric: Fabric) -> None:
    rig = Rig()
    metadata = rig.exposed.metadata
    check_metadata(rig.exposed.name, metadata)
    for name, wrong in (
        ("", metadata),
        ("source", metadata),
        (rig.exposed.name + "x", metadata),
        (rig.exposed.name, metadata[:-20]),
        (rig.exposed.name, b""),
        (rig.exposed.name, b"nixlSerDes|Agent" + b"\xff" * 8),
    ):
        with pytest.raises(ValueError, match="none of that agent"):
            check_metadata(name, wrong)
    remote = rig.remote()
    with pytest.raises(ValueError, match="another agent has that name"):
        Remote(rig.agents, rig.exposed.name, metadata + b"more", lambda: False, 1.0)
    rig.exposures.end(R)
    other = Rig()
    other.exposures.end(R)
    with pytest.raises(OSError, match="NIXL cannot reach it"):
        other.remote()
    remote.close()
    for each in (rig, other):
        each.close()
    assert not fabric.agents


def test_an_agent_that_has_loaded_another_one_than_it_was_told_is_used_no_more(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    (agent,) = {rig.remote()._agent for _ in range(2)}
    with monkeypatch.context() as patch:
        patch.setattr(agent._agent, "add_remote_agent", lambda metadata: b"another")
        rig.exposures.end(R)
        rig.exposed = rig.exposures.of(R, [place_of(rig.there)], rig)
        with pytest.raises(ValueError, match="and is of another agent"):
            rig.remote()
    assert agent.is_spent
    rig.close()


# --------------------------------------------------------------------------------------------------
# GPUs' memory


class GpuRig(Rig):
    """The same on GPUs, one at each end; beside it, a word in host memory."""

    def __init__(self) -> None:
        self.word = ctypes.c_uint64(7)
        super().__init__()
        self.gpu = OnGpu(3, (place_of(self.there),))
        self.exposed = self.exposures.of(R, [(ctypes.addressof(self.word), 8)], self, self.gpu)
        self.device = Double(index=1)

    def reading(self, there: int = 3, here: Double | None = None) -> Remote:
        is_over, known = (lambda: self.is_over), (self.exposed.name, self.exposed.metadata)
        return Remote(self.agents, *known, is_over, 5.0, there, here)


def test_a_gpu_is_read_into_a_gpu_and_the_word_in_host_memory(fabric: Fabric) -> None:
    rig = GpuRig()
    assert rig.exposures.of(R, [(ctypes.addressof(rig.word), 8)], rig, rig.gpu) is rig.exposed
    remote = rig.reading(here=rig.device)
    # more than there are slots: none is read into before the device has copied it out
    for _ in range(2):
        remote.copy(rig.whole())
        assert rig.here.raw == rig.there.raw
        ctypes.memset(rig.here, 0, ctypes.sizeof(rig.here))
    assert (remote.is_unchanged(ctypes.addressof(rig.word), 7), set(fabric.kinds[:-1])) == (
        True,
        {("VRAM", 1, "VRAM", 3)},
    )
    assert fabric.kinds[-1] == ("DRAM", 0, "DRAM", 0)
    assert rig.device.settled == 12  # what the network card has written is seen by each copy
    assert "2 landings, 0 reads left" in repr(remote)
    remote.close()
    rig.close()
    assert not fabric.agents


def test_nothing_is_copied_on_a_gpu_after_a_read_was_given_up(fabric: Fabric) -> None:
    rig = GpuRig()
    remote = rig.reading(here=rig.device)
    looks = []

    def watch(since: float) -> None:
        looks.append(since)
        if len(looks) == 1:
            fabric.let_go()
            fabric.holds = True
            return
        fabric.let_go()
        raise OSError(0, "enough")

    fabric.holds = True
    with pytest.raises(OSError, match="enough"):
        remote._agent.read(rig.exposed.name, rig.whole(), watch, 3, rig.device)
    (landing,) = remote._agent._landings
    held = rig.here.raw
    assert any(held)  # what had come by then
    ctypes.memset(landing.address, 0xEE, SLOT_BYTES)
    landing._queue.mark().wait()
    assert rig.here.raw == held
    remote.close()
    rig.close()


def test_without_cuda_in_ucx_both_ends_say_what_it_needs(fabric: Fabric) -> None:
    rig = GpuRig()
    fabric.knows_gpus = False
    with pytest.raises(
        NotShared,
        match=r"no memory to read into .*BACKEND.*must know CUDA .*UCX_TLS.*nvidia-peermem",
    ):
        rig.reading(here=rig.device)
    rig.reading(3, None).close()
    rig.exposures.end(R)
    with pytest.raises(
        TransportUnavailable, match=r"cannot register 1 places in a GPU's memory .*must know CUDA"
    ):
        rig.exposures.of(R, [(ctypes.addressof(rig.word), 8)], rig, rig.gpu)
    rig.close()
    assert not fabric.agents
