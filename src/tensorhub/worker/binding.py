"""What a fill is bound to: a version, and what this rank reads of it.

Of a version of the rank's own layout that is its manifest, which is asked for if it is not known. Of another layout it is a
plan. Until one of them is known, the fill writes nothing.

Responsible for finding that, and for what others are told of it. Not responsible for how a plan comes about (`planning`),
nor for what the fill does with it (`filling`).
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
    """That of one fill. `start`: what the coordinator has bound it to."""

    def __init__(self, context: MemberContext, start: messages.Start) -> None:
        self.version = start.version
        self.root = start.root  # of the publisher's digests, as far as the coordinator has said it beforehand
        self.publication_id = start.publication  # where this rank's layout is not the published one
        self._key = start.key  # the operation in which it was bound first
        self._manifest_id = start.manifest_id
        self._part_ids = start.part_ids  # of what the memory will hold, in the published layout
        self._context = context
        self._planning = Planning(context, start.publication, start.manifest_id) if start.publication else None
        self._manifest = None if self._planning is not None else context.manifests.get(start.manifest_id)
        self.request = 0  # for the manifest

    @property
    def is_known(self) -> bool:
        """Whether it is known what is read."""
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        """What is read, in this rank's layout, once it is known."""
        assert self._manifest is not None
        return self._manifest

    @property
    def base(self) -> Manifest:
        """Whose regions are filled, once that is known."""
        base = self._planning.base if self._planning is not None else self._manifest
        assert base is not None
        return base

    # --------------------------------------------------------------------------------------- until it is known

    def begin(self) -> None:
        """Find it, or ask for what it is found by. TensorHubError: what is known is no publication."""
        if self._planning is not None:
            self._manifest = self._planning.begin()
        elif self._manifest is None:
            self._ask()

    def ask_again(self) -> None:
        """After a lost connection, of a coordinator that knows what it is about."""
        if self._planning is not None:
            self._planning.ask_again()
        else:
            self._ask()

    def waits_for(self, request: int) -> bool:
        return request == self.request if self._planning is None else self._planning.waits_for(request)

    def came(self, reply: messages.ManifestReply) -> None:
        """TensorHubError: it is not what was asked for."""
        if self._planning is not None:
            self._planning.came(reply)
        else:
            self._manifest = self._context.manifests.add(reply.manifest)

    def is_of(self, number: int) -> bool:
        """Whether that is the plan that was asked for."""
        return self._planning is not None and self._planning.is_of(number)

    def planned(self, made: Planned | TensorHubError) -> None:
        """That plan was made. TensorHubError: it cannot be."""
        if isinstance(made, TensorHubError):
            raise made
        assert self._planning is not None
        self._planning.keep(made)
        self._manifest = made.reading

    def _ask(self) -> None:
        self.request, shard = self._context.new_request(), self._context.shard
        self._context.say(messages.GetManifest(self.request, shard.model, self.version.content_id, shard.number))

    # ------------------------------------------------------------------------------------------ once it is known

    def content(self, generation: int) -> Content:
        """What the memory, or what is staged for it, will hold."""
        base = None if self._planning is None else self.base
        part_ids = tuple(said_parts(self.manifest)) or self._part_ids
        return Content(self.version, self.manifest, generation, base=base, part_ids=part_ids)

    def begun(self, *, written: bool) -> messages.Begun:
        """How far the fill is, for a coordinator that has not bound it."""
        version = self.version
        what = version.version, version.content_id, self.base.manifest_id, written
        return messages.Begun(self._key, *what, self.publication_id)

    def ready_to_write(self, operation: OpKey, asked: Sequence[str]) -> messages.ReadyToWrite:
        """With what is read of which shards, and those of the parts of what the memory will hold that were `asked` for."""
        manifest, shard = self.manifest, self._context.shard
        needs = manifest.parts if isinstance(manifest, ReshardedManifest) else ()
        said = said_parts(manifest) if shard.serves else {}
        return messages.ReadyToWrite(
            operation,
            shard.rank,
            tuple([messages.Need(n.shard, n.selection.selection_id, len(n.chunks), n.selection.nbytes) for n in needs]),
            tuple(said),
            tuple([said[part_id] for part_id in asked if part_id in said]),
        )
