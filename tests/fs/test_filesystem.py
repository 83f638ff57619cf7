"""Versions as files, by fsspec: what is there, which bytes they have, and how reads fail."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import fsspec
import pytest
import safetensors.torch
import torch

from tensorhub import errors, source
from tensorhub.api.hub import Hub
from tensorhub.api.tools import register_memory
from tensorhub.api.weights import Weights
from tensorhub.fs import TensorHubFileSystem
from tensorhub.memory.files import FileMemory
from tests.memory.test_files import sharded
from tests.rig import OPTIONS, WAIT_S, Cluster, Restartable, all_of, cluster, connect, nothing_left

Tensors = dict[str, torch.Tensor]
CHUNK_BYTES = 4096
SMALL = replace(OPTIONS, chunk_bytes=CHUNK_BYTES)  # so that a version has many windows
FILE = "m/latest/model.safetensors"


def layers() -> Tensors:
    """Of several dtypes and shapes, some of which would move the next ones off their alignment."""
    tied = torch.randn(33, 64)
    return {
        "mask": torch.tensor([True, False, True]),
        "embed": tied,
        "../up": torch.randn(7),
        "a/b": torch.randint(0, 99, (5, 5), dtype=torch.int8),
        "big": torch.randn(300, 128),
        "half": torch.randn(9, 11, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "head": tied,
    }


def read(fs: TensorHubFileSystem, path: str = FILE) -> bytes:
    found: bytes = fs.open(path).read()
    return found


async def aread(fs: TensorHubFileSystem, path: str = FILE) -> bytes:
    return await anyio.to_thread.run_sync(read, fs, path)


def check(found: bytes, published: Mapping[str, torch.Tensor]) -> None:
    loaded = safetensors.torch.load(found)
    assert loaded.keys() == published.keys()
    for name, tensor in published.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name], tensor), name


async def publish(hub: Hub, tensors: Any, version: int = 1, model: str = "m") -> Weights:
    weights = await hub.register(model, tensors)
    await weights.publish(version)
    return weights


@asynccontextmanager
async def reading(
    c: Cluster, cache_bytes: int = 2**20, **settings: Any
) -> AsyncIterator[TensorHubFileSystem]:
    """A filesystem of that cluster, closed at the end."""
    settings = {"timeout": WAIT_S, "cache_bytes": cache_bytes, **settings}
    fs = TensorHubFileSystem(c.address, skip_instance_cache=True, **settings)
    try:
        yield fs
    finally:
        await anyio.to_thread.run_sync(fs.close)


# --------------------------------------------------------------------------------------------------
# bytes


async def test_a_loader_gets_what_was_published() -> None:
    tensors = layers()
    async with cluster("trainer", options=SMALL) as c, reading(c) as fs:
        await publish(c.hubs[0], tensors)
        check(await aread(fs), tensors)
        info = await anyio.to_thread.run_sync(fs.info, FILE)
        assert (info["version"], info["type"]) == (1, "file")


async def test_each_tensor_is_aligned() -> None:
    async with cluster("trainer", options=SMALL) as c, reading(c) as fs:
        await publish(c.hubs[0], layers())
        found = await aread(fs)
    length = int.from_bytes(found[:8], "little")
    header = json.loads(found[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    sizes = {"F64": 8, "F32": 4, "BF16": 2}
    for name, said in header.items():
        assert (8 + length + said["data_offsets"][0]) % sizes.get(said["dtype"], 1) == 0, name


async def test_any_range_is_what_the_whole_file_has_there_and_memory_is_bounded() -> None:
    tensors = layers()
    async with cluster("trainer", options=SMALL) as c, reading(c, 8 * CHUNK_BYTES) as fs:
        await publish(c.hubs[0], tensors)
        whole = await aread(fs)
        check(whole, tensors)
        version, name = fs.version(FILE)
        cache, draw = fs.reader.cache, random.Random(1)
        assert len(whole) > 4 * cache.cache_bytes

        def ranges() -> None:
            for _ in range(50):
                start = draw.randrange(len(whole))
                stop = start + draw.choice([1, 9, 300, 5000, 100_000])
                assert version.read(name, start, stop) == whole[start:stop]
                assert cache.nbytes <= cache.cache_bytes

        await anyio.to_thread.run_sync(ranges)


async def test_many_readers_at_once_with_little_memory() -> None:
    tensors = layers()
    async with cluster("trainer", options=SMALL) as c, reading(c, 8 * CHUNK_BYTES) as fs:
        await publish(c.hubs[0], tensors)
        whole = await aread(fs)

        def one(seed: int) -> None:
            draw, file = random.Random(seed), fs.open(FILE)
            for _ in range(10):
                start = draw.randrange(len(whole))
                file.seek(start)
                assert file.read(7000) == whole[start : start + 7000]

        def all_() -> None:
            with ThreadPoolExecutor(6) as threads:
                list(threads.map(one, range(6)))

        await anyio.to_thread.run_sync(all_)


async def test_files_come_back_equal_to_the_byte(tmp_path: Path) -> None:
    tensors = layers()
    del tensors["head"]  # the library writes no tied tensors
    first = {name: tensors.pop(name) for name in ("mask", "big")}
    index = sharded(tmp_path, {"one.safetensors": first, "two.safetensors": tensors})
    paths = [index, *(tmp_path / f"{name}.safetensors" for name in ("one", "two"))]
    with FileMemory(index) as memory:
        async with cluster("trainer", options=SMALL) as c, reading(c, 8 * CHUNK_BYTES) as fs:
            weights = await register_memory(c.hubs[0], "m", memory)
            await weights.publish(3)
            found = await anyio.to_thread.run_sync(fs.ls, "m/3", False)
            assert sorted(found) == sorted(f"m/3/{path.name}" for path in paths)
            for path in paths:
                assert await aread(fs, f"m/3/{path.name}") == path.read_bytes()


@pytest.mark.parametrize("cache_bytes", [2**20, 8 * CHUNK_BYTES])
async def test_ranks_are_put_together(cache_bytes: int) -> None:
    """Also in windows that are less than one tensor."""
    whole = {f"l.{n}.{part}": torch.randn(64, 96) for n in range(3) for part in ("rows", "columns")}
    whole |= {f"l.{n}.norm": torch.ones(32) for n in range(3)}

    def part(name: str, rank: int) -> Any:
        view = source(name, shape=tuple(whole[name].shape))
        if name.endswith("norm"):
            return view[:]
        half = whole[name].shape[name.endswith("columns")] // 2
        here = slice(rank * half, (rank + 1) * half)
        return view[:, here] if name.endswith("columns") else view[here]

    def tensor(name: str, rank: int) -> torch.Tensor:
        if name.endswith("norm"):
            return whole[name].clone()
        return whole[name].chunk(2, int(name.endswith("columns")))[rank].contiguous()

    async with cluster("a", "b", options=SMALL) as c, reading(c, cache_bytes) as fs:
        weights = [
            await hub.register(
                "m",
                {name: tensor(name, rank) for name in whole},
                group="g",
                rank=rank,
                world_size=2,
                sources={name: part(name, rank) for name in whole},
            )
            for rank, hub in enumerate(c.hubs)
        ]
        await all_of(*[each.publish(1) for each in weights])
        check(await aread(fs), whole)
        assert fs.reader.cache.nbytes <= cache_bytes


@pytest.mark.heavy
async def test_a_hundred_thousand_tensors() -> None:
    many = torch.arange(100_000 * 4, dtype=torch.float32).view(-1, 4)
    tensors = {f"layers.{n}": row for n, row in enumerate(many)}
    # the coordinator, which is told of all of them, is a thread of the same busy interpreter
    patient = replace(OPTIONS, lease_s=120)
    async with cluster("trainer", options=patient) as c, reading(c) as fs:
        await publish(c.hubs[0], tensors)
        found = safetensors.torch.load(await aread(fs))
        assert len(found) == len(tensors)
        assert torch.equal(torch.stack([found[name] for name in tensors]), many)


# --------------------------------------------------------------------------------------------------
# what is there


async def test_directories() -> None:
    async with cluster("trainer", options=SMALL) as c, reading(c) as fs:
        await publish(c.hubs[0], layers())
        await publish(c.hubs[0], layers(), 7, "org/model")
        await publish(c.hubs[0], layers(), 7, "..")

        def look() -> None:
            assert fs.ls("", detail=False) == ["%2E%2E", "m", "org%2Fmodel"]
            assert fs.ls("org%2Fmodel", detail=False) == ["org%2Fmodel/7", "org%2Fmodel/latest"]
            assert fs.ls("%2E%2E/7", detail=False) == ["%2E%2E/7/model.safetensors"]
            assert fs.find("m/1") == ["m/1/model.safetensors"]
            assert fs.glob("m/latest/*.safetensors") == [FILE]
            assert fs.isdir("m")
            assert fs.isdir("m/available")
            assert fs.isfile(FILE)

        await anyio.to_thread.run_sync(look)


async def test_what_is_not_there() -> None:
    async with cluster("trainer", options=SMALL) as c, reading(c) as fs:
        await publish(c.hubs[0], layers())
        for path in (
            "n",
            "n/latest/model.safetensors",
            "m/2/model.safetensors",
            "m/newest/model.safetensors",
            "m/latest/config.json",
            "m/latest/../../etc/passwd",
            f"m/{2**70}/model.safetensors",
            f"m/{'9' * 5000}/model.safetensors",
        ):
            with pytest.raises(FileNotFoundError):
                await anyio.to_thread.run_sync(fs.info, path)
            with pytest.raises(FileNotFoundError):
                await anyio.to_thread.run_sync(fs.open, path)
        with pytest.raises(OSError, match="read-only"):
            await anyio.to_thread.run_sync(fs.open, FILE, "wb")


async def test_local_files_stand_beside_the_weights(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in (
        "config.json",
        "sub/deep/tokenizer.json",
        ".git/config",
        "model.safetensors",
        "sub/old.bin",
    ):
        (tmp_path / name).write_text(name)
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    async with cluster("trainer", options=SMALL) as c, reading(c, files=tmp_path) as fs:
        await publish(c.hubs[0], layers())

        def look() -> None:
            assert fs.find("m/1") == [
                "m/1/config.json",
                "m/1/model.safetensors",
                "m/1/sub/deep/tokenizer.json",
            ]
            assert fs.ls("m/1/sub", detail=False) == ["m/1/sub/deep"]
            assert fs.cat("m/1/sub/deep/tokenizer.json") == b"sub/deep/tokenizer.json"
            assert fs.info("m/1/config.json")["size"] == len("config.json")
            assert fs.info("m/1/sub")["type"] == "directory"
            assert fs.size("m/1/model.safetensors") > 2**15

        await anyio.to_thread.run_sync(look)


async def test_a_local_file_that_goes_away_takes_no_other_one_with_it(tmp_path: Path) -> None:
    for name in ("config.json", "gone.json", "pipe.json"):
        (tmp_path / name).write_text(name)
    elsewhere = tmp_path.with_name("elsewhere.json")
    elsewhere.write_text("linked")
    (tmp_path / "linked.json").symlink_to(elsewhere)  # as in Hugging Face's cache
    async with cluster("trainer", options=SMALL) as c, reading(c, files=tmp_path) as fs:
        await publish(c.hubs[0], layers())
        for name in ("gone.json", "pipe.json"):
            (tmp_path / name).unlink()
        os.mkfifo(tmp_path / "pipe.json")

        def look() -> None:
            assert "m/1/config.json" in fs.find("m/1")
            assert "m/1/gone.json" not in fs.find("m/1")
            assert fs.cat("m/1/linked.json") == b"linked"
            for name in ("gone.json", "pipe.json"):  # a pipe without a writer is not waited for
                with pytest.raises(FileNotFoundError):
                    fs.open(f"m/1/{name}")

        await anyio.to_thread.run_sync(look)


async def test_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("tensorhub", TensorHubFileSystem, clobber=True)
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    tensors = layers()
    async with cluster("trainer", options=SMALL) as c:
        await publish(c.hubs[0], tensors)
        url = f"tensorhub://{c.address.removeprefix('tcp://')}/{FILE}"

        def look() -> None:
            with fsspec.open(url, timeout=WAIT_S) as file:
                check(file.read(), tensors)
                fs = file.fs
            assert fs.unstrip_protocol(FILE) == url
            same = pickle.loads(pickle.dumps(fs))
            assert same.open(FILE).read(8) == fs.open(url).read(8)
            with pytest.raises(errors.InvalidValue, match="TENSORHUB_ADDRESS"):
                fsspec.open(f"tensorhub:///{FILE}")
            monkeypatch.setenv("TENSORHUB_ADDRESS", c.address)
            with fsspec.open(f"tensorhub:///{FILE}", timeout=WAIT_S) as file:
                assert file.fs.reader is fs.reader  # one hub for a cluster
            fs.close()

        try:
            await anyio.to_thread.run_sync(look)
        finally:
            TensorHubFileSystem.clear_instance_cache()


def test_arguments(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"cache_bytes": 0}, {"cache_bytes": "1GB"}]
    wrong += [{"files": tmp_path / "none"}, {"timeout": "60"}, {"timeout": -1}, {"timeout": []}]
    for settings in wrong:
        with pytest.raises(errors.StateError):
            TensorHubFileSystem("tcp://127.0.0.1:1", skip_instance_cache=True, **settings)


# --------------------------------------------------------------------------------------------------
# failing


async def test_a_dtype_that_the_format_lacks_is_named() -> None:
    async with cluster("trainer", options=SMALL) as c, reading(c) as fs:
        await publish(
            c.hubs[0], {"good": torch.ones(2), "wide": torch.ones(2, dtype=torch.complex128)}
        )
        with pytest.raises(errors.ManifestMismatch, match="'wide' is complex128"):
            await anyio.to_thread.run_sync(fs.ls, "m/1")


def hurry(file: Any) -> None:
    """Have reads of this file fail soon, if they fail by their deadline."""
    file._version._timeout_s = 0.2


async def test_an_open_file_never_becomes_another_version() -> None:
    first, second = layers(), layers()
    async with cluster("trainer", options=SMALL) as c, reading(c, 8 * CHUNK_BYTES) as fs:
        weights = await publish(c.hubs[0], first)
        file = await anyio.to_thread.run_sync(fs.open, FILE)
        assert len(await anyio.to_thread.run_sync(file.read, 9)) == 9
        await weights.unpublish()
        await publish(c.hubs[0], second, 2)
        hurry(file)
        with pytest.raises((errors.VersionUnavailable, errors.OperationTimeout)):
            await anyio.to_thread.run_sync(file.read)
        check(await aread(fs), second)


async def test_a_number_that_is_published_anew_is_another_version() -> None:
    first, second = layers(), layers()
    async with cluster("trainer", options=SMALL) as c, reading(c, 8 * CHUNK_BYTES) as fs:
        base = await publish(c.hubs[0], layers(), 0)
        weights = await publish(c.hubs[0], first)
        file = await anyio.to_thread.run_sync(fs.open, "m/1/model.safetensors")
        await anyio.to_thread.run_sync(file.read, 9)
        await c.hubs[0].rollback("m", to=0)
        await weights.close()
        await publish(c.hubs[0], second)
        with pytest.raises(errors.VersionUnavailable, match="published anew"):
            await anyio.to_thread.run_sync(file.read)
        check(await aread(fs, "m/1/model.safetensors"), second)
        await base.close()


async def test_a_read_ends_at_its_deadline_if_the_cluster_has_gone() -> None:
    async with nothing_left():
        server = Restartable()
        await server.start()
        async with connect(server.address, "trainer", SMALL) as hub:
            await publish(hub, layers())
            fs = TensorHubFileSystem(
                server.address,
                timeout=WAIT_S,
                cache_bytes=8 * CHUNK_BYTES,
                skip_instance_cache=True,
            )
            file = await anyio.to_thread.run_sync(fs.open, FILE)
            await server.stop()
            hurry(file)
            with anyio.fail_after(WAIT_S), pytest.raises(errors.TensorHubError) as caught:
                await anyio.to_thread.run_sync(file.read)
            assert isinstance(caught.value, errors.OperationTimeout | errors.CoordinatorUnavailable)
            await anyio.to_thread.run_sync(fs.close)


async def test_a_failed_read_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = layers()
    async with cluster("trainer", options=SMALL) as c, reading(c) as fs:
        await publish(c.hubs[0], tensors)
        version, name = await anyio.to_thread.run_sync(fs.version, FILE)
        with monkeypatch.context() as broken:
            broken.setattr(version, "fetch", _fails)
            with pytest.raises(errors.IntegrityError):
                await anyio.to_thread.run_sync(version.read, name, 0, 2**20)
        check(await anyio.to_thread.run_sync(version.read, name, 0, 2**20), tensors)


def _fails(*_: object) -> None:
    raise errors.IntegrityError("broken")


async def test_a_closed_filesystem_ends_its_reads_and_begins_anew() -> None:
    async with cluster("trainer", options=SMALL) as c, reading(c) as fs:
        await publish(c.hubs[0], layers())
        file = await anyio.to_thread.run_sync(fs.open, FILE)
        await anyio.to_thread.run_sync(fs.close)
        with pytest.raises(errors.StateError):
            await anyio.to_thread.run_sync(file.read)
        assert await aread(fs)


async def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x" * 40)
    (tmp_path / "token").chmod(0o600)
    async with cluster("trainer", token="y" * 40) as c:
        fs = TensorHubFileSystem(c.address, token_file=tmp_path / "token", skip_instance_cache=True)
        with pytest.raises(errors.AuthenticationFailed):
            await anyio.to_thread.run_sync(fs.ls, "")
