"""A checkpoint is the whole model in every program's eyes, and every published chunk is in it."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load

from tensorhub.archives.anchors import REST, ChunkPlaces, Files, Whole, files_of
from tensorhub.archives.writing import _file, _rest
from tensorhub.layouts import publication_of
from tests.archives.models import Model, local, of_world, plain
from tests.layouts.worlds import world


def written(files: Files, model: Model) -> dict[str, bytes]:
    return {name: b"".join(map(bytes, _file(files, name, model.view))) for name in files.headers}


def chunks_in(whole: Whole, files: dict[str, bytes], headers: Files, model: Model) -> None:
    """Each chunk is where it is said to be."""
    texts = list(files.values())
    for rank, manifest in enumerate(model.manifests):
        places = ChunkPlaces(whole, list(headers.headers.values()), manifest, rank)
        assert not places.missing
        rest = b"".join(map(bytes, _rest(places, manifest, rank, model.view)))
        assert len(rest) == places.rest_bytes
        for number, chunk in enumerate(model.chunks(rank)):
            found = [
                (rest if file == REST else texts[file])[at : at + nbytes]
                for file, at, nbytes in places.places(number)
            ]
            assert b"".join(found) == chunk


@given(st.integers(0, 2**32), st.sampled_from([7, 64, 4096]), st.sampled_from([1, 100, 10**9]))
def test_any_layout_to_a_checkpoint_and_back(seed: int, chunk_bytes: int, file_bytes: int) -> None:
    given_world = world(Random(seed))
    model = of_world(given_world, chunk_bytes)
    whole = Whole(model.published, given_world.publication)
    headers = files_of(whole, file_bytes)
    files = written(headers, model)
    loaded = {name: array for text in files.values() for name, array in load(text).items()}
    weight_map = json.loads(headers.index)["weight_map"]
    for name, array in loaded.items():
        _, elements = given_world.tensors[name]
        assert array.shape == elements.shape
        assert array.tobytes() == np.ascontiguousarray(elements).tobytes()
        assert name in load(files[weight_map[name]])
    # Of tied tensors one is there; a tensor without elements has no piece.
    missing = given_world.tensors.keys() - loaded.keys()
    ties = {whole.publication.catalogue.names[each] for each in whole.publication.ties}
    assert all(name in ties or not given_world.tensors[name][1].size for name in missing)
    chunks_in(whole, files, headers, model)


def test_tensors_that_no_checkpoint_can_hold_are_the_rest() -> None:
    model = local(Random(1), 2)
    whole = Whole(model.published, publication_of(model.published, model.parts))
    headers = files_of(whole)
    assert (whole.names, headers.headers) == ((), {})
    files = written(headers, model)
    chunks_in(whole, files, headers, model)


def test_files_are_of_about_one_size() -> None:
    model = plain(Random(1), sizes=(3, 3, 9, 1, 1))
    whole = Whole(model.published, publication_of(model.published, model.parts))
    headers = files_of(whole, 7 * 4096)
    assert [[each.name for each in header.entries] for header in headers.headers.values()] == [
        ["layer.0", "layer.1"],
        ["layer.2"],
        ["layer.3", "layer.4"],
    ]
    assert [*headers.headers] == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert json.loads(headers.index)["metadata"]["total_size"] == model.manifests[0].nbytes


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_a_file_are_bounded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.archives.writing.BLOCK_BYTES", 16)
    given_world = world(Random(seed))
    model = of_world(given_world)
    whole = Whole(model.published, given_world.publication)
    headers = files_of(whole)
    for name, header in headers.headers.items():
        begin, *blocks = _file(headers, name, model.view)
        assert all(len(each) <= 16 for each in blocks)
        assert sum(map(len, blocks)) + len(begin) == header.file_bytes
