"""Columns of numbers: one encoding each, short where numbers follow a rule, and cheap to read
whatever they say.
"""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import ProtocolError
from tensorhub.layouts.columns import column, count_and_sum, pack, unpack

INT_MAX = 2**63 - 1
numbers = st.one_of(st.integers(0, 5), st.integers(0, INT_MAX))
ruled = st.builds(
    lambda first, step, count: (
        list(range(first, first + step * count, step)) if step else [first] * count
    ),
    st.integers(10**6, 10**7),
    st.integers(-900, 900),
    st.integers(0, 900),
)


@given(
    st.one_of(
        st.lists(numbers, max_size=40),
        ruled,
        st.lists(ruled, max_size=3).map(lambda some: [n for each in some for n in each]),
    )
)
def test_what_was_packed_is_unpacked(some: list[int]) -> None:
    packed = pack(some)
    assert list(unpack("c", packed, len(some))) == some
    assert pack(unpack("c", packed, len(some))) == packed
    assert len(packed) <= 1 + 8 * len(some)
    assert count_and_sum("c", packed) == (len(some), sum(some))


def test_a_rule_takes_a_few_bytes() -> None:
    assert len(pack(range(100_000))) == 25
    assert len(pack([7] * 100_000)) == 25
    assert len(pack([1, 2, 1] * 1000)) == 3001
    assert pack([]) == b"\1"
    assert pack([300]) == b"\2" + struct.pack("<H", 300)


def test_a_column_is_as_narrow_as_it_can_be() -> None:
    assert [column([0, n]).itemsize for n in (255, 256, 65536, 2**32)] == [1, 2, 4, 8]


def run(first: int, step: int, count: int) -> bytes:
    return struct.pack("<QqQ", first, step, count)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "no known width"),
        (b"\3abc", "no known width"),
        (b"\2abc", "not whole numbers"),
        (b"\1" + bytes(101), "more than 100"),
        (b"\x08" + struct.pack("<Q", 2**63), "above 2"),
        (b"\0" + bytes(23), "not whole runs"),
        (b"\0" + run(0, 1, 101), "more than 100"),
        (b"\0" + run(0, 0, 2**63), "more than 100"),
        (b"\0" + run(0, 1, 60) + run(0, 1, 60), "more than 100"),
        (b"\0" + run(0, 0, 0), "empty"),
        (b"\0" + run(2**63, 0, 1), "begins above"),
        (b"\0" + run(5, -1, 7), "ends beyond"),
        (b"\0" + run(2**62, 2**62, 3), "ends beyond"),
        (b"\0", "not the one encoding"),
        (b"\2" + bytes(8), "not the one encoding"),
        (b"\1" + bytes(100), "not the one encoding"),
        (b"\0" + run(0, 1, 3), "not the one encoding"),
        (b"\0" + run(0, 1, 50) + run(50, 1, 50), "not the one encoding"),
        (b"\0" + run(0, 1, 1) + run(7, 0, 99), "not the one encoding"),
        (b"\0" + run(0, 1, 99) + run(7, 3, 1), "not the one encoding"),
    ],
)
def test_what_is_no_column_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(ProtocolError, match=f"^bad c: .*{fault}"):
        unpack("c", data, 100)


def test_a_hostile_run_costs_no_more_than_what_was_expected() -> None:
    tracemalloc.start()
    try:
        assert len(unpack("c", b"\0" + run(0, 0, 2**20), 2**20)) == 2**20
        with pytest.raises(ProtocolError):
            unpack("c", b"\0" + run(0, 0, 2**50), 2**20)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()
