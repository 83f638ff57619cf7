"""Whether the ranks of a group, reading another layout, read every byte of it together; or whether
they publish one version.

The coordinator asks one rank of the group, once all ranks have said where they read to, or what
they publish. That rank gathers the parts of all ranks, and its shell checks them (`CheckRanks`).
Where ranks of several shards publish common bytes, the coordinator asks each of these ranks, which
reports the digest of those bytes.

Not responsible for the checks of a single rank (`planning`), nor for comparing digests: the
coordinator does.
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
    """The check has passed. `shared`: as of `messages.Covered`; None: no rank shares bytes."""

    publication: Publication
    shared: tuple[messages.Shared, ...] | None = None


def check(
    action: CheckRanks, digest: Callable[[Sequence[Share]], Sequence[bytes]]
) -> Found | TensorHubError:
    """Carry out a CheckRanks. It takes up to seconds. `digest`: makes the digests of the bytes that
    this rank shares.
    """
    try:
        publication = action.publication or publication_of(action.published, action.parts)
        if action.readers is not None:
            publication.check_readers(readers_of(action.readers, action.parts))
            return Found(publication)
        shares = None if action.published.digest == "none" else shares_of(publication, action.rank)
        if shares is None:
            return Found(publication)
        made = zip(
            shares[: messages.SHARED_MAX], digest(shares[: messages.SHARED_MAX]), strict=True
        )
        return Found(
            publication,
            tuple([messages.Shared(share.number, share.what, value) for share, value in made]),
        )
    except TensorHubError as error:
        return error


class Checked(Protocol):
    """The call that has its ranks checked."""

    generation: int

    @property
    def operation(self) -> OpKey: ...

    def give_up(self, error: Exception) -> None: ...


class Coverage:
    """The check of one call, which the coordinator asks for or not."""

    def __init__(self, context: MemberContext, call: Checked) -> None:
        self._context, self._call = context, call
        self._publication_id = self._readers_id = ""  # as `asked` has named them; "": it was not
        self._publication: Publication | None = None  # if it was made before
        self._begin()

    def _begin(self) -> None:
        self._found: Found | None = None  # the check has passed
        self._described: dict[str, Published] = {}  # by these two ids
        self._gathering = Gathering(self._context)
        self._number = 0  # of the check that was asked for

    def asked(self, publication_id: str, readers_id: str) -> None:
        """`publication_id`: the publication to read, as in Start; "": the ranks publish.
        `readers_id`: as in the message.
        """
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
        """Find the needed parts, ask for missing parts, and check once all are here."""
        needed, gathering = (
            (self._publication_id or self._readers_id, self._readers_id),
            self._gathering,
        )
        try:
            gathering.want(*needed)
            for each in needed:
                if each in gathering.found and each not in self._described:
                    self._described[each] = names = Published.decode(gathering.found[each])
                    if self._publication is None or (
                        each == self._readers_id and self._publication_id
                    ):
                        gathering.want(*names.part_ids)
        except TensorHubError as error:
            self._call.give_up(error)
            return
        if gathering.is_done and not self._number:
            self._number = self._context.cause
            published, readers = map(self._described.__getitem__, needed)
            what = (
                published,
                gathering.found,
                self._publication,
                readers if self._publication_id else None,
            )
            self._context.act(
                CheckRanks(self._number, *what, self._context.shard.rank, self._call.generation)
            )

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
        """The coordinator has restated this operation: repeat the questions, which it may have
        missed.
        """
        self._gathering.ask_again()

    def checked(self, number: int, found: Found | TensorHubError) -> None:
        """The result of CheckRanks."""
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
        self._context.say(
            messages.Covered(
                self._call.operation, self._context.shard.rank, self._readers_id, *shared
            )
        )
