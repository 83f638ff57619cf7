"""What a reader by cma and an owner say to each other before the first chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.messages import Address
from tensorhub.transport.dialect import Dialect, Find, FindRegions, RegionsAre
from tensorhub.transport.generation_words import NONCE_BYTES
from tensorhub.types import Length, Range


@dataclass(frozen=True, slots=True)
class MemoryIs:
    """The process that has the memory, by its number in the owner's own namespace. At that address it has this nonce, which
    no other process has.
    """

    pid: Annotated[int, Range(1, 2**31 - 1)]
    address: Address
    nonce: Annotated[bytes, Length(NONCE_BYTES)]


DIALECT = Dialect("cma", from_reader={Find: 1, FindRegions: 3}, from_owner={MemoryIs: 2, RegionsAre: 4})
