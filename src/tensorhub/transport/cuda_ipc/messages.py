"""What a reader by cuda_ipc and an owner say to each other before the first chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.cuda.device import HANDLE_BYTES
from tensorhub.messages import Address
from tensorhub.transport.dialect import Dialect, Find, FindRegions, RegionsAre
from tensorhub.types import Length

ALLOCATIONS_MAX = 4096  # of one registration: they fit a message


@dataclass(frozen=True, slots=True)
class AllocationsAre:
    """The GPU's allocations in which the registration is: (address, bytes, IPC handle) at the owner. `process` names the
    owner's process: within that one, addresses are as good as handles.

    `words`: (address, bytes) of the shared memory in which the registration's generation word is. One byte with that
    memory's descriptor follows.
    """

    process: Annotated[bytes, Length(16)]
    allocations: Annotated[
        tuple[tuple[Address, Address, Annotated[bytes, Length(HANDLE_BYTES)]], ...],
        Length(ALLOCATIONS_MAX),
    ]
    words: tuple[Address, Address]


DIALECT = Dialect("cuda_ipc", from_reader={Find: 1, FindRegions: 3}, from_owner={AllocationsAre: 2, RegionsAre: 4})
