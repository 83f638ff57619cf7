"""Archives that are damaged, or made to cost what they do not hold: each bound is kept before the
bytes are spent, and the error names the object.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tensorhub.archives import catalogue as catalogues, checkpoints, reading, writing
from tensorhub.archives.catalogue import Anchor, Key, Version, VersionCatalogue
from tensorhub.archives.checkpoints import CheckpointMemory
from tensorhub.archives.claim import newest_writer
from tensorhub.archives.reading import Reader
from tensorhub.archives.store import Store
from tensorhub.archives.writing import Archive
from tensorhub.errors import IntegrityError, InvalidValue
from tensorhub.memory.safetensors import HEADER_BYTES_MAX
from tensorhub.model.manifest import id_of
from tests.archives.models import Model, apply, plain
from tests.archives.test_versions import history, opened

LARGE = 2**62


def archived(store: Store, count: int = 2) -> tuple[Model, list[Version]]:
    """An anchor, and deltas of one another."""
    random = Random(1)
    model = plain(random)
    archive = opened(store)
    history(archive, model, random, count, count)
    archive.close()
    return model, [*archive.catalogue.versions.values()]


def put_manifest(store: Store, version: Version) -> None:
    store.put(f"actor/{version.path}", [version.encode()])


def read_all(store: Store, number: int) -> None:
    with Reader(VersionCatalogue(store, "actor").load(), Key(0, number), apply) as reader:
        sizes = reader.manifest(0).sizes
        reader.read(0, range(len(sizes)), [memoryview(bytearray(each)) for each in sizes])


def refused(store: Store, number: int, names: str) -> None:
    """With little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match=names):
            read_all(store, number)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------------------
# lists


def lists_of(store: Store) -> list[Callable[[], object]]:
    catalogue = VersionCatalogue(store, "actor")
    return [catalogue.load, lambda: catalogue.find(Key(0, 1)), lambda: newest_writer(catalogue)]


def test_a_list_that_is_too_long_ends_with_its_first_pages(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogues, "VERSIONS_MAX", 3)
    for call, directory, most in zip(
        lists_of(store), ["versions", "versions", "writers"], [3, 3, 5], strict=True
    ):
        for number in range(most + 1):
            store.put(f"actor/{directory}/{number}", [b"?"])
        monkeypatch.setattr(Store.objects, "__defaults__", (5,))
        with pytest.raises(IntegrityError, match=f"{store.url}/actor/{directory} has more than"):
            call()
        store.delete([f"actor/{directory}/{number}" for number in range(most + 1)])


