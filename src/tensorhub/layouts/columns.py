"""Columns of numbers, and their one encoding: few bytes where the numbers follow a rule, and cheap
to read.

A column is an array of numbers from 0 to 2**63 - 1. It is encoded as whichever is shorter:

    raw     a byte that says how many bytes a number takes (1, 2, 4 or 8: the fewest that all fit), then the numbers
    runs    a byte 0, then for each run its first number, its step and its length, 8 bytes each

Responsible for that, for reading nothing but the one encoding, and for hostile columns: how many
numbers one says, and their sum, can be known before memory is taken. Not responsible for what the
numbers mean.
"""  # noqa: E501 - a table

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, pairwise, repeat
from operator import sub
from typing import Any, TypeAlias

import msgpack

from tensorhub.errors import ProtocolError
from tensorhub.model.dtypes import INT_MAX
from tensorhub.model.unpacking import unpacker

Column: TypeAlias = "array[int]"

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_RUN = struct.Struct("<QqQ")
NOT_THE_ONE = "this is not the one encoding of what it says"


def column(numbers: Iterable[int]) -> Column:
    """As narrow as its numbers allow."""
    found = numbers if isinstance(numbers, list | array) else list(numbers)
    code = _CODES[_width(found)]
    return found if isinstance(found, array) and found.typecode == code else array(code, found)


def _width(numbers: Sequence[int]) -> int:
    most = max(numbers, default=0)
    return next(width for width in _CODES if most < 2 ** (8 * width))


def stretches(steps: Iterable[object], count: int) -> Iterator[tuple[int, int]]:
    """Of `count` things, which are so far apart: those at one distance, from which one to which.
    Each stretch is as long as it can be, from the first on.
    """
    first, end = 0, 1
    for _, equal in groupby(steps):
        end += len(list(equal))
        if end - first > 1:  # else the step leads from the stretch before to the first of the next
            yield first, end
            first = end
    if first < count:
        yield first, count


# --------------------------------------------------------------------------------------------------
# encoding


