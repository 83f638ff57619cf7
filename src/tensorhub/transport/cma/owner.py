"""The owner's side of cma: it says which process this is, so that a reader can prove that it reads that one."""

from __future__ import annotations

from tensorhub.messages import FindMemory, FromReader, MemoryIs
from tensorhub.transport.one_sided_owner import OneSidedSession
from tensorhub.transport.owner import OwnerSession, OwnerSide, ServedReader
from tensorhub.types import RegistrationId


class CmaOwner(OwnerSide):
    """See `OwnerSide`."""

    name = "cma"
    asks = (FindMemory,)
    is_one_sided = True

    def session(self, reader: ServedReader) -> OwnerSession:
        """See `OwnerSide`."""
        return _CmaSession(reader)


class _CmaSession(OneSidedSession):
    def answer(self, asked: FromReader) -> None:
        """Say in which process this is; or that it is not to be read from there."""
        if not isinstance(asked, FindMemory):
            return super().answer(asked)
        header, on_device = self._memory.header, self._memory.is_on_device(RegistrationId(asked.registration))
        process = header if header is not None and self._lane.is_local else (0, 0, b"")
        self._connection.send(MemoryIs(asked.request, *process, on_device))
