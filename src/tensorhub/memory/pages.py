"""Whether host memory may be written, by the kernel's flags of its pages.

A write to a read-only mapping fails as if the peer had failed (EFAULT), or ends the process
(SIGSEGV): so the flags are read before. Not responsible for the error (`tensors`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

MAPS = Path("/proc/self/maps")


def read_only(places: Sequence[tuple[int, int]]) -> dict[int, str]:
    """Of these (address, bytes), the indices of those that have pages which cannot be written, each
    with the file that is mapped there ("": none). Of what the kernel does not tell, nothing is
    known.
    """
    try:
        lines = MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    mappings = [line.split(maxsplit=5) for line in lines if line.partition(" ")[2][1:2] != "w"]
    # ascending, and apart
    ends = [tuple([int(each, 16) for each in fields[0].split("-")]) for fields in mappings]
    starts, found = [start for start, _ in ends], dict[int, str]()
    for index, (address, nbytes) in enumerate(places):
        last = bisect_right(starts, address + nbytes - 1) - 1
        if nbytes and last >= 0 and ends[last][1] > address:
            found[index] = mappings[last][5] if len(mappings[last]) > 5 else ""
    return found
