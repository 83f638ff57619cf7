"""What a publication is made of: hostile bytes are refused. (`test_joining` sends one through its
encoding.)
"""

from __future__ import annotations

import pytest

from tensorhub.errors import ProtocolError
from tensorhub.layouts import Published
from tensorhub.layouts.columns import pack_all

GOOD = (["xxh3-64", "ab"], [[4096], [1, 1], [1, 3], [0, 0, 1, 1]])


def test_what_the_refused_ones_differ_from_is_a_publication() -> None:
    assert Published.decode(pack_all(1, *GOOD)).shards == (("a",), ("a", "b", "b"))


@pytest.mark.parametrize(
    ("strings", "columns", "says"),
    [
        (["md5", "ab"], {}, "digest 'md5' is unknown"),
        (["none", "a\n"], {}, "not printable"),
        (None, {0: [4095]}, "chunk_bytes"),
        (None, {0: []}, "chunk_bytes"),
        (None, {0: [4096, 4096]}, "chunk_bytes"),
        (None, {1: [1]}, "lengths do not add up"),
        (["none", ""], {1: []}, "lengths do not add up"),
        (None, {1: [0, 2]}, "1 to 64 characters"),
        (None, {2: []}, "has no shard"),
        (None, {2: [2, 2]}, "neither one id nor three"),
        (None, {2: [1, 1]}, "do not add up"),
        (None, {3: [0, 0, 1, 2]}, "an id is not there"),
        (None, {3: [1, 1, 0, 0]}, "not the one encoding"),
        (None, {3: [0, 0, 0, 0]}, "not the one encoding"),
    ],
)
def test_what_is_no_publication_is_refused(
    strings: list[str] | None, columns: dict[int, list[int]], says: str
) -> None:
    changed = [columns.get(number, column) for number, column in enumerate(GOOD[1])]
    with pytest.raises(ProtocolError, match=says):
        Published.decode(pack_all(1, strings or GOOD[0], changed))
