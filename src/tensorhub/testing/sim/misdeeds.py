"""What users do to published memory that nobody may."""

from __future__ import annotations

from tensorhub.coordinator import Digested
from tensorhub.testing.sim.handle import HandleShell
from tensorhub.testing.sim.layouts import is_of_other_layout
from tensorhub.testing.sim.memory import digest_of
from tensorhub.types import HandleState, Medium


def overwrite(handle: HandleShell) -> bool:
    """Write it; False: there is none."""
    content, cluster = handle.member.content, handle.cluster
    if handle.shard.medium is Medium.HOST:
        return False  # no user has that memory
    if handle.part:
        return False  # it would be no twin any more
    if content is None or handle.member.state is not HandleState.READY or handle.access is not None:
        return False
    cluster.driver.note(f"{handle.name} is written while it is published")
    chunk = _chunk_to_spoil(handle)
    cell = f"{handle.name}!{next(cluster.numbers)}.{chunk}"
    cluster.guarantees.contents.spoil(handle, content.version.content_id, chunk, cell)
    handle.cells[chunk] = cell
    return True


def lie(handle: HandleShell) -> bool:
    """Overwrite what was read from others, and forget its digests, so that those of the new bytes vouch for them.
    False: it holds nothing of that kind, or nobody could know better.

    Memory of another layout lies to those who copy its chunks, or read with them. Where the coordinator has forgotten what
    vouches for it, whoever reads selections of it could not know better, so it tells them that it has changed: see
    `SimDigests.is_spoilt`.
    """
    content, cluster, is_other = handle.member.content, handle.cluster, is_of_other_layout(handle.grid)
    if content is None or handle.member.state is not HandleState.READY or handle.access is not None or content.published:
        return False
    info, held = content.version, handle.worker.owner._memories.get(handle.id)
    known = any(isinstance(each, Digested) and each.content_id == info.content_id for each in cluster.store)
    if not known or held is None or handle.lied == info.content_id or (is_other and handle.is_read):
        return False
    cluster.driver.note(f"{handle.name} lies")
    chunk, handle.lied = _chunk_to_spoil(handle), info.content_id
    cell = f"{handle.name}?{next(cluster.numbers)}.{chunk}"
    cluster.guarantees.contents.spoil(handle, info.content_id, chunk, cell)
    cluster.guarantees.contents.lies.add(cell)
    handle.cells[chunk], held.own.digests[chunk] = cell, digest_of(cell) if is_other else None
    for grid in held.selections.values():
        grid.digests = [None if chunk in grid.covers(n) else digest for n, digest in enumerate(grid.digests)]
    return True


def _chunk_to_spoil(handle: HandleShell) -> int:
    """Often one that somebody has read, which others may notice."""
    number = next(handle.cluster.numbers)
    held = handle.worker.owner._memories.get(handle.id)
    known = [chunk for chunk, digest in enumerate(held.own.digests) if digest is not None] if held is not None else []
    return known[number % len(known)] if known and number % 2 else number % len(handle.cells)
