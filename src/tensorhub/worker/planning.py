"""How a rank plans its read of a version of another layout: it gathers the parts of the
publication, and plans from them.

The coordinator names the publication. The rank asks for the publication, then for the parts that
the publication names, and for the manifest to fill if the rank's own is another. Then the shell
plans (`PlanReading`), which takes up to seconds. The parts, and the publication made of them, are
kept for the worker's other handles and for later versions.

Not responsible for asking for parts (`gathering`) and keeping them (`known_parts`), nor for the
plan itself (`tensorhub.layouts`), nor for what a group reads together (`coverage`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub import messages
from tensorhub.errors import TensorHubError
from tensorhub.layouts.joining import publication_of, reading_for
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.published import Published
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.layouts.whole import whole_manifest
from tensorhub.model.manifest import Manifest
from tensorhub.worker.calls import PlanReading
from tensorhub.worker.gathering import Gathering
from tensorhub.worker.member_context import MemberContext


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of a PlanReading."""

    publication: Publication
    reading: ReshardedManifest
    base: Manifest  # names its regions


def plan(action: PlanReading) -> Planned | TensorHubError:
    """Carry out a PlanReading. It takes up to seconds, and needs nothing but its argument."""
    try:
        publication = action.publication or publication_of(action.published, action.parts)
        base = action.manifest or whole_manifest(action.published, publication, action.names)
        reading = reading_for(action.published, publication, base, action.declared)
        return Planned(publication, reading, base)
    except TensorHubError as error:
        return error


class Planning:
    """The planning of one fill. `publication_id`: as Start names it; `manifest_id`: the manifest
    that names the regions.
    """

    def __init__(self, context: MemberContext, publication_id: str, manifest_id: str) -> None:
        self.publication_id = publication_id
        self.base: Manifest | None = None  # once it is known
        self._manifest_id = manifest_id
        self._context = context
        self._gathering = Gathering(context)
        self._published: Published | None = None  # once it is known
        self._number = 0  # of the plan that was asked for
        self._is_whole = False  # it is a fetch of the whole model; the plan tells the regions

    def begin(self) -> ReshardedManifest | None:
        """The plan, if it was made before; else ask for its parts. TensorHubError: the known bytes
        are no publication.
        """
        mine = self._context.shard.manifest
        if mine is None and not self._manifest_id:
            self._is_whole = True
        elif mine is not None and self._manifest_id in ("", mine.manifest_id):
            self.base = mine
        else:
            self.base = self._context.manifests.get(self._manifest_id)
        if self.base is not None:
            found = self._context.readings.get(self.publication_id, self.base.manifest_id)
            if found is not None:
                return found
        self._go_on()
        return None

    def waits_for(self, request: int) -> bool:
        return self._gathering.waits_for(request)

    def came(self, reply: messages.ManifestReply) -> None:
        """TensorHubError: the reply is not the requested part."""
        self._gathering.came(reply)
        self._go_on()

    def ask_again(self) -> None:
        """After a lost connection: repeat the questions to a coordinator that knows the
        publication.
        """
        self._gathering.ask_again()

    def is_of(self, number: int) -> bool:
        """Whether that number is the requested plan."""
        return number == self._number

    def keep(self, planned: Planned) -> None:
        self.base = planned.base
        self._context.parts.keep(self.publication_id, planned.publication)
        self._context.readings.keep(self.publication_id, self.base.manifest_id, planned.reading)

    def _go_on(self) -> None:
        """Find the needed parts, ask for missing parts, and plan once all are here."""
        gathering, known = self._gathering, self._context.parts.publication(self.publication_id)
        gathering.want(self.publication_id)
        if self.base is None and not self._is_whole:
            gathering.want(self._manifest_id)
            if self._manifest_id in gathering.found:
                self.base = self._context.manifests.add(gathering.found[self._manifest_id])
        if self._published is None and self.publication_id in gathering.found:
            self._published = Published.decode(gathering.found[self.publication_id])
            if known is None:
                gathering.want(*self._published.part_ids)
        if not gathering.is_done or self._published is None or self._number:
            return
        shard, self._number = self._context.shard, self._context.cause
        declared = (
            shard.declared
            if shard.declared is not None
            else Declaration(shard.rank, shard.world_size)
        )
        what = self._published, gathering.found, known, self.base, declared, shard.names
        self._context.act(PlanReading(self._number, *what))
