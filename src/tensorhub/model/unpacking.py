"""A peer's MessagePack, read at a cost proportional to its bytes: array by array, scalar by scalar.

Responsible for the limits of the unpacker. Not responsible for the expected types: its callers know
them.
"""

from __future__ import annotations

from typing import Any

import msgpack


def unpacker(data: bytes) -> Any:
    """An Unpacker of `data` that gives array headers (`read_array_header`) and scalars (`unpack`):
    an array within an array would cost many times the bytes that say it. ValueError and
    msgpack.UnpackException, from these two, for anything else.
    """
    size = max(1, len(data))
    made = msgpack.Unpacker(
        read_size=size,
        max_buffer_size=size,
        max_array_len=0,  # where a scalar belongs; array headers can still be read
        max_map_len=0,
        max_ext_len=0,
        strict_map_key=True,
    )
    made.feed(data)
    return made
