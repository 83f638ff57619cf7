"""How a simulated handle's memory is filled, as `runtime.worker.fill` does it: with what it held,
by copying, and by lanes.

Responsible for which cells a fill writes, the memory's own or those that are staged for it, and for
what others may then read of them. Not responsible for what is read from whom (`pulling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from tensorhub.messages import Origin, SelectionRoot
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.model.digests import WIDTHS
from tensorhub.testing.sim.memory import CHUNK_BYTES, Cells, digest_of, sent_digest
from tensorhub.testing.sim.ports import HandlePort, WorldPort
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.calls import CompareDigests, CopyLocally, LocalCopy, StartPull
from tensorhub.worker.chunk_reports import compare, roots
from tensorhub.worker.local_copying import Copier


class SimFiller:
    """That of one handle. `offers`: called when others may read more of it."""

    def __init__(self, world: WorldPort, handle: HandlePort, offers: Callable[[], None]) -> None:
        self._world = world
        self._handle = handle
        self._offers = offers

    def begin_pull(self, start: StartPull) -> StartPull:
        """Make ready what is to be filled: that pull without what is here already, which others may
        read from now on.
        """
        owner, handle = self._handle.worker.owner, self._handle
        if not handle.shard.serves and owner.digests(handle.id, start.generation) is None:
            content, sizes = (
                ContentId(start.version.content_id),
                [CHUNK_BYTES] * start.manifest.chunk_count,
            )
            grid = start.manifest.grid_id
            owner.open(
                handle.id, start.generation, content, sizes, complete=False, serves=False, grid=grid
            )
        self._begin(start)
        kept = [] if start.staged else self._kept(start.generation)
        if not kept:
            return start
        self._world.took("kept chunks verified")
        self.offer(start, list[tuple[int, int | None]](kept))
        return replace(start, copied=start.copied.union(chunk for chunk, _ in kept))

    def copy(self, action: CopyLocally) -> frozenset[int]:
        """Take what other memory of this worker has, in no time: which chunks are here then."""
        self._begin(action)
        handle, owner = self._handle, self._handle.worker.owner
        content_id, digested = action.version.content_id, action.manifest.digest != "none"
        target, filled = self._target(staged=action.staged)

        @contextmanager
        def access(
            source: LocalCopy, wanted: Sequence[int]
        ) -> Iterator[tuple[Access, LocalCopy] | Wait | Refusal]:
            right = RegistrationId(source.registration), source.generation, ContentId(content_id)
            found = owner.begin(*right, wanted, 2**62)
            try:
                yield (found, source) if isinstance(found, Access) else found
            finally:
                if isinstance(found, Access):
                    owner.end(found)

        def move(found: Access, source: LocalCopy) -> dict[int, int | None]:
            cells, good = self._cells_of(source.registration), dict[int, int | None]()
            for chunk, known in zip(found.chunks, found.digests, strict=True):
                digest = sent_digest(owner, found, chunk, known, cells[chunk]) if digested else None
                if not digested or digest == digest_of(cells[chunk]):
                    filled[chunk], good[chunk] = cells[chunk], digest
            liar = self._world.handle_of(source.registration)
            if liar is not None and liar.lied == content_id:  # of its own process
                self._world.guarantees.contents.misled(handle, content_id)
            if good:
                self._world.took(f"copied from {self._world.kind_of(source.registration)}")
            return good

        def arrived(named: Sequence[tuple[int, int | None]], origin: Origin | None) -> None:
            self._world.verified.arrived(target, ((chunk, filled[chunk]) for chunk, _ in named))
            if owner.mark_available(target, action.generation, named, origin):
                self._offers()

        copier = Copier(access, owner.origins, move, arrived)
        return copier.copy(action.sources, action.manifest.chunk_count, action.copied)

    def _begin(self, action: StartPull | CopyLocally) -> None:
        """Make what is to be filled: the memory itself, of which only what was copied is left, or
        what is staged for it.
        """
        handle, chunks = self._handle, action.manifest.chunk_count
        if not action.staged:
            handle.lay_out(action.manifest)
        else:
            if handle.staging is None:
                handle.take_staging(action.manifest.nbytes)
                handle.staging, content = ["staged"] * chunks, ContentId(action.version.content_id)
                sizes = [CHUNK_BYTES] * chunks
                handle.worker.owner.open(
                    handle.staging_id, action.generation, content, sizes, complete=False
                )
                self._world.verified.forget(handle.staging_id)
            self._world.verified.begins(
                handle.staging_id,
                action.version.content_id,
                handle.staging,
                action.copied,
                action.manifest,
            )
            return
        kept = {*action.copied, *(chunk for chunk, _ in self._kept(action.generation))}
        if action.manifest.digest == "none":
            self._world.verified.forget(handle.id)  # nobody can tell what is left of a broken fill
        self._world.verified.begins(
            handle.id, action.version.content_id, handle.cells, kept, action.manifest
        )
        handle.half_fill(kept)
        handle.changed = ""
        self._world.guarantees.retained.filling(handle, action.version)

    def _kept(self, generation: int) -> list[tuple[int, int]]:
        """What a fill that was broken off has left of this content, and nobody has written since
        (R9).
        """
        cells, kept = (
            self._handle.cells,
            self._handle.worker.owner.kept(self._handle.id, generation),
        )
        return [(chunk, digest) for chunk, digest in kept if digest_of(cells[chunk]) == digest]

    def _target(self, *, staged: bool) -> tuple[RegistrationId, Cells]:
        """What is filled: under which id the owner knows it, and its cells."""
        handle = self._handle
        if not staged:
            return handle.id, handle.cells
        assert handle.staging is not None
        return handle.staging_id, handle.staging

    def _cells_of(self, registration: str) -> Cells:
        """The memory of one of this worker's registrations, or what is staged for this one."""
        if registration == self._handle.staging_id:
            return self._target(staged=True)[1]
        handle = self._world.handle_of(registration)
        assert handle is not None
        return handle.cells

    # -- what was published

    def roots(self, start: StartPull | CopyLocally) -> tuple[bytes, tuple[SelectionRoot, ...]]:
        """See `worker.chunk_reports.roots`."""
        digests = self._handle.worker.owner.digests(
            self._target(staged=start.staged)[0], start.generation
        )
        return (
            (b"", ())
            if digests is None
            else roots(start.manifest, WIDTHS[start.manifest.digest], digests)
        )

    def compare(self, action: CompareDigests) -> None:
        """Find what is not as was published; nobody reads it any more."""
        handle, target = self._handle, self._target(staged=action.staged)[0]
        owner, generation = handle.worker.owner, action.generation
        digests = owner.digests(target, generation)
        if digests is None:
            return
        wrong, following = compare(action, 8, digests, partial(owner.origin, target, generation))
        chunks = [chunk for chunk, _, _ in wrong]
        inside = owner.revoke(target, generation, chunks)
        handle.shut_readers(inside)
        self._world.verified.revoked(target, chunks)
        if wrong:
            self._world.took("not as published")
        handle.apply(handle.member.compared(generation, following, wrong, handle.worker.now))

    # -- as lanes see it

    def receive(self, chunk: int, cell: str, start: StartPull) -> None:
        """A lane writes what it was sent."""
        handle, (target, cells) = self._handle, self._target(staged=start.staged)
        self._world.verified.writes(target, chunk)
        if not start.staged:
            self._world.guarantees.writes(handle)
        cells[chunk] = cell

    def offer(
        self,
        start: StartPull,
        verified: list[tuple[int, int | None]],
        origin: Origin | None = None,
    ) -> None:
        """Let others read what was verified; it was read at `origin`, if at any."""
        handle, (target, cells) = self._handle, self._target(staged=start.staged)
        self._world.verified.arrived(target, ((chunk, cells[chunk]) for chunk, _ in verified))
        owner = handle.worker.owner
        if verified and owner.mark_available(target, start.generation, verified, origin):
            self._offers()
