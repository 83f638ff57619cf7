"""What a reader by shm and an owner say to each other before the first chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.messages import Address
from tensorhub.transport.dialect import Dialect, Find, FindRegions, RegionsAre
from tensorhub.types import Length

SEGMENTS_MAX = 64  # of one registration; the kernel passes 253 descriptors at a time


@dataclass(frozen=True, slots=True)
class SegmentsAre:
    """The shared memory in which the registration and its generation word are: (address, bytes) at the owner. One byte with
    the segments' descriptors follows, in this order.
    """

    segments: Annotated[tuple[tuple[Address, Address], ...], Length(SEGMENTS_MAX)]


DIALECT = Dialect("shm", from_reader={Find: 1, FindRegions: 3}, from_owner={SegmentsAre: 2, RegionsAre: 4})
