"""The content of one worker's memories: where a fill finds bytes that need no network.

Not responsible for the purpose or the end of the copies, nor for copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub.types import HandleState, Medium, Purpose
from tensorhub.worker.calls import LocalCopy
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.registration_session import Shard


class LocalCopies:
    """One worker's registrations, in the order in which they were made. Its handles share it."""

    def __init__(self) -> None:
        self._memories: dict[str, MemberMemory] = {}  # by registration

    def __repr__(self) -> str:
        return f"<LocalCopies: {len(self._memories)}>"

    def add(self, registration: str, memory: MemberMemory) -> None:
        self._memories[registration] = memory

    def remove(self, registration: str) -> None:
        self._memories.pop(registration, None)

    def of_shard(self, shard: Shard) -> CopiesOfShard:
        """The view of one registration: only copies of its own shard are of use to it."""
        return CopiesOfShard(self, shard)

    def readable(
        self, content_id: str, grid_id: str, shard: Shard
    ) -> Iterator[tuple[str, MemberMemory, int]]:
        """The memories that have chunks of this content in that grid: registration, memory, and the
        generation to copy under. A host copy is filled from all of them, a caller's memory from
        host copies only.
        """
        for registration, memory in self._memories.items():
            content, is_other = memory.readable, registration != shard.registration
            is_other = is_other and (memory.is_host or shard.medium is Medium.HOST)
            is_it = content is not None and content.version.content_id == content_id
            if content is None or not is_it or not is_other or memory.shard.number != shard.number:
                continue
            if content.manifest.grid_id == grid_id:
                yield registration, memory, content.generation


@dataclass(frozen=True, slots=True)
class CopiesOfShard:
    """The copies of one shard that a registration may copy from."""

    copies: LocalCopies
    shard: Shard

    def find(self, content_id: str, grid_id: str) -> list[LocalCopy]:
        """The copies that have chunks of this content, complete copies first.

        A copy with a running or broken fill has the chunks that were verified in it.
        """
        found = [
            (memory.version is None, LocalCopy(registration, generation))
            for registration, memory, generation in self.copies.readable(
                content_id, grid_id, self.shard
            )
        ]
        return [copy for _, copy in sorted(found, key=lambda pair: pair[0])]

    def keep(self, content_id: str, grid_id: str) -> bool:
        """Whether a copy holds the whole content, and stays when the handle's memory is written
        (R4): a retention copy does, unless it is on its way out itself.
        """
        return any(
            memory.state is HandleState.READY and memory.shard.purpose is Purpose.RETENTION
            for _, memory, _ in self.copies.readable(content_id, grid_id, self.shard)
        )
