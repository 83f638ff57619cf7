"""A version in windows: which chunks each has, and the memory that it takes."""

from __future__ import annotations

import pytest

from tensorhub.errors import ManifestMismatch
from tensorhub.memory.windows import Windows
from tensorhub.model.manifest import Manifest
from tests.memory.test_on_demand import CHUNK_BYTES, manifest_of, resident

MIB = 2**20


def several() -> Manifest:
    return manifest_of(5 * CHUNK_BYTES + 77, 0, 3, CHUNK_BYTES, 2 * CHUNK_BYTES)


def test_each_chunk_and_each_byte_is_in_one_window() -> None:
    manifest = several()
    windows = Windows(manifest, 2 * CHUNK_BYTES)
    chunks = [chunk for window in windows.windows for chunk in window.chunks]
    assert sorted(chunks) == list(range(manifest.chunk_count))
    end = 0
    for number, window in enumerate(windows.windows):
        assert window.start == end
        assert windows.number(window.start) == windows.number(window.stop - 1) == number
        assert window.stop - window.start <= 2 * CHUNK_BYTES
        end = window.stop
    assert end == manifest.region_bytes


def test_a_fetch_of_a_window_leaves_the_chunks_of_the_others_out() -> None:
    manifest = several()
    windows = Windows(manifest, 2 * CHUNK_BYTES)
    for number, window in enumerate(windows.windows):
        mapped = windows.memory(number, None).map(manifest)
        assert {*mapped.left_out} == {*range(manifest.chunk_count)} - {*window.chunks}
        assert [region.nbytes for region in mapped.regions] == [
            region.nbytes for region in manifest.regions
        ]


def test_what_fits_is_one_window_of_all_chunks() -> None:
    manifest = several()
    windows = Windows(manifest, manifest.region_bytes)
    assert len(windows.windows) == 1
    assert windows.memory(0, ("t0",)).map(manifest).left_out == []
    assert windows.memory(0, ("t0",)).patterns == ("t0",)


def test_another_version_is_not_filled_in() -> None:
    memory = Windows(several(), CHUNK_BYTES).memory(0, None)
    with pytest.raises(ManifestMismatch, match="open the file again"):
        memory.map(manifest_of(CHUNK_BYTES))


def test_memory_is_given_back_window_by_window() -> None:
    manifest = manifest_of(2 * CHUNK_BYTES + 5)
    windows = Windows(manifest, CHUNK_BYTES)
    (whole,) = windows.memory(0, None).map(manifest).regions
    assert isinstance(whole, memoryview)
    before = resident()
    for at in range(0, 2 * CHUNK_BYTES, MIB):
        whole[at : at + MIB] = b"x" * MIB
    assert resident() > before + CHUNK_BYTES
    windows.give_back(0)
    assert resident() < before + CHUNK_BYTES + CHUNK_BYTES // 2
    last = windows.windows[1]
    assert bytes(windows.view(last.start, last.start + 3)) == b"xxx"
    assert bytes(windows.view(0, 3)) == bytes(3)
