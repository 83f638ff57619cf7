"""Two closed unions: what a caller can ask of a handle, and what the handle's machine asks of its
shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.published import Published
from tensorhub.messages import ErrorInfo, FromWorker, Grant
from tensorhub.model.manifest import Manifest
from tensorhub.types import OpKind, Selector, VersionInfo


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A memory of this worker that has some or all chunks of a content: its registration, and its
    generation.
    """

    registration: str
    generation: int


def staging_of(registration: str) -> str:
    """The id under which this worker's own copying finds the chunks of a registration's staged
    update.
    """
    return f"{registration}/staged"


# -------------------------------------------------------------------------------------------------
# calls


@dataclass(frozen=True, slots=True)
class PublishCall:
    version: int


@dataclass(frozen=True, slots=True)
class FillCall:
    """`hold`: the caller has a before_write."""

    kind: OpKind
    selector: Selector
    at_least: int | None = None
    hold: bool = False
    staged: bool = False


@dataclass(frozen=True, slots=True)
class UnpublishCall:
    # the call is a `mutate`, which needs memory that no reader uses, published or not
    before_body: bool = False


@dataclass(frozen=True, slots=True)
class CloseCall:
    abandon: bool = False


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """This rank will not make its next group call (its body raised, say): the group's call ends at
    once, with `error`.
    """

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ReleaseCall:
    """A host copy is not needed any more: withdraw its content, and give its memory back. The
    registration stays.
    """


Call = PublishCall | FillCall | UnpublishCall | CloseCall | RefuseCall | ReleaseCall

# -------------------------------------------------------------------------------------------------
# actions


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the coordinator; dropped without a connection (the machine says it again when there is
    one).
    """

    message: FromWorker


@dataclass(frozen=True, slots=True)
class OpenGeneration:
    """From now on readers may ask for this memory under `generation`: for all of it, or for the
    chunks marked available.

    `content_id` is empty where a publisher opens before the id is minted.
    """

    generation: int
    content_id: str
    manifest: Manifest
    complete: bool
    keeps_base: bool = False  # the memory still has the content that was fenced for this


@dataclass(frozen=True, slots=True)
class ReopenGeneration:
    """Let readers in again under `generation`: the bytes and the available chunks are as before the
    last fence.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Make `generation` unreadable, end the owner's own accesses, then call
    `Member.fenced(generation)`.

    If accesses still run at `Member.fence_until`, call `Member.fence_failed` instead. `until` None:
    the memory is never published again under `generation`, so the fence is tried until it stands.
    """

    generation: int
    until: float | None = None


@dataclass(frozen=True, slots=True)
class CallHook:
    """Run before_write, then call `Member.hook_returned`."""

    version: VersionInfo


@dataclass(frozen=True, slots=True)
class PlanReading:
    """Plan the read of a version of another layout (`worker.planning.plan`), and call
    `Member.planned` with the number and the result.

    `publication`: made of `published` and `parts`; None: it was not made yet. `manifest`: names the
    regions to fill; None: the regions of the whole model, or of the tensors that match these
    `names`.
    """

    number: int
    published: Published
    parts: Mapping[str, bytes]
    publication: Publication | None
    manifest: Manifest | None
    declared: Declaration
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckRanks:
    """Check whether these readers read all of the publication; or, without readers, whether the
    ranks publish one version, and which bytes this rank shares with other ranks. Then call
    `Member.ranks_checked` with the number and the result (`worker.coverage.check`). `published`,
    `parts` and `publication`: as in PlanReading.
    """

    number: int
    published: Published
    parts: Mapping[str, bytes]
    publication: Publication | None
    readers: Published | None
    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class CopyLocally:
    """Copy the chunks of these copies into the memory, digest by digest, as an access of their
    owner (R3); then call `Member.copied`, with all chunks that are present then. StopPull ends it.

    `staged`: not into the memory itself, as in StartPull. `last`: nothing is pulled afterwards, so
    unpack, too.
    """

    version: VersionInfo
    manifest: Manifest
    generation: int
    sources: tuple[LocalCopy, ...]
    copied: frozenset[int] = frozenset()  # are present already
    staged: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True)
class StartPull:
    """Fill the memory; then call `Member.pull_done`, or `source_failed` and `pull_failed` as it
    happens.

    `copied`: chunks that were copied, so that they need not be read. `staged`: fill host memory
    that no other worker reads (`staging_of`); the memory itself stays as it is. `published`: the
    digests that some chunks must have, whatever a source says. `again`: the missing chunks were
    present before, and are read once more.
    """

    version: VersionInfo
    manifest: Manifest
    generation: int
    grants: tuple[Grant, ...]
    copied: frozenset[int] = frozenset()
    staged: bool = False
    published: Mapping[int, int] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True, slots=True)
class CompareDigests:
    """Compare the filled chunks with a part of the publisher's list, from chunk `first` on; let no
    reader read wrong chunks; then call `Member.compared`. `chunks`: the chunks of the list, in its
    order; None: all.
    """

    manifest: Manifest
    generation: int
    staged: bool
    first: int
    digests: bytes
    chunks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class AddPullSource:
    grant: Grant


@dataclass(frozen=True, slots=True)
class DropPullSource:
    lease: str


@dataclass(frozen=True, slots=True)
class StopPull:
    """End every read; then call `Member.pull_stopped`."""


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """Reserve host memory for a staged update, and go on meanwhile; then call
    `Member.room_ended`.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class CancelRoom:
    """The room is not wanted any more: call `Member.room_ended` soon, whatever the result."""


@dataclass(frozen=True, slots=True)
class FreeStaging:
    """The staged content is in place, or not wanted any more: give its memory back."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The memory holds nothing, and the last fence stands. Let go of the memory; a host copy gives
    it back.
    """


@dataclass(frozen=True, slots=True)
class EndPrefetch:
    """End this handle's prefetch, if one runs, unless its rank has voted. `frees`: the update is
    done, so the host copy is released as well, in the background.
    """

    frees: bool = False


@dataclass(frozen=True, slots=True)
class RegistrationConfirmed:
    """The coordinator knows this memory now."""


@dataclass(frozen=True, slots=True)
class RegistrationFailed:
    error: Exception


@dataclass(frozen=True, slots=True)
class Finish:
    """The running call is over: it returns (version, changed), or raises."""

    version: VersionInfo | None = None
    changed: bool = False
    error: Exception | None = None
    rebinds: int = 0  # see `FetchReport`
    by_source: bool = False  # no publisher has confirmed all that is held now


Action = (
    Say
    | OpenGeneration
    | ReopenGeneration
    | Fence
    | CallHook
    | PlanReading
    | CheckRanks
    | CopyLocally
    | CompareDigests
    | StartPull
    | MakeRoom
    | CancelRoom
    | FreeStaging
    | FreeMemory
    | EndPrefetch
    | AddPullSource
    | DropPullSource
    | StopPull
    | RegistrationConfirmed
    | RegistrationFailed
    | Finish
)
