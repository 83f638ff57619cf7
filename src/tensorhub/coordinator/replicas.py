"""Ranks that have published equal parts of a model (HSDP, data parallelism): do their bytes agree?

Theory of operation. Shards that describe one part of the model form one class. Ranks of a reader
read different selections from the shards of a class, so no digest of a selection shows that two
shards have drifted apart. The digests of the shards' own chunks do. When a class is published, all
its publishers are asked for these digests. Votes of readers of another layout count once the
publishers have answered.

If the digests differ, no reader of another layout commits, and the error names ranks and tensors
(`Version.drifted`). No holding is quarantined: it is not known which bytes are right.

Responsible for comparing the shards of a class. Not responsible for asking the publishers
(`testimonies`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub.coordinator.entities import RankPart, Version
from tensorhub.model.digests import head_of
from tensorhub.model.manifest import Manifest

NAMES_MAX = 8  # tensors that an error names
# a longer manifest is not decoded for an error: all workers would wait for that
MANIFEST_BYTES_MAX = 2**20


def needed(part: RankPart) -> Iterator[int]:
    """The published classes that this rank reads, by their first shards."""
    if part.bridges:
        yield from (need.shard for need in part.needs or ())


def drifted(version: Version, first: int) -> tuple[int, int] | None:
    """Two shards of a class with different digests, or None."""
    known = [shard for shard in version.holdings.classes[first] if _root(version, shard)]
    return next(
        ((one, other) for one in known[:1] for other in known[1:] if _differ(version, one, other)),
        None,
    )


def _root(version: Version, shard: int) -> bytes:
    testimony = version.testimonies.get(shard)
    return testimony.root if testimony is not None else b""


def _differ(version: Version, one: int, other: int) -> bool:
    return _have_one_grid(version, one, other) and _root(version, one) != _root(version, other)


def _have_one_grid(version: Version, one: int, other: int) -> bool:
    """Whether the segments of two shards lie in equal places. With equal settings they are cut into
    equal chunks.
    """
    return head_of(version.manifests.get(one, b"")) == head_of(version.manifests.get(other, b""))


def what_differs(version: Version, one: int, other: int) -> str:
    """The tensors in which two shards differ, if that is still known: the end of an error's
    sentence.
    """
    manifest = version.manifests.get(one, b"")
    chunks = list(_chunks_that_differ(version, one, other))
    if not chunks or len(manifest) > MANIFEST_BYTES_MAX:
        return (
            f"chunk {chunks[0]} is the first of {len(chunks)}"
            if chunks
            else "in which tensors is not known any more"
        )
    described = Manifest.decode(manifest)
    names = list(dict.fromkeys(name for chunk in chunks for name in described.tensors_in(chunk)))
    shown = ", ".join(map(repr, names[:NAMES_MAX]))
    return (
        shown if len(names) <= NAMES_MAX else f"{shown} and {len(names) - NAMES_MAX} more tensors"
    )


def _chunks_that_differ(version: Version, one: int, other: int) -> Iterator[int]:
    mine, theirs = version.testimonies[one], version.testimonies[other]
    if mine.chunks == theirs.chunks:
        yield from (
            chunk for chunk in range(mine.chunks) if mine.digest(chunk) != theirs.digest(chunk)
        )
