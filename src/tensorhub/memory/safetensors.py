"""The safetensors format: headers of files, read as hostile input, and written. Without torch, and
without the weights.

Format: https://huggingface.co/docs/safetensors/index (8 bytes little-endian length, JSON, data).
All checks of the format's own library are made: sizes agree with dtype and shape, and the tensors
fill the data without holes or overlaps. So a header and its tensors' bytes are the whole file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path

from tensorhub.errors import some
from tensorhub.memory.json_pieces import Pieces
from tensorhub.model.dtypes import INT_MAX, ITEMSIZE, shape_fault
from tensorhub.model.manifest import DIMENSIONS_MAX, TENSORS_MAX, name_fault

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
ENTRY_BYTES_MAX = 8192  # of what it says of one tensor, with whatever space is in it
METADATA_MAX = 2**16  # things that `__metadata__` says
LENGTH_BYTES = 8
HEADERS_BYTES_MAX = 2**28  # of all files of a checkpoint in a bucket
HEADER_GUESS = 2**16  # that is read at first
METADATA = "__metadata__"

# The format's name of a dtype: torch's. In the reverse of the order in which its library lays
# tensors out.
TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
FILE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_PLACES = {torch_name: place for place, torch_name in enumerate(TORCH_NAMES.values())}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `dtype` under torch's name, `nbytes` from `offset` on, counted from the
    begin of the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file begins with. `text` is exactly what it says; `entries` are in the order of their
    bytes.
    """

    text: bytes
    metadata: Mapping[str, str]
    entries: tuple[Entry, ...]

    @property
    def data_at(self) -> int:
        """Where in the file the data begins."""
        return LENGTH_BYTES + len(self.text)

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.data_at + sum(entry.nbytes for entry in self.entries)

    def encode(self) -> bytes:
        """What the file begins with: the length, and the text."""
        return len(self.text).to_bytes(LENGTH_BYTES, "little") + self.text


# --------------------------------------------------------------------------------------------------
# reading


def read_header(path: Path) -> Header:
    """The header of the file at `path`. OSError if it cannot be read; ValueError as `read_from`."""
    descriptor = open_file(path)
    try:
        return read_from(descriptor, path)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> int:
    """A descriptor to read the file by. Never waits, as it would for a writer of a pipe.
    OSError.
    """
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_from(descriptor: int, path: Path) -> Header:
    """The header of an open file. ValueError, naming file and reason, if it is not one whole
    safetensors file.
    """
    status = os.fstat(descriptor)
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a safetensors file: it is not a file at all")
    try:
        return header_in(size, lambda offset, nbytes: os.pread(descriptor, nbytes, offset))
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from error


def header_in(
    size: int, read: Callable[[int, int], bytes], bytes_max: int = HEADER_BYTES_MAX
) -> Header:
    """The header of a file of so many bytes; `read(offset, nbytes)` reads them. ValueError, with
    what it is instead, if it is not one whole safetensors file, or its header has more bytes.
    """
    text = read(0, min(size, HEADER_GUESS)) if size >= LENGTH_BYTES else b""
    length = int.from_bytes(text[:LENGTH_BYTES], "little")
    if not text or length > min(size - LENGTH_BYTES, HEADER_BYTES_MAX):
        raise ValueError("not a safetensors file: it does not begin with a header")
    if length > bytes_max:
        raise ValueError(
            f"not a safetensors file that can be read: its header has {length} bytes, and those of "
            f"one checkpoint have {HEADERS_BYTES_MAX} at most"
        )
    end = LENGTH_BYTES + length
    if end > len(text):
        text += read(len(text), end - len(text))
    try:
        header = parse_header(text[LENGTH_BYTES:end])
    except ValueError as error:
        raise ValueError(f"not a safetensors file: {error}") from error
    if header.file_bytes != size:
        sizes = f"its header tells of {header.file_bytes} bytes, and it has {size}"
        raise ValueError(f"not a whole safetensors file: {sizes}")
    return header


