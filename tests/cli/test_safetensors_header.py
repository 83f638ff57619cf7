"""The header of a safetensors file, read without torch."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorhub.cli.safetensors_header import TORCH_NAMES, TensorSpec, allocate, read_header


def test_every_dtype_comes_back_as_zeros_of_the_same_shape(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    dtypes = [getattr(torch, name) for name in TORCH_NAMES.values()]
    made = {str(dtype): torch.zeros(2, 3).to(dtype) for dtype in dtypes}
    made |= {"scalar": torch.tensor(2.0), "none": torch.empty(0, 4)}
    save_file(made, path, metadata={"format": "pt"})
    zeros = allocate(read_header(path))
    assert {n: (t.dtype, t.shape) for n, t in zeros.items()} == {n: (t.dtype, t.shape) for n, t in load_file(path).items()}
    assert zeros["scalar"].item() == 0


def test_the_size_is_that_of_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(5, 2)}, tmp_path / "a")
    assert read_header(tmp_path / "a") == {"a": TensorSpec("float32", (5, 2), 40)}


def entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"__metadata__": {}},
        {"a": 3},
        {"a": {}},
        entry(dtype="X9"),
        entry(dtype=None),
        entry(shape=3),
        entry(shape=[-1]),
        entry(data_offsets=[0]),
        entry(data_offsets=[0, 8]),
        entry(data_offsets="04"),
    ],
)
def test_bad_headers(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "bad.bin"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"data")
    with pytest.raises(ValueError, match=r"bad\.bin is not a (whole )?safetensors file"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\2\0\0\0\0\0\0\0{}", b"\1\0\0\0\0\0\0\0{"])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="safetensors file"):
        read_header(path)


def test_a_truncated_file_and_a_lying_shape(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        read_header(path)
    with pytest.raises(ValueError, match="a has shape"):
        allocate({"a": TensorSpec("float32", (3,), 4)})
