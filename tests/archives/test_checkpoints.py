"""A checkpoint in a bucket as memory: it is what its files would be, or an error that names the
object.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest
import torch
from safetensors.torch import save, save_file

from tensorhub.archives import checkpoints
from tensorhub.archives.checkpoints import CheckpointMemory
from tensorhub.archives.store import Store
from tensorhub.errors import ArchiveUnavailable, IntegrityError, InvalidValue, ManifestMismatch
from tensorhub.memory.files import FileMemory
from tensorhub.model.manifest import Digest, Manifest, build_manifest
from tests.archives.servers import S3, SLOW_DOWN, Answer, answering
from tests.memory.test_files import never, sharded, some
from tests.memory.views import views

CHUNK_BYTES = 4096


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory in a store, whose credentials are in the environment."""
    if request.param == "file":
        (tmp_path / "a b").mkdir()
        return f"file://{tmp_path}/a%20b"
    server: S3 = request.getfixturevalue("s3")
    use(server, monkeypatch)
    return f"{server.url}/{token_hex(4)}"


def use(server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)


def put(url: str, files: dict[str, bytes]) -> None:
    store = Store(url)
    for name, text in files.items():
        store.put(name, [text])


def model(folder: Path) -> dict[str, bytes]:
    """The files of a model in two parts, with others beside."""
    tensors = some()
    names = list(tensors)
    parts = [{name: tensors[name] for name in half} for half in (names[:2], names[2:])]
    sharded(folder, {f"part-{n}.safetensors": part for n, part in enumerate(parts)})
    (folder / "config.json").write_text("{}")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def manifest_of(memory: CheckpointMemory | FileMemory, digest: Digest = "xxh3-64") -> Manifest:
    return build_manifest(
        memory.descriptions, CHUNK_BYTES, digest, "world/1", metadata=memory.metadata
    )


def loaded(memory: CheckpointMemory, digest: Digest = "xxh3-64") -> list[bytes]:
    memory.take(memoryview(bytearray(memory.memory_bytes)))
    manifest = manifest_of(memory, digest)
    memory.digests(manifest, never)
    return [bytes(view) for view in views(memory.map(manifest))]


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "REQUEST_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(checkpoints, "REQUESTS_AT_ONCE", 2)


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("digest", ["xxh3-64", "sha-256", "none"])
@pytest.mark.parametrize(
    ("name", "local"),
    [("", ""), ("/model.safetensors.index.json",) * 2, ("/part-1.safetensors",) * 2, ("/", "")],
)
def test_it_is_what_its_files_are(
    url: str, tmp_path: Path, name: str, local: str, digest: Digest
) -> None:
    put(url, model(tmp_path / "model"))
    memory = CheckpointMemory(url + name)
    memory.take(memoryview(bytearray(memory.memory_bytes)))
    told: list[tuple[int, int]] = []
    memory.progress = lambda done, total: told.append((done, total))
    with FileMemory(tmp_path / f"model{local}") as files:
        manifest = manifest_of(files, digest)
        assert manifest_of(memory, digest) == manifest
        assert memory.digests(manifest, never) == files.digests(manifest, never)
        assert told[-1] == (manifest.nbytes, manifest.nbytes)
        for here, there in zip(
            views(memory.map(manifest)), views(files.map(manifest)), strict=True
        ):
            assert bytes(here) == bytes(there)
        assert [each.rpartition("/")[2] for each in memory.names] == [
            each.rpartition("/")[2] for each in files.names
        ]


def test_a_large_header_and_tensors_without_bytes(url: str) -> None:
    tensors = {f"layers.{number}.weight": torch.full((1,), number) for number in range(1500)}
    text = save({**tensors, "none": torch.empty(0, 3)})
    assert int.from_bytes(text[:8], "little") > 2**16
    put(url, {"model.safetensors": text})
    assert sum(len(each) for each in loaded(CheckpointMemory(url))) == 1500 * 8
    put(url, {"model.safetensors": save({"none": torch.empty(0)})})
    assert loaded(CheckpointMemory(url)) == [b""]


def test_another_manifest_is_refused(url: str, tmp_path: Path) -> None:
    put(
        url,
        {
            "a.safetensors": save({"a": torch.zeros(3)}),
            "b.safetensors": save({"b": torch.zeros(3)}),
        },
    )
    with pytest.raises(ManifestMismatch):
        CheckpointMemory(f"{url}/a.safetensors").map(
            manifest_of(CheckpointMemory(f"{url}/b.safetensors"))
        )


