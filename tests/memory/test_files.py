"""Safetensors files as memory: what is served is what the file holds, and what is written is what
was published.
"""

from __future__ import annotations

import json
import os
import resource
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import msgpack
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from tensorhub.errors import ManifestMismatch, RegistrationError, StateError
from tensorhub.memory.checkpoint import FORMAT, Checkpoint, Index, find_files
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.file_target import FileTarget
from tensorhub.memory.files import READ_BYTES, FileMemory
from tensorhub.memory.regions import MappedRegions
from tensorhub.memory.safetensors import make_header, read_header
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.model.manifest import Manifest, build_manifest
from tests.memory.views import views

CHUNK_BYTES = 4096
Tensors = Mapping[str, torch.Tensor]


def some(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "layers.0.w": torch.randn(40, 70, generator=random),
        "layers.1.w": torch.randn(40, 70, generator=random).to(torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(7),
    }


def sharded(
    folder: Path, files: Mapping[str, Tensors], metadata: dict[str, str] | None = None
) -> Path:
    """A sharded model as transformers writes it; the index' path."""
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(dict(tensors), folder / name, metadata=metadata or {"format": "pt"})
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )
    return index


def manifest_of(memory: FileMemory | RegisteredMemory, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    return build_manifest(
        memory.descriptions, chunk_bytes, "xxh3-64", "world/1", metadata=memory.metadata
    )


def never() -> None:
    """What is called to look whether anybody still waits."""


def move(manifest: Manifest, source: MappedRegions, target: MappedRegions) -> None:
    """What a reader does, without the way between."""
    for index, (here, there) in enumerate(zip(views(source), views(target), strict=True)):
        if index not in target.unwanted:
            there[:] = here
    target.unpack()


def copy(path: Path, out: Path, *names: str, force: bool = False) -> FileTarget:
    """Publish `path` and fetch it into `out`, without a cluster."""
    with FileMemory(path) as memory, FileTarget(out, names or None, force=force) as target:
        manifest = Manifest.decode(manifest_of(memory).encode())
        move(manifest, memory.map(manifest), target.map(manifest))
        target.commit()
        return target


def listing(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --------------------------------------------------------------------------------------------------
# publishing


def test_every_chunk_is_the_files_and_has_its_digest(tmp_path: Path) -> None:
    save_file({**some(), "large": torch.randn(READ_BYTES // 4 + 1000)}, tmp_path / "m.safetensors")
    told: list[tuple[int, int]] = []
    with FileMemory(tmp_path / "m.safetensors") as memory:
        memory.progress = lambda done, total: told.append((done, total))
        for chunk_bytes in (CHUNK_BYTES, 2**30):
            manifest = manifest_of(memory, chunk_bytes)
            chunks = ChunkMemory(manifest, memory.map(manifest).regions)
            digests = memory.digests(manifest, never)
            assert digests == [
                xxhash.xxh3_64_intdigest(chunks.buffer(chunk.index)) for chunk in manifest.chunks
            ]
            assert told[0][0] < told[-1][0] == told[-1][1] == manifest.nbytes
            told.clear()
            assert memory.digests(manifest, never) is digests
            assert not told
        regions = views(memory.map(manifest))
        assert all(region.readonly for region in regions)
    loaded = load_file(tmp_path / "m.safetensors")
    for tensor in manifest.tensors:
        assert (
            bytes(regions[tensor.region])
            == loaded[tensor.name].view(-1).view(torch.uint8).numpy().tobytes()
        )
        assert tensor.shape == tuple(loaded[tensor.name].shape)


def test_digesting_ends_when_nobody_waits_any_more(tmp_path: Path) -> None:
    save_file({"large": torch.zeros(READ_BYTES)}, tmp_path / "m.safetensors")

    def stop() -> None:
        raise KeyboardInterrupt

    with FileMemory(tmp_path / "m.safetensors") as memory:
        with pytest.raises(KeyboardInterrupt):
            memory.digests(manifest_of(memory), stop)
        assert memory.digests(manifest_of(memory), never) is not None


@pytest.mark.parametrize(
    "write",
    [
        lambda path: os.truncate(path, 5000),
        lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
)
def test_a_written_file_is_noticed(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(100_000)}, path)
    os.utime(path, ns=(0, 0))  # so that no clock is too coarse for what follows
    with FileMemory(path) as memory:
        manifest = manifest_of(memory)
        memory.check_unreplaced()
        before = memory.versions()
        assert memory.changed() is None
        write(path)
        assert str(path) in str(memory.changed())
        assert memory.versions() != before
        with pytest.raises(RegistrationError, match=r"m\.safetensors .*Publish it again"):
            memory.check_unreplaced()
        with pytest.raises(RegistrationError, match=r"m\.safetensors .*Publish it again"):
            memory.digests(manifest, never)


def test_a_file_that_is_replaced_or_removed_is_still_ours(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(some(0), path)
    with FileMemory(path) as memory:
        manifest = manifest_of(memory)
        digests = memory.digests(manifest, never)
        save_file(some(1), tmp_path / "other")
        os.replace(tmp_path / "other", path)
        assert memory.changed() is None
        path.unlink()
        assert memory.changed() is None
        chunks = ChunkMemory(manifest, memory.map(manifest).regions)
        assert digests == [chunks.digest(chunk.index) for chunk in manifest.chunks]


def test_a_file_memory_cannot_be_filled(tmp_path: Path) -> None:
    save_file(some(), tmp_path / "m.safetensors")
    with (
        FileMemory(tmp_path / "m.safetensors") as memory,
        pytest.raises(ManifestMismatch, match="cannot be filled"),
    ):
        memory.map(manifest_of(RegisteredMemory({"other": torch.zeros(2)})))


def test_nothing_stays_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    save_file(some(), tmp_path / "m.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"bad")
    copy(tmp_path / "m.safetensors", tmp_path / "out.safetensors")
    with pytest.raises(ValueError, match="bad"):
        FileMemory(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before


# --------------------------------------------------------------------------------------------------
# finding


def test_what_a_directory_holds(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(ValueError, match=r"m has no \*\.safetensors and no \*\.index\.json"):
        find_files(tmp_path / "m")
    for name in ("b.safetensors", "a.safetensors", "c.bin", ".d.safetensors"):
        (tmp_path / "m" / name).touch()
    (tmp_path / "m" / "pytorch_model.bin.index.json").write_text("{}")
    assert find_files(tmp_path / "m") == (
        [tmp_path / "m" / "a.safetensors", tmp_path / "m" / "b.safetensors"],
        None,
    )
    index = sharded(
        tmp_path / "m",
        {"x.safetensors": {"a": torch.zeros(1)}, "b.safetensors": {"b": torch.zeros(1)}},
    )
    files, found = find_files(tmp_path / "m")
    assert ([file.name for file in files], found) == (
        ["b.safetensors", "x.safetensors"],
        find_files(index)[1],
    )
    index.with_name("other.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has several indexes"):
        find_files(tmp_path / "m")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"weight_map": {"a": "m.safetensors"}', "is not JSON"),
        ('{"weight_map": {"a": "m.safetensors"}} {', "is not JSON"),
        ('{"weight_map": []}', "it says 'weight_map'"),
        ('{"weight_map": {"a": "m.safetensors"}, "metadata": 3}', "it says 'metadata'"),
        (
            '{"weight_map": {"a": "m.safetensors"}, "auto_map": {}}',
            "it says 'auto_map': an index has .* nothing else",
        ),
        ('{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}', "it says 'a' twice"),
        (
            '{"weight_map": {"a": "m.safetensors"}, "weight_map": {"a": "m.safetensors"}}',
            "it says 'weight_map' twice",
        ),
        (
            '{"weight_map": {"a": "m.safetensors"}, "metadata": {"x": ' + "[" * 100_000,
            "is not JSON",
        ),
        (
            '{"weight_map": {"a": "config.json"}}',
            r"it names 'config\.json': give a name that ends in \.safetensors",
        ),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "it names ''"),
        ('{"weight_map": {"a": "../../x"}}', r"it names '\.\./\.\./x': only a plain file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "only a plain file name"),
        ('{"weight_map": {"a": ".."}}', "only a plain file name"),
        ('{"weight_map": {"a": ".x"}}', "does not begin with a dot"),
        ('{"weight_map": {"a": "x\\u0000"}}', "printable"),
        (
            '{"weight_map": {"a": "none.safetensors"}}',
            r"names files that are not there: none\.safetensors",
        ),
        ('{"weight_map": {"a": "m.safetensors"}}', "has tensor 'b', of which it says nothing"),
        (
            '{"weight_map": {"a": "m.safetensors", "b": "m.safetensors", "c": "m.safetensors"}}',
            "tensor 'c' .*it is in none",
        ),
        (
            '{"weight_map": {"a": "m.safetensors", "b": "n.safetensors"}}',
            r"tensor 'b' .*it is in m\.safetensors",
        ),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "m.safetensors")
    save_file({"z": torch.zeros(1)}, tmp_path / "n.safetensors")
    (tmp_path / "x.index.json").write_text(text)
    with pytest.raises(ValueError, match=rf"x\.index\.json.*{reason}"):
        FileMemory(tmp_path / "x.index.json")


@pytest.mark.parametrize("name", ["pipe.index.json", "folder", "pipe.safetensors"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for pipe in ("pipe.index.json", "pipe.safetensors", "folder/m.safetensors.index.json"):
        os.mkfifo(tmp_path / pipe)
    with pytest.raises(ValueError, match="it is not a file at all"):
        FileMemory(tmp_path / name)


def test_files_that_are_not_one_model(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "n.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'a' is in m\.safetensors and in n\.safetensors"):
        FileMemory(tmp_path)
    header = make_header([], {})
    (tmp_path / "empty.safetensors").write_bytes(header.encode())
    with pytest.raises(ValueError, match=r"empty\.safetensors holds no tensor"):
        FileMemory(tmp_path / "empty.safetensors")
    for name in ("odd\nname.safetensors", "config.json.bin"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
        with pytest.raises(ValueError, match="a file cannot be called"):
            FileMemory(tmp_path / name)
    index = sharded(tmp_path / "in", {"a.safetensors": {"a": torch.zeros(1)}})
    index.rename(index.with_name("config.json"))
    with pytest.raises(
        ValueError,
        match=r"a file cannot be called 'config\.json': give a name that ends in \.index\.json",
    ):
        FileMemory(index.with_name("config.json"))


# --------------------------------------------------------------------------------------------------
# round trip


def test_metadata_that_disagrees_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file(
        {"a": torch.zeros(1)},
        tmp_path / "in" / "a.safetensors",
        metadata={"same": "1", "other": "1", "here": "1"},
    )
    save_file(
        {"b": torch.zeros(1)},
        tmp_path / "in" / "b.safetensors",
        metadata={"same": "1", "other": "2"},
    )
    copy(tmp_path / "in", tmp_path / "out.safetensors")
    assert read_header(tmp_path / "out.safetensors").metadata == {"same": "1"}


def test_some_tensors_of_a_sharded_model(tmp_path: Path) -> None:
    tensors = some()
    files = {
        "one.safetensors": {"mask": tensors["mask"], "scalar": tensors["scalar"]},
        "two.safetensors": {"layers.0.w": tensors["layers.0.w"]},
        "three.safetensors": {"layers.1.w": tensors["layers.1.w"], "none": tensors["none"]},
    }
    sharded(tmp_path / "in", files)
    target = copy(tmp_path / "in", tmp_path / "out", "layers.*")
    assert [file.name for file in target.files] == [
        "two.safetensors",
        "three.safetensors",
        "model.safetensors.index.json",
    ] or {file.name for file in target.files} == set(listing(tmp_path / "out"))
    assert (tmp_path / "out" / "two.safetensors").read_bytes() == (
        tmp_path / "in" / "two.safetensors"
    ).read_bytes()
    save_file({"layers.1.w": tensors["layers.1.w"]}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "out" / "three.safetensors").read_bytes() == (
        tmp_path / "theirs"
    ).read_bytes()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "layers.0.w": "two.safetensors",
        "layers.1.w": "three.safetensors",
    }
    assert index["metadata"]["total_size"] == sum(
        tensors[name].nbytes for name in index["weight_map"]
    )
    copy(tmp_path / "out", tmp_path / "again")  # what was written is a model of its own
    copy(tmp_path / "in", tmp_path / "some.safetensors", "scalar", "layers.1.*")
    assert load_file(tmp_path / "some.safetensors").keys() == {"scalar", "layers.1.w"}


def test_tensors_of_a_trainer(tmp_path: Path) -> None:
    """No metadata: one file; and what is tied is written under each name."""
    tied = torch.arange(6.0).view(2, 3)
    tensors = {"head": tied, "body": torch.ones(2), "embedding": tied, "empty": torch.zeros(0)}
    memory = RegisteredMemory(tensors)
    manifest = manifest_of(memory)
    with FileTarget(tmp_path / "out") as target:
        move(manifest, memory.map(manifest), target.map(manifest))
        target.commit()
    assert target.files == (tmp_path / "out" / "model.safetensors",)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "theirs")
    assert target.files[0].read_bytes() == (tmp_path / "theirs").read_bytes()
    with FileTarget(tmp_path / "some.safetensors", ["embedding", "b*"]) as target:
        mapped = target.map(manifest)
        assert len(mapped.unwanted) == 1
        move(manifest, memory.map(manifest), mapped)
        target.commit()
    assert load_file(tmp_path / "some.safetensors")["embedding"].equal(tied)


def test_dtypes_without_a_name_in_files(tmp_path: Path) -> None:
    manifest = manifest_of(
        RegisteredMemory({"z": torch.zeros(2, dtype=torch.complex128), "a": torch.zeros(1)})
    )
    with FileTarget(tmp_path / "out") as target:
        with pytest.raises(
            ManifestMismatch, match=r"cannot be written as safetensors files: .*'z' is complex128"
        ) as caught:
            target.map(manifest)
        assert caught.value.differences
        with pytest.raises(ManifestMismatch, match="no tensor is called 'none"):
            FileTarget(tmp_path / "more", ["none*"]).map(manifest)


# --------------------------------------------------------------------------------------------------
# hostile metadata


M, HEADER = "m.safetensors", make_header([("a", "uint8", (3,))], {}).text


def packed(*said: object) -> bytes:
    return FORMAT + b"".join(map(msgpack.packb, said))


def indexed(name: object, text: object) -> bytes:
    return packed(name, text, M, HEADER)


def unindexed(*files: object) -> bytes:
    return packed("", b"", *files)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (unindexed("../x.safetensors", b"{}"), r"a file cannot be called '\.\./x\.safetensors'"),
        (
            unindexed("config.json", b"{}"),
            r"a file cannot be called 'config\.json': give a name that ends in \.safetensors",
        ),
        (unindexed("model.safetensors.index.json", b"{}"), "a file cannot be called"),
        (unindexed(3, b"{}"), "without a name"),
        (unindexed([], b"{}"), "does not tell of files"),
        (unindexed(M, "{}"), "without a name or a header"),
        (unindexed(M), "does not tell of files"),
        (packed(), "does not tell of files"),
        (packed(""), "does not tell of files"),
        (FORMAT + b"\xc1", "does not tell of files"),
        (FORMAT + b"\xdd\xff\xff\xff\xff", "does not tell of files"),
        (unindexed(M, [[]]), "does not tell of files"),
        (unindexed(M, {"a": 1}), "does not tell of files"),
        (unindexed(M, msgpack.ExtType(1, b"x")), "does not tell of files"),
        (unindexed(), "is not true of tensor 'a'"),
        (unindexed(M, b"{"), "is not JSON"),
        (unindexed(M, b"{}"), "is not true of tensor 'a'"),
        (unindexed(M, b"{}", M, b"{}"), "twice"),
        (unindexed(M, make_header([("a", "int8", (3,))], {}).text), "tensor 'a'"),
        (
            unindexed(*(part for at in range(4097) for part in (f"{at}.safetensors", b"{}"))),
            "more than 4096 files",
        ),
        (
            indexed("../i.index.json", b'{"weight_map": {"a": "m.safetensors"}}'),
            "a file cannot be called",
        ),
        (
            indexed("tokenizer.json", b'{"weight_map": {"a": "m.safetensors"}}'),
            "a file cannot be called 'tokenizer",
        ),
        (
            indexed("m.safetensors", b'{"weight_map": {"a": "m.safetensors"}}'),
            "a file cannot be called",
        ),
        (indexed(5, b'{"weight_map": {"a": "m.safetensors"}}'), "a file cannot be called '5'"),
        (
            indexed("i.index.json", b'{"weight_map": {"a": "n.safetensors"}}'),
            r"tensor 'a' is in n\.safetensors, but it is in m",
        ),
        (
            indexed("i.index.json", b'{"weight_map": {"a": "m.safetensors"}, "auto_map": {}}'),
            "nothing else",
        ),
        (indexed("i.index.json", "{}"), "without a name or a header"),
    ],
)
def test_hostile_metadata(tmp_path: Path, metadata: bytes, reason: str) -> None:
    described = RegisteredMemory({"a": torch.zeros(3, dtype=torch.uint8)}).descriptions
    manifest = build_manifest(described, CHUNK_BYTES, "none", metadata=metadata)
    with FileTarget(tmp_path / "out") as target, pytest.raises(ManifestMismatch, match=reason):
        target.map(manifest)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: b'{"weight_map":{' + b'"":{},' * 2**20 + b'"":{}}}',
        lambda: (
            b'{"weight_map":{"a":"m.safetensors"},"metadata":{"a":[' + b"[]," * 2**21 + b"[]]}}"
        ),
        lambda: (
            b'{"weight_map":{'
            + b",".join(b'"%x":"%x.safetensors"' % (at, at) for at in range(250_000))
            + b"}}"
        ),
    ],
)
def test_an_index_costs_what_it_holds(make: Callable[[], bytes]) -> None:
    bomb = make()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"names|is not JSON"):
            Index.parse("m.index.json", bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(bomb)


@pytest.mark.parametrize(
    "metadata", [b"", b"\xff", b"[1]", b'{"format": "safetensors/1"}', FORMAT[:-1]]
)
def test_metadata_of_others_is_none_of_ours(metadata: bytes) -> None:
    assert Checkpoint.decode(metadata) is None


# --------------------------------------------------------------------------------------------------
# outputs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "m.safetensors"
    path.parent.mkdir()
    save_file(some(), path)
    return path


def test_an_output_that_exists(tmp_path: Path, model: Path) -> None:
    file, folder = tmp_path / "out.safetensors", tmp_path / "out"
    file.write_text("old")
    folder.mkdir()
    (folder / "old").touch()
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "plain").touch()
    for out, force, reason in (
        (file, False, "exists: take another place"),
        (folder, False, "exists and is not empty: take another place"),
        (tmp_path / "dir.safetensors", True, "is a directory"),
        (tmp_path / "plain", True, "is not a directory"),
        (
            tmp_path / "none" / "out",
            True,
            "nothing can be written in .*none: No such file or directory",
        ),
        (tmp_path / "plain" / "x.safetensors", True, "Not a directory"),
    ):
        with pytest.raises(StateError, match=reason):
            FileTarget(out, force=force)
    assert file.read_text() == "old"
    copy(model, file, force=True)
    assert file.read_bytes() == model.read_bytes()
    copy(model, folder, force=True)
    assert listing(folder) == {"old": b"", "m.safetensors": model.read_bytes()}
    assert {path.name for path in tmp_path.iterdir()} == {
        "in",
        "out",
        "out.safetensors",
        "dir.safetensors",
        "plain",
    }


@pytest.mark.parametrize("out", ["x" * 300, "x" * 300 + ".safetensors", "file/out"])
def test_a_name_that_cannot_be_is_refused_before_anything(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"out|/x+\.\.\.x+"):
        FileTarget(tmp_path / out)
    assert os.listdir(tmp_path) == ["file"]


def test_a_version_without_a_tensor_is_nothing_to_write(tmp_path: Path) -> None:
    """No publisher has one; a hostile one says so."""
    for out in ("out", "out.safetensors"):
        with (
            FileTarget(tmp_path / out) as target,
            pytest.raises(ManifestMismatch, match="holds no tensor"),
        ):
            target.map(Manifest((), (), CHUNK_BYTES, "none", ""))
    assert os.listdir(tmp_path) == []


def test_an_empty_directory_is_replaced_as_a_whole(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for made in (out, elsewhere):
        made.mkdir()
    (tmp_path / "link").symlink_to(out)
    copy(model, tmp_path / "link")
    assert listing(out) == {"m.safetensors": model.read_bytes()}
    monkeypatch.chdir(elsewhere)
    copy(model, Path())  # somebody is in it: it stays the same directory
    assert os.listdir() == ["m.safetensors"]


def test_an_output_that_appears_meanwhile_is_left_alone(tmp_path: Path, model: Path) -> None:
    with FileMemory(model) as memory, FileTarget(tmp_path / "out.safetensors") as target:
        target.map(manifest_of(memory))
        (tmp_path / "out.safetensors").write_text("faster")
        with pytest.raises(StateError, match="exists: take another place"):
            target.commit()
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out.safetensors"}
    assert (tmp_path / "out.safetensors").read_text() == "faster"


def test_what_is_not_committed_leaves_nothing(tmp_path: Path, model: Path) -> None:
    with FileMemory(model) as memory:
        for out in ("out", "out.safetensors"):
            with FileTarget(tmp_path / out) as target:
                mapped = target.map(manifest_of(memory))
                target.map(manifest_of(memory))  # another version after all
                assert len(os.listdir(tmp_path)) == 3
                del mapped
            assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_a_file_that_may_not_be_so_large(tmp_path: Path, model: Path, out: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    needed = f"/{out} cannot be made: {model.stat().st_size} bytes are needed, "
    with FileMemory(model) as memory, FileTarget(tmp_path / out) as target:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            with pytest.raises(
                StateError, match=rf"{needed}\d+ are free there \(File too large\)$"
            ):
                target.map(manifest_of(memory))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["in"]
