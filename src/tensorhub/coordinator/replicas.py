"""Ranks that have published the same part of a model (HSDP, data parallelism): which may be read, and are they equal?

Theory of operation. Such ranks are one class of shards. Different ranks of a reader read different selections of them, so
that no digest of a selection shows that two of them have drifted apart. Their own chunks' digests do: when a class is
published, all its publishers are asked for these, and votes of readers of another layout count once they have answered.

If they differ, no reader of another layout commits, and the error names ranks and tensors (`Version.drifted`). Nobody is
quarantined: it is not known which of them is right.

Responsible for telling equal ones from others. Not responsible for asking them (`testimonies`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub.coordinator.entities import RankPart, Version
from tensorhub.model.digests import head_of
from tensorhub.model.manifest import Manifest

NAMES_MAX = 8  # tensors that an error names
MANIFEST_BYTES_MAX = 2**20  # a longer one is not decoded for an error: others would wait for that


def needed(part: RankPart) -> Iterator[int]:
    """The classes of what was published that this rank reads, by their first shards."""
    if part.bridges:
        yield from (need.shard for need in part.needs or ())


def drifted(version: Version, first: int) -> tuple[int, int] | None:
    """Two shards of a class whose digests differ, if there are two."""
    known = [shard for shard in version.holdings.classes[first] if _root(version, shard)]
    return next(((one, other) for one in known[:1] for other in known[1:] if _differ(version, one, other)), None)


def _root(version: Version, shard: int) -> bytes:
    testimony = version.testimonies.get(shard)
    return testimony.root if testimony is not None else b""


def _differ(version: Version, one: int, other: int) -> bool:
    return _have_one_grid(version, one, other) and _root(version, one) != _root(version, other)


def _have_one_grid(version: Version, one: int, other: int) -> bool:
    """Their pieces lie in equal places. With equal settings they are cut into equal chunks."""
    return head_of(version.manifests.get(one, b"")) == head_of(version.manifests.get(other, b""))


def what_differs(version: Version, one: int, other: int) -> str:
    """The tensors in which they differ, as far as that is still known: the rest of a sentence."""
    manifest = version.manifests.get(one, b"")
    chunks = list(_chunks_that_differ(version, one, other))
    if not chunks or len(manifest) > MANIFEST_BYTES_MAX:
        return f"chunk {chunks[0]} is the first of {len(chunks)}" if chunks else "in which tensors is not known any more"
    described = Manifest.decode(manifest)
    names = list(dict.fromkeys(name for chunk in chunks for name in described.tensors_in(chunk)))
    shown = ", ".join(map(repr, names[:NAMES_MAX]))
    return shown if len(names) <= NAMES_MAX else f"{shown} and {len(names) - NAMES_MAX} more tensors"


def _chunks_that_differ(version: Version, one: int, other: int) -> Iterator[int]:
    mine, theirs = version.testimonies[one], version.testimonies[other]
    if mine.chunks == theirs.chunks:
        yield from (chunk for chunk in range(mine.chunks) if mine.digest(chunk) != theirs.digest(chunk))
