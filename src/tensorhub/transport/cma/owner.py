"""The owner's side of cma: it says which process this is, so that a reader can make sure of it."""

from __future__ import annotations

from tensorhub.transport.base import NotShared, Unusable
from tensorhub.transport.cma.messages import DIALECT, MemoryIs
from tensorhub.transport.dialect import Find, FindRegions
from tensorhub.transport.one_sided_owner import NOT_FROM_THERE, OneSidedSession
from tensorhub.transport.owner import OwnerSession, OwnerSide, ServedReader


class _CmaSession(OneSidedSession):
    def answer(self, request: int, asked: Find | FindRegions) -> None:
        """Say in which process this is; or that it is not to be read from there."""
        if isinstance(asked, FindRegions):
            self._connection.send(DIALECT.reply(request, self.regions(asked)))
            return
        found, header = self._reader.find(asked.registration, asked.generation), self._memory.header
        if found.memory.device is not None:
            raise NotShared("its tensors are on a GPU, which is not read this way")
        if header is None or not self._lane.is_local:
            raise Unusable(NOT_FROM_THERE)
        self._connection.send(DIALECT.reply(request, MemoryIs(*header)))


class CmaOwner(OwnerSide):
    """See `OwnerSide`."""

    dialect = DIALECT
    is_one_sided = True
    strides = True

    def session(self, reader: ServedReader) -> OwnerSession:
        return _CmaSession(reader)
