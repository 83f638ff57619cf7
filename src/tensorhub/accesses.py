"""What an owner's bookkeeping answers who wants to read: the chunks that may be touched now, to wait, or never.

`worker.owner` makes these answers, and every transport's owner side acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.types import RegistrationId

CHUNKS_PER_ACCESS_MAX = 1024  # a ChunksFollow frame names no more, and one gather call takes no more buffers


@dataclass(frozen=True, slots=True)
class Access:
    """The right to touch these chunks' memory until `end`. Digests that nobody has made yet are None."""

    number: int  # never used twice by one Owner
    registration: RegistrationId
    generation: int
    chunks: tuple[int, ...]
    digests: tuple[int | None, ...]
    rest: tuple[int, ...]  # what was asked for beyond `chunks`, in the order of asking
    selection: str = ""  # of which the chunks are; "": of the memory's own grid


@dataclass(frozen=True, slots=True)
class Wait:
    """None of the wanted chunks is verified here yet; ask again after the next `mark_available`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """This memory is not held under that right, and never will be again."""

    reason: str
