"""Memory that is taken where chunks are loaded, and given back while its place stays."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tensorhub.errors import StateError
from tensorhub.memory.on_demand import OnDemandMemory
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest

CHUNK_BYTES = 64 * 2**20
HUGE = 2**38  # far more than there is


class Nothing:
    def want(self, chunks: object) -> None:
        return None


def manifest_of(*sizes: int) -> Manifest:
    tensors = [
        TensorDescription(f"t{number}", "uint8", (size,), number << 50, size)
        for number, size in enumerate(sizes)
    ]
    return build_manifest(tensors, CHUNK_BYTES, "none")


def resident() -> int:
    """Bytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_memory_is_taken_by_what_is_written_and_given_back() -> None:
    large = 256 * 2**20
    memory = OnDemandMemory([1, 2], Nothing())
    before = resident()
    mapped = memory.map(manifest_of(HUGE, large, 0))
    assert memory.map(manifest_of(HUGE, large, 0)) is mapped
    assert [region.nbytes for region in mapped.regions] == [HUGE, large, 0]
    assert memory.recall("content", manifest_of(1)) == [1, 2]
    pattern, written = b"x" * 2**20, mapped.regions[1]
    assert isinstance(written, memoryview)
    for at in range(0, large, 2**20):
        written[at : at + 2**20] = pattern
    assert resident() > before + large // 2
    memory.empty()
    assert resident() < before + large // 2
    assert bytes(written[:3]) == bytes(3)
    for at in range(0, large, 2**20):
        written[at : at + 2**20] = pattern
    memory.free()  # although there are views of it
    assert resident() < before + large // 2


def test_it_is_not_freed_while_chunks_are_written() -> None:
    memory = OnDemandMemory([], Nothing())
    memory.map(manifest_of(100))
    is_freed = threading.Event()

    def free() -> None:
        memory.free()
        is_freed.set()

    thread = threading.Thread(target=free)
    with memory.writing() as is_there:
        assert is_there
        thread.start()
        while memory._mapped is not None:
            pass
        assert not is_freed.is_set()
    thread.join(60)
    assert is_freed.is_set()
    with memory.writing() as is_there:
        assert not is_there
    memory.empty()
    memory.free()


def test_without_room_in_the_address_space_it_says_what_to_do() -> None:
    with pytest.raises(StateError, match="keep fewer versions"):
        OnDemandMemory([], Nothing()).map(manifest_of(2**47))
