"""Messages about a worker's chunks and their digests, each of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.messages import (
    DIGEST_RUNS_MAX,
    DIGESTS_BYTES_MAX,
    Digests,
    Origin,
    SelectionRoot,
)
from tensorhub.model.digests import pack, root_of, runs_of, unpack
from tensorhub.model.manifest import Manifest
from tensorhub.worker.calls import CompareDigests
from tensorhub.worker.vote import Wrong


def tell(
    registration: str,
    generation: int,
    chunks: int,
    width: int,
    known: Sequence[tuple[int, int]],
    *,
    last: bool,
    page_bytes: int = DIGESTS_BYTES_MAX,
    selection: str = "",
    shard: int = 0,
) -> Iterator[Digests]:
    """Say these (chunk, digest) pairs, ascending, of `chunks` in all, so many bytes at a time.
    `last`: there is nothing more to say. `selection`, of that `shard`: the selection that numbers
    the chunks.
    """
    at = 0
    while at < len(known):
        page = known[at : at + page_bytes // width]
        if len(runs := runs_of(chunk for chunk, _ in page)) > DIGEST_RUNS_MAX:
            page = known[at : at + DIGEST_RUNS_MAX]
            runs = runs_of(chunk for chunk, _ in page)
        at += len(page)
        values = pack([digest for _, digest in page], width)
        yield Digests(
            registration,
            generation,
            chunks,
            tuple(runs),
            values,
            last and at >= len(known),
            selection,
            shard,
        )
    if last and not known:
        yield Digests(registration, generation, chunks, (), b"", True, selection, shard)


def root_of_all(width: int, digests: Sequence[int | None]) -> bytes:
    """The root of all chunks' digests; empty where some chunk has none, or none are made (`width`
    0).
    """
    known = [digest for digest in digests if digest is not None]
    return root_of(pack(known, width)) if width and len(known) == len(digests) else b""


def roots(
    manifest: Manifest, width: int, digests: Sequence[int | None]
) -> tuple[bytes, tuple[SelectionRoot, ...]]:
    """The root of these digests, of all chunks of memory of this manifest; for a manifest that
    reads selections, the root of each selection instead. Empty where some chunk has no digest, or
    none are made (`width` 0).
    """
    if not isinstance(manifest, ReshardedManifest):
        return root_of_all(width, digests), ()
    if not width or None in digests:
        return b"", ()
    found = [
        SelectionRoot(
            part.selection.selection_id,
            root_of_all(width, [digests[chunk] for chunk in part.chunks]),
            part.shard,
        )
        for part in manifest.parts
    ]
    return b"", tuple(found)


def compare(
    question: CompareDigests,
    width: int,
    digests: Sequence[int | None],
    origin_of: Callable[[int], Origin | None],
) -> tuple[list[Wrong], int]:
    """The wrong chunks; and the first chunk of the list that was not compared. `digests`: the
    digests of the memory's chunks, of that width in bytes.
    """
    published = unpack(question.digests, width)
    following = question.first + len(published)
    chunks = question.chunks if question.chunks is not None else range(len(digests))
    pairs = zip(chunks[question.first : following], published, strict=False)
    wrong: list[Wrong] = [
        (chunk, must, origin_of(chunk))
        for chunk, must in pairs
        if digests[chunk] not in (must, None)
    ]
    return wrong, following
