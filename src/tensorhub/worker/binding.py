"""The version that a fill is bound to, and the manifest or transfer plan by which this rank reads
the version.

A version of the rank's own layout is read by its manifest, which is asked for if it is not known. A
version of another layout is read by a transfer plan. Until the manifest or plan is known, the fill
writes nothing.

Responsible for finding the manifest or plan, and for telling the coordinator of it. Not responsible
for making a plan (`planning`), nor for the fill itself (`filling`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub import messages
from tensorhub.errors import TensorHubError
from tensorhub.layouts.joining import said_parts
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.model.manifest import Manifest
from tensorhub.types import OpKey
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import Content
from tensorhub.worker.planning import Planned, Planning


class Binding:
    """The binding of one fill. `start`: the message that bound it."""

    def __init__(self, context: MemberContext, start: messages.Start) -> None:
        self.version = start.version
        # of the publisher's digests, if the coordinator has said it beforehand
        self.root = start.root
        self.publication_id = start.publication  # where this rank's layout is not the published one
        self._key = start.key  # the operation in which it was bound first
        self._manifest_id = start.manifest_id
        # of the content that the memory will hold, in the published layout
        self._part_ids = start.part_ids
        self._context = context
        self._planning = (
            Planning(context, start.publication, start.manifest_id) if start.publication else None
        )
        self._manifest = (
            None if self._planning is not None else context.manifests.get(start.manifest_id)
        )
        self.request = 0  # for the manifest

    @property
    def is_known(self) -> bool:
        """Whether the manifest or plan is known."""
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        """The manifest or plan, in this rank's layout, once known."""
        assert self._manifest is not None
        return self._manifest

    @property
    def base(self) -> Manifest:
        """The manifest that names the filled regions, once known."""
        base = self._planning.base if self._planning is not None else self._manifest
        assert base is not None
        return base

    # --------------------------------------------------------------------------------------- until
    # it is known

    def begin(self) -> None:
        """Find the manifest or plan, or ask for its parts. TensorHubError: the known bytes are no
        publication.
        """
        if self._planning is not None:
            self._manifest = self._planning.begin()
        elif self._manifest is None:
            self._ask()

    def ask_again(self) -> None:
        """After a lost connection: repeat the questions to a coordinator that knows the version."""
        if self._planning is not None:
            self._planning.ask_again()
        else:
            self._ask()

    def waits_for(self, request: int) -> bool:
        return (
            request == self.request if self._planning is None else self._planning.waits_for(request)
        )

    def came(self, reply: messages.ManifestReply) -> None:
        """TensorHubError: the reply is not the requested manifest or part."""
        if self._planning is not None:
            self._planning.came(reply)
        else:
            self._manifest = self._context.manifests.add(reply.manifest)

    def is_of(self, number: int) -> bool:
        """Whether that number is the requested plan."""
        return self._planning is not None and self._planning.is_of(number)

    def planned(self, made: Planned | TensorHubError) -> None:
        """Keep the requested plan. TensorHubError: the plan cannot be made."""
        if isinstance(made, TensorHubError):
            raise made
        assert self._planning is not None
        self._planning.keep(made)
        self._manifest = made.reading

    def _ask(self) -> None:
        self.request, shard = self._context.new_request(), self._context.shard
        self._context.say(
            messages.GetManifest(self.request, shard.model, self.version.content_id, shard.number)
        )

    # ------------------------------------------------------------------------------------------
    # once it is known

    def content(self, generation: int) -> Content:
        """The content that the memory, or its staging memory, will hold."""
        base = None if self._planning is None else self.base
        part_ids = tuple(said_parts(self.manifest)) or self._part_ids
        return Content(self.version, self.manifest, generation, base=base, part_ids=part_ids)

    def begun(self, *, written: bool) -> messages.Begun:
        """How far the fill is, for a coordinator that has not bound it."""
        version = self.version
        what = version.version, version.content_id, self.base.manifest_id, written
        return messages.Begun(self._key, *what, self.publication_id)

    def ready_to_write(self, operation: OpKey, asked: Sequence[str]) -> messages.ReadyToWrite:
        """The chunks that this rank needs of each shard, and the `asked` parts of the content that
        the memory will hold.
        """
        manifest, shard = self.manifest, self._context.shard
        needs = manifest.parts if isinstance(manifest, ReshardedManifest) else ()
        said = said_parts(manifest) if shard.serves else {}
        return messages.ReadyToWrite(
            operation,
            shard.rank,
            tuple(
                [
                    messages.Need(
                        n.shard, n.selection.selection_id, len(n.chunks), n.selection.nbytes
                    )
                    for n in needs
                ]
            ),
            tuple(said),
            tuple([said[part_id] for part_id in asked if part_id in said]),
        )
