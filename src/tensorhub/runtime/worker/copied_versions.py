"""A version in this worker's host copies, read chunk by chunk as one in an archive is; and what
makes it of another version.

Each chunk is copied under an access of its owner, so it is whole, or the call fails: a copy that is
given up meanwhile is not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tensorhub import deltas
from tensorhub.archives.reading import Held
from tensorhub.archives.store import Buffer
from tensorhub.errors import StateError
from tensorhub.model.digests import WIDTHS, pack
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.member_memory import Content

MEMORY_READ_S = 60.0  # for one chunk of a copy, which may have to be loaded
ENCODERS = 2  # threads that compare chunks


@dataclass(frozen=True, slots=True)
class CopyOfShard:
    """A registration of this worker, under the generation in which it holds one shard."""

    registration: RegistrationId
    generation: int
    content_id: ContentId
    manifest: Manifest


def copy_of(registration: str, content: Content) -> CopyOfShard:
    """What that registration's member holds."""
    return CopyOfShard(
        RegistrationId(registration),
        content.generation,
        ContentId(content.version.content_id),
        content.manifest,
    )


class CopiedVersion:
    """For any thread."""

    def __init__(
        self, owner: SharedOwner, shards: Sequence[CopyOfShard], is_over: Callable[[], bool]
    ) -> None:
        """`is_over`: nothing is read any more."""
        self._owner, self.shards, self._is_over = owner, shards, is_over

    def __repr__(self) -> str:
        return f"<CopiedVersion of {len(self.shards)} shards>"

    def manifest(self, shard: int) -> Manifest:
        return self.shards[shard].manifest

    def digests(self, shard: int) -> bytes:
        """The list of the chunks' digests. StateError: the copy was given up."""
        its = self.shards[shard]
        listed = self._owner.listed(its.registration, its.generation)
        if listed is None or None in listed[1]:
            raise _gone()
        return pack([each or 0 for each in listed[1]], WIDTHS[its.manifest.digest])

    def read(self, shard: int, chunks: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Fill each target with that chunk. StateError: the copy was given up, or could not be
        loaded.
        """
        its = self.shards[shard]
        for chunk, target in zip(chunks, targets, strict=True):
            if self._is_over():
                raise StateError("the archive is being closed")
            with self._owner.access(
                None, its.registration, its.generation, its.content_id, [chunk], 1, MEMORY_READ_S
            ) as answer:
                if not isinstance(answer, tuple):
                    raise _gone()
                target[:] = answer[1].buffer(chunk)


def _gone() -> StateError:
    return StateError("the host copy of this version was given up meanwhile", retryable=True)


def frames(
    shard: int, new: Held, digests: bytes, base: Held, base_digests: bytes
) -> Iterator[Buffer | None]:
    """What makes each chunk of `new` of `base`, as `Archive.add_delta` takes it. Raises as
    `Held.read`; StateError: the extra `delta` is not installed.
    """
    manifest = new.manifest(shard)
    widths, width = deltas.word_widths(manifest), WIDTHS[manifest.digest]

    def frame(chunk: int) -> Buffer | None:
        at = slice(chunk * width, (chunk + 1) * width)
        if width and digests[at] == base_digests[at]:
            return None
        nbytes = manifest.sizes[chunk]
        old, fresh = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        base.read(shard, [chunk], [old])
        new.read(shard, [chunk], [fresh])
        return deltas.encode(old, fresh, widths[manifest.chunks[chunk].region]) or fresh

    with ThreadPoolExecutor(ENCODERS, "tensorhub-archive") as pool:
        ahead = deque[Future[Buffer | None]]()
        try:
            for chunk in range(manifest.chunk_count):
                ahead.append(pool.submit(frame, chunk))
                if len(ahead) > 2 * ENCODERS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for job in ahead:
                job.cancel()
