"""What a rank reads of a version of another layout: what says how that is laid out is gathered, and a plan is made of it.

The coordinator names the publication. The rank asks for it, then for the parts that it names, and for the manifest of the
rank's own layout if that is not the rank's own. Then the shell plans (`PlanReading`), which takes up to seconds. What is
gathered, and the publication that was made of it, are kept for the worker's other handles and for later versions.

Not responsible for asking for parts (`gathering`) and keeping them (`known_parts`), nor for what a plan is
(`tensorhub.layouts`), nor for what a group reads together (`coverage`).
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
    """What a PlanReading has made."""

    publication: Publication
    reading: ReshardedManifest
    base: Manifest  # whose regions it has


def plan(action: PlanReading) -> Planned | TensorHubError:
    """Carry it out. It takes up to seconds, and nothing but its argument."""
    try:
        publication = action.publication or publication_of(action.published, action.parts)
        base = action.manifest or whole_manifest(action.published, publication, action.names)
        reading = reading_for(action.published, publication, base, action.declared)
        return Planned(publication, reading, base)
    except TensorHubError as error:
        return error


class Planning:
    """That of one fill. `publication_id`: as Start names it; `manifest_id`: of the manifest whose regions are filled."""

    def __init__(self, context: MemberContext, publication_id: str, manifest_id: str) -> None:
        self.publication_id = publication_id
        self.base: Manifest | None = None  # once it is known
        self._manifest_id = manifest_id
        self._context = context
        self._gathering = Gathering(context)
        self._published: Published | None = None  # once it is known
        self._number = 0  # of the plan that was asked for
        self._is_whole = False  # it is a fetch of the whole model, whose regions the plan tells

    def begin(self) -> ReshardedManifest | None:
        """What is read, if it was planned before; else it is asked for. TensorHubError: what is known is no publication."""
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
        """TensorHubError: it is not what was asked for."""
        self._gathering.came(reply)
        self._go_on()

    def ask_again(self) -> None:
        """After a lost connection, of a coordinator that knows what it is about."""
        self._gathering.ask_again()

    def is_of(self, number: int) -> bool:
        """Whether that is the plan that was asked for."""
        return number == self._number

    def keep(self, planned: Planned) -> None:
        self.base = planned.base
        self._context.parts.keep(self.publication_id, planned.publication)
        self._context.readings.keep(self.publication_id, self.base.manifest_id, planned.reading)

    def _go_on(self) -> None:
        """Look for what is needed, ask for what is missing, and plan once all is here."""
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
        declared = shard.declared if shard.declared is not None else Declaration(shard.rank, shard.world_size)
        what = self._published, gathering.found, known, self.base, declared, shard.names
        self._context.act(PlanReading(self._number, *what))
