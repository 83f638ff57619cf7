"""The header of a safetensors file: what its own library writes is read and written alike, and
nothing else is read.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from tensorhub.memory.safetensors import FILE_NAMES, Entry, make_header, parse_header, read_header

ITS_LIBRARY_LACKS = {"float8_e8m0fnu"}  # torch's side of it; the format has it


def every_dtype() -> dict[str, torch.Tensor]:
    names = [name for name in FILE_NAMES if name not in ITS_LIBRARY_LACKS]
    made = {
        f"of {name}": torch.ones(2, 3, dtype=torch.uint8).to(getattr(torch, name)) for name in names
    }
    return {
        **made,
        "scalar": torch.tensor(2.0),
        "none": torch.empty(0, 4),
        "größe 📏\x01": torch.zeros(1),
    }


# of two, the library takes any order
@pytest.mark.parametrize("metadata", [None, {"b\x7f": "\n/é\x1f"}])
def test_the_library_and_we_say_the_same(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    tensors = every_dtype()
    path = tmp_path / "some.safetensors"
    save_file(tensors, path, metadata=metadata)
    header = read_header(path)
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.entries} == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in load_file(path).items()
    }
    assert header.metadata == (metadata or {})
    assert header.file_bytes == path.stat().st_size
    assert header.encode() == path.read_bytes()[: header.data_at]
    again = make_header(
        [(e.name, e.dtype, e.shape) for e in reversed(header.entries)], metadata or {}
    )
    assert again == header


def test_what_the_format_cannot_say_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"'w' is int4; 'z' is complex128; a tensor is called '__metadata__'"
    ):
        make_header(
            [("w", "int4", (2,)), ("z", "complex128", (1,)), ("__metadata__", "uint8", (1,))], {}
        )


# --------------------------------------------------------------------------------------------------
# hostile


def entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "is not a JSON object"),
        (3, "is not a JSON object"),
        ({"a": 3}, "has not exactly"),
        ({"a": {}}, "has not exactly"),
        (entry(more=1), "has not exactly"),
        (entry(dtype="F4"), "has dtype 'F4'; known are"),
        (entry(dtype=None), "has dtype 'None'"),
        (entry(dtype=[]), r"has dtype '\[\]'"),
        (entry(shape=3), "a shape that is none"),
        (entry(shape=[-1]), "a shape that is none"),
        (entry(shape=[True]), "a shape that is none"),
        (entry(shape=[1.0]), "a shape that is none"),
        (entry(shape=[2**64]), "a shape that is none"),
        (entry(shape=[1] * 65), "a shape that is none"),
        (
            entry(shape=[0, 2**62, 4], data_offsets=[0, 0]),
            r"shape \(0, 4611686018427387904, 4\) takes 2\*\*63 bytes",
        ),
        (entry(data_offsets=[0]), "data_offsets that are none"),
        (entry(data_offsets=[4, 0]), "data_offsets that are none"),
        (entry(data_offsets="04"), "data_offsets that are none"),
        (entry(data_offsets=[0, 8]), "and has 8 bytes"),
        (entry(data_offsets=[4, 8]), "begins at byte 4 of the data, and not at 0"),
        (entry() | {"b": entry()["a"]}, "begins at byte 0 of the data, and not at 4"),
        ({"": entry()["a"]}, "a name is a string"),
        ({"__metadata__": 3}, "__metadata__ is not an object"),
        ({"__metadata__": {"a": 3}}, "__metadata__ holds what is not text"),
        ({"__metadata__": {"a": "\ud800"}}, "__metadata__ holds what is not text"),
    ],
)
def test_bad_headers(tmp_path: Path, header: object, reason: str) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "bad.bin"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"data")
    with pytest.raises(ValueError, match=rf"bad\.bin is not a safetensors file: .*{reason}"):
        read_header(path)


EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a":NaN}', "NaN is no number"),
        (b'{"a":%b,"a":%b}' % (EMPTY, EMPTY), "says 'a' twice"),
        (
            b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}',
            "says 'dtype' twice",
        ),
        (b'{"__metadata__":{"k":"","k":""}}', "says 'k' twice"),
        (b"\xff{}", "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
        (b'{"a":' + b"[" * 100_000, "is not JSON"),
        (b'{"a":%b' % EMPTY, "is not JSON"),
        (b'{"a":%b,}' % EMPTY, "is not JSON"),
        (b'{"a":%b "b":%b}' % (EMPTY, EMPTY), "is not JSON"),
        (b'{"a":%b}}' % EMPTY, "is not JSON"),
        (b'{"a" %b}' % EMPTY, "is not JSON"),
        (b'{"\xff":%b}' % EMPTY, "is not JSON"),
        (b'{"a\n":%b}' % EMPTY, "is not JSON"),
        (b'{"a\\x":%b}' % EMPTY, "is not JSON"),
        (b'{"a":{"dtype":"\xff"}}', "is not JSON"),
        (b' {"a":{}}', "is not a JSON object"),
        (b'{"a":{"shape":[' + b"9" * 5000 + b"]}}", "is not JSON"),
    ],
)
def test_bad_texts(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_header(text)


def test_a_name_that_is_there_twice_among_very_many() -> None:
    """Found without comparing each with each: that would take hours."""
    names = b",".join(b'"%d":%b' % (number, EMPTY) for number in range(50_000))
    with pytest.raises(ValueError, match="says '49999' twice"):
        parse_header(b'{%b,"49999":%b}' % (names, EMPTY))


def test_space_escapes_and_order_are_the_writers_affair() -> None:
    text = b"""{ "__metadata__" : { "k\\u00e9\\n" : "\\ud83d\\ude00" , "l" : "\xc3\xa9" } ,
        "\\"a\\\\" :\t{ "shape" : [ 1 , 2 ] , "data_offsets" : [ 0 , 2 ] , "dtype" : "U8" }\r} """
    header = parse_header(text)
    assert header.metadata == {"k\u00e9\n": "\U0001f600", "l": "\u00e9"}
    assert header.entries == (Entry('"a\\', "uint8", (1, 2), 0, 2),)
    assert json.loads(text)["__metadata__"] == header.metadata


MANY = 40_000


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: b"{" + b'"":{},' * 2**20 + b'"":{}}', "a name is a string"),
        (lambda: b'{"a":{},' + b'"":{},' * 2**20 + b'"":{}}', "has not exactly"),
        (lambda: b'{"a":[' + b"[]," * 2**21 + b"[]]}", "is not JSON"),
        (lambda: b'{"a":{"shape":[' + b"0," * 2**21 + b"0]}}", "is not JSON"),
        (
            lambda: (
                b'{"__metadata__":{' + b",".join(b'"%x":""' % at for at in range(600_000)) + b"}}"
            ),
            "says more than 65536 things",
        ),
        (lambda: b"{" + b",".join(b'"%x":%b' % (at, EMPTY) for at in range(MANY)) + b"}", ""),
    ],
)
def test_a_header_costs_what_it_holds(make: Callable[[], bytes], reason: str) -> None:
    """Megabytes of which a careless reader would make thirty times as many."""
    text = make()
    tracemalloc.start()
    try:
        if reason:
            with pytest.raises(ValueError, match=reason):
                parse_header(text)
        else:
            assert len(parse_header(text).entries) == MANY
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (4.5 if not reason else 2) * len(text)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, b"\3\0\0\0\0\0\0\0{}", b"\1\0\0\0\0\0\0\0{"]
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other is not a safetensors file"):
        read_header(path)


def test_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for what in ("pipe", "."):
        with pytest.raises(ValueError, match="it is not a file at all"):
            read_header(tmp_path / what)
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "none")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size(tmp_path: Path, change: int) -> None:
    path = tmp_path / "cut"
    whole = save({"a": torch.zeros(100)})
    path.write_bytes(whole[:change] if change < 0 else whole + b"more")
    with pytest.raises(
        ValueError,
        match=r"cut is not a whole safetensors file: its header tells of \d+ bytes, and it has \d",
    ):
        read_header(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_header_is_read_only_if_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """What we take, the format's own library takes too, and finds the same in it."""
    whole = bytearray(
        save(
            {"a": torch.zeros(2), "bb": torch.zeros(3, dtype=torch.uint8)},
            metadata={"format": "pt"},
        )
    )
    at = data.draw(st.integers(0, len(whole) - 12))
    whole[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(whole)
    try:
        header = read_header(path)
    except ValueError:
        return
    try:
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == {entry.name for entry in header.entries}
            assert (file.metadata() or {}) == header.metadata
    except SafetensorError as error:
        raise AssertionError(f"{header} is not one, says the library: {error}") from error
