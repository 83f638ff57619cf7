"""Whether the ranks of this rank's group, which read another layout, read every byte of it together.

The coordinator asks one rank of the group, once all have said where they read to. That rank gathers what the others have
said, and has it checked by its shell (`CheckReaders`). Not responsible for what one rank can check alone (`planning`).
"""

from __future__ import annotations

from tensorhub import messages
from tensorhub.errors import TensorHubError
from tensorhub.layouts.joining import publication_of, readers_of
from tensorhub.layouts.published import Published
from tensorhub.worker.calls import CheckReaders
from tensorhub.worker.gathering import Gathering
from tensorhub.worker.member_context import MemberContext


def check(action: CheckReaders) -> TensorHubError | None:
    """Carry it out. It takes up to seconds, and nothing but its argument."""
    try:
        publication = action.publication or publication_of(action.published, action.parts)
        publication.check_readers(readers_of(action.readers, action.parts))
    except TensorHubError as error:
        return error
    return None


class Coverage:
    """One check. `publication_id`: as Start names what is read; `readers_id`: as CheckCoverage names who read it."""

    def __init__(self, context: MemberContext, publication_id: str, readers_id: str) -> None:
        self.readers_id = readers_id
        self.is_known = False  # they read all of it
        self._publication_id = publication_id
        self._publication = context.parts.publication(publication_id)  # if it was made before
        self._described: dict[str, Published] = {}  # by these two ids
        self._context = context
        self._gathering = Gathering(context)
        self._number = 0  # of the check that was asked for

    def begin(self) -> None:
        """TensorHubError: what is known is not what it should be."""
        needed, gathering = (self._publication_id, self.readers_id), self._gathering
        gathering.want(*needed)
        for each in needed:
            if each in gathering.found and each not in self._described:
                self._described[each] = names = Published.decode(gathering.found[each])
                if each == self.readers_id or self._publication is None:
                    gathering.want(*names.part_ids)
        if gathering.is_done and not self._number:
            self._number = self._context.cause
            published, readers = map(self._described.__getitem__, needed)
            self._context.act(CheckReaders(self._number, published, gathering.found, self._publication, readers))

    def waits_for(self, request: int) -> bool:
        return self._gathering.waits_for(request)

    def came(self, reply: messages.ManifestReply) -> None:
        """TensorHubError: as `begin`."""
        self._gathering.came(reply)
        self.begin()

    def ask_again(self) -> None:
        """After a lost connection."""
        self._gathering.ask_again()

    def is_of(self, number: int) -> bool:
        """Whether that is the check that was asked for."""
        return number == self._number
