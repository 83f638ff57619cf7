"""What a reader by nixl and an owner say to each other before the first chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.messages import Address
from tensorhub.transport.dialect import Dialect, Find, FindRegions, RegionsAre
from tensorhub.types import Id, Length, Range

AGENT_BYTES_MAX = 2**19  # of an agent's metadata
ON_HOST = -1  # in place of a GPU's number


@dataclass(frozen=True, slots=True)
class AgentIs:
    """The agent by which the registration is read: its name, its metadata as NIXL has made it, and where the generation word
    is, in host memory. `device`: the number of the source's GPU on which the chunks are; ON_HOST: they are in host memory.
    """

    name: Id
    metadata: Annotated[bytes, Length(AGENT_BYTES_MAX)]
    word: Address
    device: Annotated[int, Range(ON_HOST, 2**16)]


DIALECT = Dialect("nixl", from_reader={Find: 1, FindRegions: 3}, from_owner={AgentIs: 2, RegionsAre: 4})
