"""The content of one worker's memories: where a fill finds bytes that need no network.

Not responsible for the purpose or the end of the copies, nor for copying.
"""

from __future__ import annotations

from collections.abc import Iterator

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

    def find(self, shard: Shard, content_id: str, grid_id: str) -> list[LocalCopy]:
        """The memories from which this shard can copy chunks of this content in that grid, complete
        ones first.

        Memory with a running or broken fill has the chunks that were verified in it.
        """
        found = self._readable(shard, content_id, grid_id)
        return [copy for _, copy in sorted(found, key=lambda each: each[0].version is None)]

    def keep(self, shard: Shard, content_id: str, grid_id: str) -> bool:
        """Whether a copy holds the whole content, and stays when the shard's memory is written
        (R4): a retention copy does, unless it is on its way out itself.
        """
        return any(
            memory.state is HandleState.READY and memory.shard.purpose is Purpose.RETENTION
            for memory, _ in self._readable(shard, content_id, grid_id)
        )

    def _readable(
        self, shard: Shard, content_id: str, grid_id: str
    ) -> Iterator[tuple[MemberMemory, LocalCopy]]:
        """A host copy is filled from all memories, a caller's memory from host copies only."""
        for registration, memory in self._memories.items():
            content = memory.readable
            if (
                content is not None
                and content.version.content_id == content_id
                and content.manifest.grid_id == grid_id
                and registration != shard.registration
                and (memory.is_host or shard.medium is Medium.HOST)
                and memory.shard.number == shard.number
            ):
                yield memory, LocalCopy(registration, content.generation)
