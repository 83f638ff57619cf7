"""Whether the ranks of this rank's group, which read another layout, read every byte of it together; or whether those that
publish make one version.

The coordinator asks one rank of the group, once all have said where they read to, or what they publish. That rank gathers
what the others have said, and has it checked by its shell (`CheckRanks`). Not responsible for what one rank can check
alone (`planning`).
"""

from __future__ import annotations

from typing import Protocol

from tensorhub import messages
from tensorhub.errors import TensorHubError
from tensorhub.layouts.joining import publication_of, readers_of
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.published import Published
from tensorhub.types import OpKey
from tensorhub.worker.calls import CheckRanks
from tensorhub.worker.gathering import Gathering
from tensorhub.worker.member_context import MemberContext


def check(action: CheckRanks) -> TensorHubError | None:
    """Carry it out. It takes up to seconds, and nothing but its argument."""
    try:
        publication = action.publication or publication_of(action.published, action.parts)
        if action.readers is not action.published:
            publication.check_readers(readers_of(action.readers, action.parts))
    except TensorHubError as error:
        return error
    return None


class Checked(Protocol):
    """The call whose ranks are checked."""

    @property
    def operation(self) -> OpKey: ...

    def give_up(self, error: Exception) -> None: ...


class Coverage:
    """That of one call, which is asked for it or not."""

    def __init__(self, context: MemberContext, call: Checked) -> None:
        self._context, self._call = context, call
        self._publication_id = self._readers_id = ""  # as `asked` has named them; "": it was not
        self._publication: Publication | None = None  # if it was made before
        self._begin()

    def _begin(self) -> None:
        self._is_known = False  # they read all of it
        self._described: dict[str, Published] = {}  # by these two ids
        self._gathering = Gathering(self._context)
        self._number = 0  # of the check that was asked for

    def asked(self, publication_id: str, readers_id: str) -> None:
        """`publication_id`: as Start names what is read; `readers_id`: as CheckCoverage names who read it. Those who publish
        are their own readers: the two are one.
        """
        if self._readers_id != readers_id:
            self._publication_id, self._readers_id = publication_id, readers_id
            self._publication = self._context.parts.publication(publication_id)
            self._begin()
            self._go_on()
        elif self._is_known:
            self._say()

    def _go_on(self) -> None:
        """Look for what is needed, ask for what is missing, and check once all is here."""
        needed, gathering = (self._publication_id, self._readers_id), self._gathering
        try:
            gathering.want(*needed)
            for each in needed:
                if each in gathering.found and each not in self._described:
                    self._described[each] = names = Published.decode(gathering.found[each])
                    if each == self._readers_id or self._publication is None:
                        gathering.want(*names.part_ids)
        except TensorHubError as error:
            self._call.give_up(error)
            return
        if gathering.is_done and not self._number:
            self._number = self._context.cause
            published, readers = map(self._described.__getitem__, needed)
            self._context.act(CheckRanks(self._number, published, gathering.found, self._publication, readers))

    def waits_for(self, request: int) -> bool:
        return self._gathering.waits_for(request)

    def came(self, reply: messages.ManifestReply) -> None:
        try:
            self._gathering.came(reply)
        except TensorHubError as error:
            self._call.give_up(error)
        else:
            self._go_on()

    def ask_again(self) -> None:
        """After a lost connection."""
        self._gathering.ask_again()

    def checked(self, number: int, error: TensorHubError | None) -> None:
        """What was asked with CheckRanks."""
        if number != self._number:
            return
        if error is not None:
            self._call.give_up(error)
            return
        self._is_known = True
        self._say()

    def _say(self) -> None:
        self._context.say(messages.Covered(self._call.operation, self._context.shard.rank, self._readers_id))
