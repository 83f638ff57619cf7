"""Loaders that know nothing of TensorHub, and a mounted version: equal to the byte. How a mount
fails, and how it ends.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from examples.encoder import model_path
from tests.frameworks.mounted import WAIT_S, end, lacks, mounted, start
from tests.frameworks.publisher import Publisher, publisher

pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(bool(lacks()), reason=lacks() or "mounts"),
]
MIB = 2**20
FILE = "model.safetensors"
QUICK = ("--timeout", "5")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Publisher]:
    with publisher(tmp_path) as made:
        yield made


def some(mib: int = 24) -> dict[str, torch.Tensor]:
    made = {f"layers.{n}.weight": torch.randn(MIB // 4) for n in range(mib)}
    return {**made, "mask": torch.tensor([True, False, True]), "norm": torch.randn(33)}


def check(found: Mapping[str, torch.Tensor], published: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == published.keys()
    for name, tensor in published.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name].cpu(), tensor), name


# --------------------------------------------------------------------------------------------------
# loaders


def test_transformers_and_accelerate(trainer: Publisher, tmp_path: Path) -> None:
    """A sentence encoder with other weights than the files': those of the version are loaded."""
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    local = model_path().parent
    trained = transformers.AutoModel.from_pretrained(local)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    trainer.publish(trained.state_dict())
    with mounted(trainer.address, "m@latest", tmp_path / "m", "--files", str(local)) as directory:
        loaded = transformers.AutoModel.from_pretrained(directory)
        check(loaded.state_dict(), trained.state_dict())
        words = transformers.AutoTokenizer.from_pretrained(directory)("three words here")
        assert words == transformers.AutoTokenizer.from_pretrained(local)("three words here")
        empty = transformers.AutoModel.from_config(loaded.config)
        accelerate.load_checkpoint_in_model(empty, str(directory))
        check(empty.state_dict(), trained.state_dict())


def test_diffusers(trainer: Publisher, tmp_path: Path) -> None:
    """A version that was published from a file has the file's name."""
    diffusers = pytest.importorskip("diffusers")
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "sample_size": 8}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    trained = diffusers.UNet2DModel(**sizes, **blocks)
    trained.save_pretrained(tmp_path / "local")
    trainer.publish_file(tmp_path / "local" / "diffusion_pytorch_model.safetensors")
    with mounted(
        trainer.address, "m@1", tmp_path / "m", "--files", str(tmp_path / "local")
    ) as directory:
        names = sorted(path.name for path in directory.iterdir())
        assert names == ["config.json", "diffusion_pytorch_model.safetensors"]
        check(diffusers.UNet2DModel.from_pretrained(directory).state_dict(), trained.state_dict())


def test_safetensors_mapped_and_read(trainer: Publisher, tmp_path: Path) -> None:
    tensors = some()
    trainer.publish(tensors)
    with mounted(trainer.address, "m@latest", tmp_path / "m", "--cache", "8MiB") as directory:
        check(load_file(directory / FILE), tensors)
        with safe_open(directory / FILE, "pt") as file:
            assert torch.equal(file.get_tensor("layers.3.weight"), tensors["layers.3.weight"])
            part = file.get_slice("layers.5.weight")[100:2000]
            assert torch.equal(part, tensors["layers.5.weight"][100:2000])
        save_file(load_file(directory / FILE), tmp_path / "copy")
        check(load_file(tmp_path / "copy"), tensors)


def test_fsspec(trainer: Publisher) -> None:
    from tensorhub.fs import TensorHubFileSystem

    fsspec.register_implementation("tensorhub", TensorHubFileSystem, clobber=True)
    tensors = some()
    trainer.publish(tensors)
    with fsspec.open(
        f"tensorhub://{trainer.address.removeprefix('tcp://')}/m/latest/{FILE}"
    ) as file:
        check(load(file.read()), tensors)
        file.fs.close()
    TensorHubFileSystem.clear_instance_cache()


# --------------------------------------------------------------------------------------------------
# mounts


