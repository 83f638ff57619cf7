"""Memory that other processes can map: what is in it, what it costs, and what a reader takes from a
peer.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub import shared_empty_like
from tensorhub.errors import InvalidType, StateError
from tensorhub.memory.describing import describe
from tensorhub.transport import segments
from tensorhub.transport.segments import ALIGNMENT, MappedSegment, Segment, segments_of
from tests.memory.test_tensors import quantized


def copied(segment: MappedSegment) -> bytes:
    import ctypes

    return ctypes.string_at(segment.address, segment.nbytes)


def memfds() -> int:
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if Path(f"/proc/self/fd/{fd}").exists()
    ]
    return sum("memfd:tensorhub" in link for link in links)


def test_tensors_are_alike_and_one_segment_has_them_all() -> None:
    tied = torch.ones(3, 5, dtype=torch.bfloat16)
    given: dict[str, Any] = {
        "a": torch.ones(2, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "tied": tied,
        "tied too": tied.view(3, 5),
        "odd": torch.ones(7, dtype=torch.float8_e4m3fn),
        "none": torch.empty(0, 4),
        "complex": torch.ones(3, dtype=torch.complex64),
        "strided": torch.ones(4, 6)[:, ::2],
        "far": torch.empty(1000, 3, device="meta"),
        "flag": torch.ones(3, dtype=torch.bool),
        "numpy": np.ones((2, 2), np.float16),
    }
    made = shared_empty_like(given)
    assert list(made) == list(given)
    for name, tensor in given.items():
        assert (made[name].shape, made[name].dtype) == (tensor.shape, tensor.dtype), name
        assert not made[name].any()
    assert all(
        tensor.is_contiguous() for tensor in made.values() if isinstance(tensor, torch.Tensor)
    )
    made["tied"].fill_(2)
    assert made["tied too"].eq(2).all()
    found = describe(made)  # they can be registered
    places = [(tensor.address, tensor.nbytes) for tensor in found if tensor.nbytes]
    assert all(address % ALIGNMENT == 0 for address, _ in places)
    segments = segments_of(places)
    assert segments is not None
    assert len(segments) == 1


def test_writes_of_torch_are_counted() -> None:
    made = shared_empty_like({"a": torch.ones(3), "b": torch.ones(3)})
    before = made["b"]._version
    made["a"].add_(1)
    assert made["b"]._version == before


def test_memory_goes_with_the_last_tensor() -> None:
    gc.collect()
    before = memfds()
    made = shared_empty_like({"a": torch.ones(1000), "b": torch.ones(10)})
    place = [(made["b"].data_ptr(), 40)]
    assert segments_of(place) is not None
    kept = made.pop("b").view(2, 5)
    made.clear()
    gc.collect()
    assert segments_of(place) is not None
    assert kept.sum() == 0
    del kept
    gc.collect()
    assert segments_of(place) is None
    assert memfds() == before


def test_what_lies_elsewhere_is_in_no_segment() -> None:
    shared, usual = shared_empty_like({"a": torch.ones(4)})["a"], torch.ones(4)
    assert segments_of([(shared.data_ptr(), 16), (usual.data_ptr(), 16)]) is None
    assert segments_of([(shared.data_ptr(), 16 + ALIGNMENT)]) is None
    assert segments_of([]) == ()


@pytest.mark.parametrize(
    "tensor",
    [
        quantized(),
        torch.ones(2, 2).to_sparse(),
        np.array([object()]),
        "nothing",
    ],
    ids=["quantized", "sparse", "objects", "no tensor"],
)
def test_what_has_no_plain_bytes_is_refused(tensor: object) -> None:
    with pytest.raises(StateError, match="'a' cannot be shared"):
        shared_empty_like({"a": tensor})


def test_a_module_is_no_mapping() -> None:
    for given in (torch.nn.Linear(2, 2), 3, None):
        with pytest.raises(
            InvalidType, match="give a mapping of names to tensors; of a module, its state_dict"
        ):
            shared_empty_like(given)  # type: ignore[arg-type]


def test_too_much() -> None:
    before = memfds()
    with pytest.raises(StateError, match="cannot be had"):
        shared_empty_like({"a": torch.empty(2**58, device="meta")})
    assert memfds() == before


def test_a_reader_sees_what_is_written_and_writes_nothing() -> None:
    segment = Segment(8192)
    mapped = MappedSegment(segment.descriptor, 8192)
    segment.bytes_at(5000, 3)[:] = b"abc"
    assert copied(mapped)[5000:5003] == b"abc"
    again = os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR)
    try:
        for descriptor in (segment.descriptor, again):
            with pytest.raises(PermissionError):
                os.write(descriptor, b"x")
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 8192)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 1)
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(again)


def test_what_a_peer_hands_over_is_looked_at_first(tmp_path: Path) -> None:
    segment = Segment(4096)
    with pytest.raises(StateError, match="said to have 8192 bytes, and has 4096"):
        MappedSegment(segment.descriptor, 8192)
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(unsealed, 4096)
        with pytest.raises(StateError, match="not sealed"):
            MappedSegment(unsealed, 4096)
        fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with pytest.raises(StateError, match="not sealed"):
            MappedSegment(unsealed, 4096)
    finally:
        os.close(unsealed)
    here, there = socket.socketpair()
    with here, there, pytest.raises(StateError, match="something else"):
        MappedSegment(here.fileno(), 4096)
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened, pytest.raises(StateError, match="something else"):
        MappedSegment(opened.fileno(), 4096)


def test_whoever_writes_through_a_readers_mapping_dies() -> None:
    program = (
        "import ctypes, resource\nfrom tensorhub.transport.segments import MappedSegment, Segment\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\ns = Segment(4096)\n"
        "m = MappedSegment(s.descriptor, 4096)\nctypes.memset(m.address, 1, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV


def test_mappings_go_with_their_last_reference() -> None:
    segment = Segment(4096)
    mapped = MappedSegment(segment.descriptor, 4096)
    place = f"{mapped.address:x}-"
    assert place in Path("/proc/self/maps").read_text().replace("\n0", "\n")
    del mapped
    gc.collect()
    assert place not in Path("/proc/self/maps").read_text().replace("\n0", "\n")


def test_the_limit_of_a_container_is_an_error_and_not_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
    here = tmp_path / named
    here.mkdir(parents=True, exist_ok=True)
    (here / "memory.max").write_text("10000000\n")
    (here / "memory.current").write_text("9000000\n")
    (here / "memory.stat").write_text("anon 1000000\nfile 8000000\nshmem 7000000\n")
    monkeypatch.setattr(segments, "CGROUPS", tmp_path)
    Segment(2_000_000)
    with pytest.raises(StateError, match="2000000 are available"):
        Segment(2_000_001)
    (here / "memory.max").write_text("max\n")
    Segment(2_000_001)