def parse_header(text: bytes) -> Header:
    """What a header says. ValueError, with the reason, for any text that is not one; it costs what
    it truly holds.
    """
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    pieces, metadata, entries = Pieces(text, "its header"), dict[str, str](), list[Entry]()
    for name in pieces.members():
        if name == METADATA:
            metadata = _metadata(pieces)
        elif len(entries) == TENSORS_MAX:
            raise ValueError(f"it has more than {TENSORS_MAX} tensors")
        else:
            entries.append(_entry(name, pieces.value(ENTRY_BYTES_MAX)))
    pieces.end()
    entries.sort(key=attrgetter("nbytes"))
    entries.sort(key=attrgetter("offset"))  # and by size where that is equal
    end = 0
    for entry in entries:
        if entry.offset != end:
            raise ValueError(
                f"tensor {entry.name!r} begins at byte {entry.offset} of the data, and not at {end}"
            )
        end += entry.nbytes
    return Header(text, metadata, tuple(entries))


def _metadata(pieces: Pieces) -> dict[str, str]:
    if not pieces.next_is(b"{"):
        raise ValueError(f"{METADATA} is not an object")
    found: dict[str, str] = {}
    for key in pieces.members():
        if len(found) == METADATA_MAX:
            raise ValueError(f"{METADATA} says more than {METADATA_MAX} things")
        found[key] = pieces.string() if pieces.next_is(b'"') else "\ud800"
        if not (_is_text(key) and _is_text(found[key])):
            raise ValueError(f"{METADATA} holds what is not text")
    return found


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return False
    return True


def _entry(name: str, value: object) -> Entry:
    if fault := name_fault(name):
        raise ValueError(f"tensor {name[:64]!r}: {fault}")
    what = f"tensor {name!r}"
    fields = value if isinstance(value, dict) else {}
    if set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} has not exactly a dtype, a shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    torch_name = TORCH_NAMES.get(dtype) if isinstance(dtype, str) else None
    if torch_name is None:
        raise ValueError(
            f"{what} has dtype {str(dtype)[:64]!r}; known are {', '.join(TORCH_NAMES)}"
        )
    if not _are_sizes(shape) or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"{what} has a shape that is none")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{what} has data_offsets that are none")
    start, end = offsets
    if fault := shape_fault(shape, torch_name):
        raise ValueError(f"{what}: {fault}")
    if prod(shape) * ITEMSIZE[torch_name] != end - start:
        raise ValueError(f"{what} is {dtype} of shape {shape}, and has {end - start} bytes")
    return Entry(name, torch_name, tuple(shape), start, end - start)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= INT_MAX for size in value
    )


# --------------------------------------------------------------------------------------------------
# writing


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    *,
    in_order: bool = False,
) -> Header:
    """The header that the format's own library writes for (name, torch's dtype, shape), equal to
    the byte. `in_order`: of a file with the tensors in this order instead.

    ValueError, naming each tensor that the format cannot hold.
    """
    wanted = list(tensors)
    if not in_order:
        wanted.sort(key=lambda tensor: (-_PLACES.get(tensor[1], 0), tensor[0].encode()))
    faults = [f"{name!r} is {dtype}" for name, dtype, _ in wanted if dtype not in FILE_NAMES]
    faults += [f"a tensor is called {METADATA!r}" for name, _, _ in wanted if name == METADATA]
    if faults:
        raise ValueError(f"the safetensors format has no way to say: {some(faults, '; ')}")
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape in wanted:
        entries.append(Entry(name, dtype, shape, end, prod(shape) * ITEMSIZE[dtype]))
        end += entries[-1].nbytes
    said: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    for entry in entries:
        offsets = [entry.offset, entry.offset + entry.nbytes]
        said[entry.name] = {
            "dtype": FILE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # the data is aligned
    if len(text) > HEADER_BYTES_MAX:
        raise ValueError(
            f"the safetensors format has headers of at most {HEADER_BYTES_MAX} bytes; this one has "
            f"{len(text)}"
        )
    return Header(text, metadata, tuple(entries))