def test_several_readers(trainer: Publisher, tmp_path: Path) -> None:
    tensors = some()
    trainer.publish(tensors)
    with (
        mounted(trainer.address, "m@latest", tmp_path / "m", "--cache", "8MiB") as directory,
        ThreadPoolExecutor(4) as threads,
    ):
        for found in threads.map(lambda _: (directory / FILE).read_bytes(), range(4)):
            check(load(found), tensors)


def test_all_versions_and_the_newest(trainer: Publisher, tmp_path: Path) -> None:
    first, second = some(2), some(2)
    trainer.publish(first, 3)
    with mounted(trainer.address, "m", tmp_path / "m") as directory:
        assert sorted(os.listdir(directory)) == ["3", "latest"]
        assert os.readlink(directory / "latest") == "3"
        check(load_file(directory / "latest" / FILE), first)
        trainer.publish(second, 4)
        assert sorted(os.listdir(directory)) == ["3", "4", "latest"]
        check(load_file(directory / "4" / FILE), second)
        check(load_file(directory / "3" / FILE), first)
        for name in ("5", "03", "x"):
            assert not (directory / name).exists()


def test_it_cannot_be_written(trainer: Publisher, tmp_path: Path) -> None:
    trainer.publish(some(1))
    with mounted(trainer.address, "m@1", tmp_path / "m") as directory:
        for path in (directory / FILE, directory / "new"):
            with pytest.raises(OSError, match="Read-only"):
                path.write_bytes(b"x")
        with pytest.raises(FileNotFoundError):
            (directory / "config.json").read_bytes()


def read_all(file: BinaryIO) -> None:
    while file.read(MIB):
        pass


def test_a_version_that_is_gone(trainer: Publisher, tmp_path: Path) -> None:
    trainer.publish(some())
    with (
        mounted(trainer.address, "m@1", tmp_path / "m", "--cache", "8MiB", *QUICK) as directory,
        (directory / FILE).open("rb", buffering=0) as file,
    ):
        assert len(file.read(4096)) == 4096
        trainer.unpublish()
        with pytest.raises(OSError, match="Stale") as caught:
            read_all(file)
        assert caught.value.errno == errno.ESTALE


def test_the_cluster_goes_away(tmp_path: Path) -> None:
    with publisher(tmp_path) as trainer:
        trainer.publish(some())
        process = start(trainer.address, "m@1", tmp_path / "m", "--cache", "8MiB", *QUICK)
        file = (tmp_path / "m" / FILE).open("rb", buffering=0)
        assert len(file.read(4096)) == 4096
    with file, pytest.raises(OSError, match="Input/output error"):
        read_all(file)
    assert "mount_failed_read" in end(process, tmp_path / "m")


def test_a_killed_mount_is_mounted_anew(trainer: Publisher, tmp_path: Path) -> None:
    tensors = some(2)
    trainer.publish(tensors)
    process = start(trainer.address, "m@1", tmp_path / "m")
    process.kill()
    process.communicate(timeout=WAIT_S)
    with pytest.raises(OSError, match="not connected"):
        os.listdir(tmp_path / "m")
    with mounted(trainer.address, "m@1", tmp_path / "m") as directory:
        check(load_file(directory / FILE), tensors)


def test_what_cannot_be_mounted(trainer: Publisher, tmp_path: Path) -> None:
    trainer.publish(some(1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for what, directory in (
        ("m@1", "full"),
        ("m@2", "empty"),
        ("other", "empty"),
        ("m@x", "empty"),
    ):
        with pytest.raises(AssertionError, match="error: "):
            start(trainer.address, what, tmp_path / directory)
        assert not (tmp_path / directory).is_mount()


def test_a_second_mount_does_not_hide_the_first(trainer: Publisher, tmp_path: Path) -> None:
    tensors = some(1)
    trainer.publish(tensors)
    with mounted(trainer.address, "m@1", tmp_path / "m") as directory:
        with pytest.raises(AssertionError, match="has a version mounted"):
            start(trainer.address, "m@1", directory)
        check(load_file(directory / FILE), tensors)
