"""Whether the ranks of this rank's group, which read another layout, read every byte of it together; or whether those that
publish make one version.

The coordinator asks one rank of the group, once all have said where they read to, or what they publish. That rank gathers
what the others have said, and has it checked by its shell (`CheckRanks`). Where ranks publish what ranks of other shards
publish, too, each of them is asked, and says what digest that has.

Not responsible for what one rank can check alone (`planning`), nor for comparing digests: the coordinator does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tensorhub import messages
from tensorhub.errors import TensorHubError
from tensorhub.layouts.joining import publication_of, readers_of
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.published import Published
from tensorhub.layouts.shared import Share, shares_of
from tensorhub.types import OpKey
from tensorhub.worker.calls import CheckRanks
from tensorhub.worker.gathering import Gathering
from tensorhub.worker.member_context import MemberContext


@dataclass(frozen=True, slots=True)
class Found:
    """Nothing is wrong. `shared`: as of `messages.Covered`; None: no rank has such bytes."""

    publication: Publication
    shared: tuple[messages.Shared, ...] | None = None


def check(action: CheckRanks, digest: Callable[[Sequence[Share]], Sequence[bytes]]) -> Found | TensorHubError:
    """Carry it out. It takes up to seconds. `digest`: makes those of what this rank shares with others."""
    try:
        publication = action.publication or publication_of(action.published, action.parts)
        if action.readers is not None:
            publication.check_readers(readers_of(action.readers, action.parts))
            return Found(publication)
        shares = None if action.published.digest == "none" else shares_of(publication, action.rank)
        if shares is None:
            return Found(publication)
        made = zip(shares[: messages.SHARED_MAX], digest(shares[: messages.SHARED_MAX]), strict=True)
        return Found(publication, tuple([messages.Shared(share.number, share.what, value) for share, value in made]))
    except TensorHubError as error:
        return error


class Checked(Protocol):
    """The call whose ranks are checked."""

    generation: int

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
        self._found: Found | None = None  # they read all of it
        self._described: dict[str, Published] = {}  # by these two ids
        self._gathering = Gathering(self._context)
        self._number = 0  # of the check that was asked for

    def asked(self, publication_id: str, readers_id: str) -> None:
        """`publication_id`: as Start names what is read; "": they publish. `readers_id`: as CheckCoverage names them."""
        if self._readers_id != readers_id:
            self._publication_id, self._readers_id = publication_id, readers_id
            self._publication = self._context.parts.publication(publication_id or readers_id)
            self._begin()
            self._go_on()
        elif self._found is not None:
            self._say(self._found)
        else:
            self._gathering.ask_again()

    def _go_on(self) -> None:
        """Look for what is needed, ask for what is missing, and check once all is here."""
        needed, gathering = (self._publication_id or self._readers_id, self._readers_id), self._gathering
        try:
            gathering.want(*needed)
            for each in needed:
                if each in gathering.found and each not in self._described:
                    self._described[each] = names = Published.decode(gathering.found[each])
                    if self._publication is None or (each == self._readers_id and self._publication_id):
                        gathering.want(*names.part_ids)
        except TensorHubError as error:
            self._call.give_up(error)
            return
        if gathering.is_done and not self._number:
            self._number = self._context.cause
            published, readers = map(self._described.__getitem__, needed)
            what = published, gathering.found, self._publication, readers if self._publication_id else None
            self._context.act(CheckRanks(self._number, *what, self._context.shard.rank, self._call.generation))

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
        """The coordinator has said again what it is about: it may have missed what was asked."""
        self._gathering.ask_again()

    def checked(self, number: int, found: Found | TensorHubError) -> None:
        """What was asked with CheckRanks."""
        if number != self._number:
            return
        if isinstance(found, TensorHubError):
            self._call.give_up(found)
            return
        self._found = found
        self._context.parts.keep(self._publication_id or self._readers_id, found.publication)
        self._say(found)

    def _say(self, found: Found) -> None:
        shared = found.shared is not None, found.shared or ()
        self._context.say(messages.Covered(self._call.operation, self._context.shard.rank, self._readers_id, *shared))
