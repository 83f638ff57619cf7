"""A peer's MessagePack, read at a cost proportional to its bytes: array by array, scalar by scalar.

Responsible for the limits of the unpacker. Not responsible for the expected types: its callers know them.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack


def _array_most() -> int:
    """The limit under which msgpack refuses arrays where a scalar belongs, but still reads array headers
    for us.

    0 with the extension; its pure Python stand-in holds headers to the same limit, but allocates nothing
    ahead.
    """
    probe = msgpack.Unpacker(max_array_len=0)
    probe.feed(b"\x91")
    try:
        probe.read_array_header()
    except ValueError:
        return 2**20
    return 0


_ARRAY_MOST: Final = _array_most()


def unpacker(data: bytes) -> Any:
    """An Unpacker of `data` that gives array headers (`read_array_header`) and scalars (`unpack`): an array within an
    array would cost many times the bytes that say it. ValueError and msgpack.UnpackException, from these two, for
    anything else.
    """
    size = max(1, len(data))
    made = msgpack.Unpacker(
        read_size=size,
        max_buffer_size=size,
        max_array_len=_ARRAY_MOST,
        max_map_len=0,
        max_ext_len=0,
        strict_map_key=True,
    )
    made.feed(data)
    return made
