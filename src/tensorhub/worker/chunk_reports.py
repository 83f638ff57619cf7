"""Messages about a worker's chunks and their digests, each of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tensorhub.digests import pack, runs_of
from tensorhub.messages import DIGEST_RUNS_MAX, DIGESTS_BYTES_MAX, THERE_BYTES_MAX, ChunksThere, Digests, TellChunks
from tensorhub.types import RegistrationId


def tell(
    registration: str,
    generation: int,
    chunks: int,
    width: int,
    known: Sequence[tuple[int, int]],
    *,
    last: bool,
    page_bytes: int = DIGESTS_BYTES_MAX,
) -> Iterator[Digests]:
    """Say these (chunk, digest) pairs, ascending, of `chunks` in all, so many bytes at a time. `last`: there is nothing more
    to say.
    """
    at = 0
    while at < len(known):
        page = known[at : at + page_bytes // width]
        if len(runs := runs_of(chunk for chunk, _ in page)) > DIGEST_RUNS_MAX:
            page = known[at : at + DIGEST_RUNS_MAX]
            runs = runs_of(chunk for chunk, _ in page)
        at += len(page)
        values = pack([digest for _, digest in page], width)
        yield Digests(registration, generation, chunks, tuple(runs), values, last and at >= len(known))
    if last and not known:
        yield Digests(registration, generation, chunks, (), b"", True)


class There(Protocol):
    """See `worker.owner`."""

    def there(self, registration: RegistrationId, generation: int, chunks_max: int) -> tuple[int, bytes]: ...


def tell_chunks(owner: There, question: TellChunks) -> ChunksThere:
    """Which chunks of that memory may be read."""
    memory = RegistrationId(question.registration), question.generation
    return ChunksThere(*memory, *owner.there(*memory, 8 * THERE_BYTES_MAX))
