"""Forbidden writes of users to published memory."""

from __future__ import annotations

from tensorhub.coordinator import Digested
from tensorhub.testing.sim.handle import HandleShell
from tensorhub.testing.sim.layouts import is_of_other_layout
from tensorhub.testing.sim.memory import digest_of
from tensorhub.types import HandleState, Medium
from tensorhub.worker.filling import Filling


def overwrite(handle: HandleShell) -> bool:
    """Write it; False: there is none."""
    content, cluster = handle.member.content, handle.cluster
    if handle.shard.medium is Medium.HOST:
        return False  # no user has that memory
    if handle.part:
        return False  # it would be no twin any more
    if content is None or handle.member.state is not HandleState.READY or handle.access is not None:
        return False
    cluster.note(f"{handle.name} is written while it is published")
    chunk = _chunk_to_spoil(handle)
    cell = f"{handle.name}!{next(cluster.numbers)}.{chunk}"
    cluster.guarantees.contents.spoil(handle, content.version.content_id, chunk, cell)
    handle.cells[chunk] = cell
    return True


def lie(handle: HandleShell) -> bool:
    """Overwrite a replica, and forget its digests, so that digests of the new bytes vouch for them.
    False: it holds no replica, or no worker could find out.

    Memory of another layout lies to readers that copy its chunks.
    """
    content, cluster, is_other = (
        handle.member.content,
        handle.cluster,
        is_of_other_layout(handle.grid),
    )
    if (
        content is None
        or handle.member.state is not HandleState.READY
        or handle.access is not None
        or content.published
        or handle.loader is not None
    ):
        return False
    info, held = content.version, handle.worker.owner._memories.get(handle.id)
    known = any(
        isinstance(each, Digested) and each.content_id == info.content_id for each in cluster.store
    )
    if not known or held is None or handle.lied == info.content_id or (is_other and handle.is_read):
        return False
    cluster.note(f"{handle.name} lies")
    chunk = _chunk_to_spoil(handle)
    cell = _lie_of(handle, info.content_id, chunk)
    held.own.digests[chunk] = digest_of(cell) if is_other else None
    for grid in held.selections.values():
        grid.digests = [None] * len(grid.digests)
    return True


def plot(handle: HandleShell) -> str:
    """It will lie before it votes, about the content that it reads of another layout now. So it may
    be the first that reports digests of that content, as a reader of its publisher, and is believed
    until a better digest source contradicts it. Returns the content id; "": it reads none.
    """
    content_id = _reads(handle)
    if content_id and handle.pull is not None:
        handle.before_vote = _lie_first
        return content_id
    return ""


def _lie_first(handle: HandleShell) -> None:
    content_id, held = _reads(handle), handle.worker.owner._memories.get(handle.id)
    if (
        held is None
        or not held.is_open
        or held.content_id != content_id
        or content_id in ("", handle.lied)
    ):
        return
    known = [
        chunk
        for chunk, digest in enumerate(held.own.digests)
        if digest is not None and held.available[chunk]
    ]
    if known:
        handle.cluster.note(f"{handle.name} lies at first hand")
        chunk = known[next(handle.cluster.numbers) % len(known)]
        held.own.digests[chunk] = digest_of(_lie_of(handle, content_id, chunk))


def _reads(handle: HandleShell) -> str:
    """The content that it reads of another layout, in place; "": none."""
    running, is_other = handle.member.running, is_of_other_layout(handle.grid)
    if (
        not isinstance(running, Filling)
        or running.binding is None
        or handle.staging is not None
        or not is_other
    ):
        return ""
    return running.binding.version.content_id


def _lie_of(handle: HandleShell, content_id: str, chunk: int) -> str:
    """Overwrite that chunk. With what."""
    contents, handle.lied = handle.cluster.guarantees.contents, content_id
    cell = f"{handle.name}?{next(handle.cluster.numbers)}.{chunk}"
    contents.spoil(handle, content_id, chunk, cell)
    contents.lies.add(cell)
    handle.cells[chunk] = cell
    return cell


def _chunk_to_spoil(handle: HandleShell) -> int:
    """Often a chunk with a digest: readers may notice its change."""
    number = next(handle.cluster.numbers)
    held = handle.worker.owner._memories.get(handle.id)
    known = (
        [chunk for chunk, digest in enumerate(held.own.digests) if digest is not None]
        if held is not None
        else []
    )
    return known[number % len(known)] if known and number % 2 else number % len(handle.cells)