# --------------------------------------------------------------------------------------------------
# what is no checkpoint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("garbage.safetensors", "garbage.safetensors is not a safetensors file"),
        ("short.safetensors", "short.safetensors is not a safetensors file"),
        ("none.safetensors", "none.safetensors is not a safetensors file"),
        ("cut.safetensors", "cut.safetensors is not a whole safetensors file: its header tells"),
        ("empty.safetensors", "empty.safetensors holds no tensor"),
        ("outside.index.json", "it names '../../x': only a plain file name"),
        ("wrong.index.json", "it says that tensor 'b' is in one.safetensors, but it is in none"),
        ("no.index.json", "no.index.json is not an index of safetensors files"),
        ("", "several indexes"),
        ("other", "other has no *.safetensors"),
    ],
)
def test_what_is_no_checkpoint(url: str, name: str, says: str) -> None:
    whole = save({"a": torch.zeros(3)})
    put(url, {
        "one.safetensors": whole,
        "garbage.safetensors": bytes(range(256)),
        "short.safetensors": b"123",
        "none.safetensors": b"",
        "cut.safetensors": whole[:-1],
        "empty.safetensors": save({}),
        "outside.index.json": b'{"weight_map": {"a": "../../x"}}',
        "wrong.index.json": b'{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}',
        "no.index.json": b"[]",
        "other/README.md": b"",
    })  # fmt: skip
    with pytest.raises(ValueError, match=r"^") as caught:
        CheckpointMemory(f"{url}/{name}")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("files", "name", "says"),
    [
        ({}, "gone.safetensors", "gone.safetensors is not there"),
        ({}, "gone.index.json", "gone.index.json is not there"),
        ({"m.index.json": b'{"weight_map": {"a": "b.safetensors"}}'}, "", "b.safetensors is not"),
        ({}, "gone", "correct the URL"),
    ],
)
def test_what_is_not_there(url: str, files: dict[str, bytes], name: str, says: str) -> None:
    put(url, {**files, "beside/it": b""})
    with pytest.raises(ArchiveUnavailable, match="correct the URL") as caught:
        CheckpointMemory(f"{url}/{name}".rstrip("/"))
    assert says in str(caught.value)


def test_urls_that_are_none() -> None:
    for url in ("http://host/m.safetensors", "s3://m.safetensors", "s3://key:hunter2@bucket/a"):
        with pytest.raises(InvalidValue) as caught:
            CheckpointMemory(url)
        assert "hunter2" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# objects that change


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("changed", ["written", "longer", "shorter", "gone"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_object_that_changes(url: str, tmp_path: Path, changed: str, when: str) -> None:
    files = model(tmp_path / "model")
    put(url, files)
    memory, store = CheckpointMemory(url), Store(url)
    name = "part-0.safetensors"
    text = files[name]
    others = {"written": text[:-1] + b"?", "longer": text + b"?", "shorter": text[:-20]}

    def change() -> None:
        if changed == "gone":
            store.delete([name])
        else:
            store.put(name, [others[changed]])

    memory.take(memoryview(bytearray(memory.memory_bytes)))
    if when == "before":
        change()
    todo = iter([change] if when == "meanwhile" else [])
    with pytest.raises(IntegrityError) as caught:
        memory.digests(manifest_of(memory), lambda: next(todo, never)())
    assert f"{url}/{name}" in str(caught.value)


@pytest.mark.usefixtures("small_requests")
def test_an_object_that_changes_and_changes_back(url: str, tmp_path: Path) -> None:
    files = model(tmp_path / "model")
    put(url, files)
    memory, store, name = CheckpointMemory(url), Store(url), "part-0.safetensors"
    memory.take(memoryview(bytearray(memory.memory_bytes)))
    todo = iter([files[name][:-1] + b"?", files[name]])

    def change() -> None:
        if (text := next(todo, None)) is not None:
            store.put(name, [text])

    with pytest.raises(IntegrityError, match=f"{name} has changed while it was read"):
        memory.digests(manifest_of(memory), change)


def test_a_file_that_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(some(), path)
    memory = CheckpointMemory(f"file://{path}")
    memory.take(memoryview(bytearray(memory.memory_bytes)))

    def write() -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")

    with pytest.raises(IntegrityError, match=r"m\.safetensors has changed while it was read"):
        memory.digests(manifest_of(memory), write)


def test_a_load_that_is_given_up(url: str, tmp_path: Path) -> None:
    put(url, model(tmp_path / "model"))
    memory = CheckpointMemory(url)
    memory.take(memoryview(bytearray(memory.memory_bytes)))

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memory.digests(manifest_of(memory), give_up)
    assert not [each for each in threading.enumerate() if "checkpoint" in each.name]


# --------------------------------------------------------------------------------------------------
# buckets


@pytest.fixture(params=["", "/m.safetensors"])
def what(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_no_such_bucket_and_wrong_credentials(
    s3: S3, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(s3, monkeypatch)
    with pytest.raises(ArchiveUnavailable, match=f"s3://nowhere/a{what} is not there|no such bu"):
        CheckpointMemory(f"s3://nowhere/a{what}", timeout_s=30)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(ArchiveUnavailable, match="credentials") as caught:
        CheckpointMemory(f"{s3.url}/a{what}", timeout_s=30)
    assert "hunter2" not in str(caught.value)


@pytest.fixture(params=["busy", "hangs", "away"])
def broken(request: pytest.FixtureRequest) -> Iterator[S3]:
    over = threading.Event()

    def hang(method: str, path: str) -> Answer:
        over.wait(60)
        return Answer()

    def busy(method: str, path: str) -> Answer:
        return SLOW_DOWN

    answers: dict[str, Callable[[str, str], Answer]] = {"busy": busy, "hangs": hang}
    with answering(answers.get(request.param, busy)) as server:
        if request.param != "away":
            yield server
        over.set()
    if request.param == "away":
        yield server


def test_a_bucket_that_does_not_answer(
    broken: S3, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(broken, monkeypatch)
    with pytest.raises(ArchiveUnavailable, match="after retries: try again later") as caught:
        CheckpointMemory(f"{broken.url}/a{what}", timeout_s=1)
    assert caught.value.retryable