def pack(numbers: Iterable[int]) -> bytes:
    """The canonical encoding of these numbers."""
    found = column(numbers)
    width = found.itemsize
    if runs := _runs(found, (1 + width * len(found)) // _RUN.size):
        return b"\0" + b"".join([_RUN.pack(*run) for run in runs])
    return bytes([width]) + _little(found[:]).tobytes()


def _runs(numbers: Sequence[int], fewer_than: int) -> list[tuple[int, int, int]]:
    """Each as long as it can be, from the first on; none if they are too many."""
    found: list[tuple[int, int, int]] = []
    for first, end in stretches(map(sub, islice(numbers, 1, None), numbers), len(numbers)):
        if len(found) + 1 >= fewer_than:
            return []
        step = numbers[first + 1] - numbers[first] if end - first > 1 else 0
        found.append((numbers[first], step, end - first))
    return found


def _little(numbers: Column) -> Column:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# --------------------------------------------------------------------------------------------------
# decoding


def unpack(what: str, data: bytes, count_max: int) -> Column:
    """The numbers, of which there may be so many. ProtocolError: `data` does not say so many, or is
    no column.
    """
    width = data[0] if data else -1
    if width == 0:
        return _unpack_runs(what, data, count_max)
    expect(width in _CODES, what, "its numbers have no known width")
    expect((len(data) - 1) % width == 0, what, "it is not whole numbers")
    expect((len(data) - 1) // width <= count_max, what, f"it has more than {count_max} numbers")
    numbers = _raw(data)
    most = max(numbers, default=0)
    expect(most <= INT_MAX, what, "a number is above 2**63 - 1")
    is_shortest = _width([most]) == width and not _runs(
        numbers, (1 + width * len(numbers)) // _RUN.size
    )
    expect(is_shortest, what, NOT_THE_ONE)
    return numbers


def _raw(data: bytes) -> Column:
    numbers = array(_CODES[data[0]])
    numbers.frombytes(memoryview(data)[1:])
    return _little(numbers)


def _unpack_runs(what: str, data: bytes, count_max: int) -> Column:
    expect((len(data) - 1) % _RUN.size == 0, what, "it is not whole runs")
    runs = list(_RUN.iter_unpack(memoryview(data)[1:]))
    in_all = sum([count for _, _, count in runs])
    expect(in_all <= count_max, what, f"it has more than {count_max} numbers")
    for first, step, count in runs:
        expect(
            count > 0 and 0 <= first <= INT_MAX, what, "a run is empty, or begins above 2**63 - 1"
        )
        expect(0 <= first + step * (count - 1) <= INT_MAX, what, "a run ends beyond 0 or 2**63 - 1")
    width = _width([max(first, first + step * (count - 1)) for first, step, count in runs])
    expect(
        0 < len(runs) < (1 + width * in_all) // _RUN.size and _are_longest(runs), what, NOT_THE_ONE
    )
    numbers = array(_CODES[width])
    for first, step, count in runs:
        numbers.extend(range(first, first + step * count, step) if step else repeat(first, count))
    return numbers


def _are_longest(runs: Sequence[tuple[int, int, int]]) -> bool:
    """Whether `_runs` would find these runs."""
    _, step, count = runs[-1]
    goes_on = (
        after[0] == first + step * count or count == 1
        for (first, step, count), after in pairwise(runs)
    )
    return (count > 1 or not step) and not any(goes_on)


def count_and_sum(what: str, data: bytes) -> tuple[int, int]:
    """Of the numbers that it says, at no more cost than its bytes. Whether they may be so is left
    to `unpack`.
    """
    width = data[0] if data else -1
    expect(
        width in (0, *_CODES) and (len(data) - 1) % (width or _RUN.size) == 0,
        what,
        "it is no column",
    )
    if width:
        numbers = _raw(data)
        return len(numbers), sum(numbers)
    runs = list(_RUN.iter_unpack(memoryview(data)[1:]))
    found = [(2 * first + step * (count - 1)) * count // 2 for first, step, count in runs]
    return sum([count for _, _, count in runs]), sum(found)


def expect(holds: bool, what: str, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(f"bad {what}: {otherwise}")


# -------------------------------------------------------------------------------------------
# several, in one blob


def pack_all(form: int, scalars: Sequence[str], columns: Iterable[Iterable[int] | bytes]) -> bytes:
    """One flat array of MessagePack: the form, which says what the rest is, then strings, then
    columns: numbers, or packed already.
    """
    packed = [each if isinstance(each, bytes) else pack(each) for each in columns]
    blob: bytes = msgpack.packb([form, *scalars, *packed])
    return blob


def unpack_all(
    what: str,
    form: int,
    strings: int,
    columns: Sequence[str],
    blob: bytes,
    *,
    bytes_max: int,
    count_max: int,
) -> tuple[list[str], list[Column]]:
    """The strings and the columns that `pack_all` has packed, of at most `count_max` numbers each.
    ProtocolError, naming the fault, for anything else, also for another encoding of equal numbers.
    """
    texts, packed = split_all(what, form, strings, columns, blob, bytes_max=bytes_max)
    return texts, [
        unpack(f"{what}: column {name!r}", data, count_max)
        for name, data in zip(columns, packed, strict=True)
    ]


def split_all(
    what: str, form: int, strings: int, columns: Sequence[str], blob: bytes, *, bytes_max: int
) -> tuple[list[str], list[bytes]]:
    """As `unpack_all`, with each column as it was packed."""
    expect(len(blob) <= bytes_max, what, f"it is longer than {bytes_max} bytes")
    try:
        parts = unpacker(blob)
        length = parts.read_array_header()
        expect(length == 1 + strings + len(columns), what, "parts are missing, or too many")
        found: list[Any] = [parts.unpack() for _ in range(length)]
        ends = parts.tell()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"bad {what}: not msgpack ({type(error).__name__}: {error})") from None
    expect(ends == len(blob), what, "there are bytes after its end")
    kinds = [int, *[str] * strings, *[bytes] * len(columns)]
    expect([type(part) for part in found] == kinds, what, "parts are of wrong types")
    expect(found[0] == form, what, f"form {found[0]} is unknown to this version of TensorHub")
    expect(msgpack.packb(found) == blob, what, NOT_THE_ONE)
    return found[1 : 1 + strings], found[1 + strings :]