def test_manifests_are_not_read_if_they_have_too_many_bytes(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(local)
    monkeypatch.setattr(catalogues, "MANIFESTS_BYTES_MAX", 500)
    monkeypatch.setattr(catalogues, "decode", lambda text: pytest.fail("it was read"))
    with pytest.raises(IntegrityError, match="actor/versions has more than 500 bytes"):
        VersionCatalogue(local, "actor").load()


def test_a_manifest_that_has_grown_since_it_was_listed_is_a_fault(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(local)
    objects = Store.objects

    def smaller(*given: Any) -> Any:
        return (replace(each, nbytes=each.nbytes - 1) for each in objects(*given))

    monkeypatch.setattr(Store, "objects", smaller)
    catalogue = VersionCatalogue(local, "actor").load()
    assert not catalogue.versions
    assert all("and not" in fault for fault in catalogue.faults)


def test_thousands_of_versions_are_known_at_once(local: Store) -> None:
    _, (anchor, delta) = archived(local)
    for number in range(2, 3000):
        version = replace(delta, key=Key(0, number), base=Key(0, 0), after=None)
        (local._directory / f"actor/{version.path}").write_bytes(version.encode())  # type: ignore[operator]
    catalogue = VersionCatalogue(local, "actor").load()
    assert len(catalogue.effective) == 3000
    assert [each.key for each in catalogue.chain(Key(0, 2999))] == [anchor.key, Key(0, 2999)]


# --------------------------------------------------------------------------------------------------
# sizes that cannot be


@pytest.mark.parametrize(
    "says",
    [
        lambda it: replace(it, shards=(replace(it.shards[0], chunks=2**24),)),
        lambda it: replace(it, shards=(replace(it.shards[0], rest=LARGE),)),
        lambda it: replace(it, anchor=replace(it.anchor, files=dict.fromkeys(it.anchor.files, LARGE))),
        lambda it: replace(it, anchor=Anchor(it.anchor.directory, {"a.safetensors": 0}, {})),
        lambda it: replace(it, anchor=Anchor(it.anchor.directory, {}, {})),
    ],
    ids=["chunks", "a rest", "files", "an empty file", "no file"],
)  # fmt: skip
def test_an_anchor_of_absurd_size(local: Store, says: Callable[[Any], Version]) -> None:
    _, (anchor, _) = archived(local)
    put_manifest(local, says(anchor))
    refused(local, 0, f"{local.url}/actor/")


@pytest.mark.parametrize("frames", [(2**40,), (1,) * 4096, (0,) * 4096, ()])
def test_frames_of_absurd_size(local: Store, frames: tuple[int, ...]) -> None:
    _, (_, delta) = archived(local)
    shard = replace(delta.shards[0], frames=frames, chunks=2**12)
    put_manifest(local, replace(delta, shards=(shard,)))
    refused(local, 1, f"{local.url}/actor/")


@pytest.mark.parametrize("length", [0, 1, 7, 10**4])
def test_tables_of_another_length(local: Store, length: int) -> None:
    """Also if the manifest names what is there."""
    _, versions = archived(local)
    for version in reversed(versions):
        local.put(f"actor/{version.index}", [bytes(length)])
        put_manifest(local, replace(version, index_id=id_of(bytes(length))))
        refused(local, version.key.number, f"{local.url}/actor/{version.index}")


def test_the_tables_of_a_chain_are_bounded(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _, versions = archived(local, 3)
    monkeypatch.setattr(reading, "TABLES_BYTES_MAX", sum(e.index_bytes for e in versions) - 1)
    read_all(local, 1)
    refused(local, 2, f"{versions[2].path} is based on versions with more than")


def test_the_parts_of_a_publication_are_bounded(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (anchor, _) = archived(local)
    read_all(local, 0)
    monkeypatch.setattr(catalogues, "PARTS_BYTES_MAX", 10)
    refused(local, 0, f"{local.url}/actor/parts/{anchor.publication} names parts of more than 10")


def test_parts_that_are_kept_are_bounded(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (anchor, _) = archived(local)
    catalogue = VersionCatalogue(local, "actor").load()
    manifest = len(catalogue.part(anchor.shards[0].manifest))
    monkeypatch.setattr(catalogues, "PARTS_BYTES_MAX", manifest)
    for _ in range(3):
        catalogue.manifest(anchor, 0)
        catalogue.published(anchor)
        assert sum(map(len, catalogue._parts.values())) <= manifest
        assert len(catalogue._values) == 1


# --------------------------------------------------------------------------------------------------
# headers


@pytest.mark.parametrize("length", [LARGE, 2**64 - 1, HEADER_BYTES_MAX + 1, 1000])
def test_a_header_of_another_length(local: Store, length: int) -> None:
    _, (anchor, _) = archived(local)
    assert anchor.anchor is not None
    ((name, size),) = anchor.anchor.files.items()
    path = f"actor/{anchor.anchor.directory}/{name}"
    local.put(path, [struct.pack("<Q", length), bytes(size - 8)])
    refused(local, 0, f"{local.url}/{path} is not what TensorHub wrote")
    with pytest.raises(ValueError, match=f"{local.url}/{path} is not a"):
        CheckpointMemory(f"{local.url}/{path}")


def test_the_headers_of_all_files_are_bounded(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain(Random(1))
    version = opened(local).add_anchor(model.content(0), model.view, file_bytes=1)
    assert version.anchor is not None
    directory = f"{local.url}/actor/{version.anchor.directory}"
    for module in (reading, checkpoints):
        monkeypatch.setattr(module, "HEADERS_BYTES_MAX", 200)
        monkeypatch.setattr(module, "REQUESTS_AT_ONCE", 1)
    refused(local, 0, f"{directory}/model-0000.*those of one checkpoint have")
    with pytest.raises(ValueError, match=f"{directory}/model-0000.*those of one checkpoint have"):
        CheckpointMemory(directory)


def test_files_of_a_checkpoint_are_counted_before_they_are_read(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        local.put(f"c/{number}.safetensors", [b"?"])
    monkeypatch.setattr(checkpoints, "FILES_MAX", 2)
    with pytest.raises(ValueError, match=f"{local.url}/c has more than 2 files"):
        CheckpointMemory(f"{local.url}/c")


# --------------------------------------------------------------------------------------------------
# files beside the tensors


def test_files_beside_the_tensors_are_bounded(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain(Random(1))
    archive = Archive(local, "actor", "cluster", "host-1")
    monkeypatch.setattr(writing, "SMALL_BYTES_MAX", 10)
    with pytest.raises(InvalidValue, match="have 10 bytes at most"):
        archive.add_anchor(model.content(0), model.view, {"a.json": bytes(6), "b.json": bytes(5)})
    version = archive.add_anchor(model.content(0), model.view, {"a.json": bytes(6)})
    assert version.anchor is not None
    put_manifest(
        local, replace(version, anchor=replace(version.anchor, beside={"a.json": LARGE}), turn=1)
    )
    archive.catalogue.load()
    with pytest.raises(IntegrityError, match=r"\.0000001\.json is not what TensorHub wrote"):
        archive.anchor_again(version.key, apply)
