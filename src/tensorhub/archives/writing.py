"""Versions on their way into the archive, and out of it: anchors, deltas, deletion.

Every object of a version is there before its manifest, and is written as a stream: neither a model
nor a shard is copied in memory or on a disk. A writer that fails, or loses a race, removes what it
wrote; what a dead one leaves is found by its age (`Archive.sweep`).

Responsible for the order of writes. Not responsible for where the bytes are: callers give views of
memory and iterators of frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from secrets import token_hex
from typing import Final

from tensorhub.archives.anchors import FILE_BYTES, INDEX, ChunkPlaces, Files, Whole, files_of
from tensorhub.archives.catalogue import (
    CHAIN_MAX,
    LEFTOVER_AGE,
    Anchor,
    Key,
    Shard,
    Version,
    VersionCatalogue,
    check_whole,
    leftovers,
    parts_of,
)
from tensorhub.archives.claim import Claim
from tensorhub.archives.reading import Apply, Reader, Views
from tensorhub.archives.retention import Decision, Entry, Keep, decide
from tensorhub.archives.store import DELETED_AT_ONCE, SMALL_BYTES_MAX, Buffer, Store
from tensorhub.errors import (
    InvalidValue,
    StateError,
    TensorHubError,
    VersionConflict,
)
from tensorhub.layouts import Published, publication_of
from tensorhub.layouts.ranges import Range
from tensorhub.memory.checkpoint import SUFFIX, file_name_fault
from tensorhub.model.digests import WIDTHS
from tensorhub.model.manifest import Manifest, id_of

BLOCK_BYTES: Final = 8 * 2**20  # that are put together at once, where they are not in one piece
OBJECT_BYTES_MAX: Final = 2**34  # of the chunks whose frames are in one object

Uses = Callable[[], Collection[str]]
# (rank, region, offset, nbytes): these bytes of that rank's memory, in one or more pieces. They
# stay as they are until the version is archived.
View = Callable[[int, int, int, int], Iterable[Buffer]]


@dataclass(frozen=True)
class Content:
    """A version as its publisher said it. `manifests`, `digests`: of each shard, the latter as a
    list (`model.digests`). `parts`: what `published` names, by id. `after`: the version before.
    `layout_id`: see `catalogue.Version`.
    """

    key: Key
    content_id: str
    nbytes: int
    layout_id: str
    published: Published
    parts: Mapping[str, bytes]
    manifests: Sequence[Manifest]
    digests: Sequence[bytes]
    after: Key | None = None


class Archive:
    """Writes the versions of a model, of which there is one writer at a time. Its calls block, and
    come one after another.
    """

    def __init__(
        self,
        store: Store,
        model: str,
        cluster: str,
        owner: str,
        *,
        take_over: bool = False,
        former: str = "",
    ) -> None:
        """See `Claim`. StateError: another archiver writes there, or the archive is another
        cluster's.
        """
        self.catalogue = VersionCatalogue(store, model)
        self.claim = Claim(self.catalogue, cluster, owner, take_over=take_over, former=former)
        try:
            self.catalogue.load()
        except BaseException:
            with suppress(TensorHubError):
                self.claim.release()
            raise
        self._store = store
        self._there = set[str]()  # the ids of parts that are in the store
        self._began = list[str]()  # objects of a version that is not visible yet

    def __repr__(self) -> str:
        return f"<Archive {self.catalogue!r}>"

    def close(self) -> None:
        """Leave the archive to the next writer."""
        self.claim.release()

    # ----------------------------------------------------------------------------------------------
    # adding

    def add_anchor(
        self,
        content: Content,
        view: View,
        files: Mapping[str, bytes] | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> Version:
        """Archive a whole version as a checkpoint, with these files beside it, such as config.json.
        Visible on return.

        VersionConflict: there is another one of this number. ManifestMismatch, StateError: it can
        be no checkpoint. LeaseLost, ArchiveUnavailable.
        """
        if (there := self._same(content.key, content.content_id)) is not None:
            return there
        version = self._begun(content)
        whole = Whole(content.published, publication_of(content.published, content.parts))
        index = b"".join(content.digests)
        with self._removing():
            return self._anchored(
                version, whole, content.manifests, view, files or {}, file_bytes, index
            )

    def add_delta(
        self, content: Content, base: Key, frames: Sequence[Iterable[Buffer | None]]
    ) -> Version:
        """Archive a version by its difference to an archived one, `base`: for each shard what makes
        each chunk of the base's, in order: a frame, or the chunk itself where no frame is shorter,
        or None where it is equal. Visible on return.

        VersionUnavailable: there is no such base. StateError: the base has other tensors, comes
        later, or is at the end of too long a chain. VersionConflict, LeaseLost, ArchiveUnavailable.
        """
        if (there := self._same(content.key, content.content_id)) is not None:
            return there
        version = self._begun(content)
        steps = self.catalogue.chain(base)
        manifests = [each.manifest for each in version.shards]
        if base >= content.key or manifests != [each.manifest for each in steps[-1].shards]:
            raise StateError(
                f"version {base} cannot be the base of {content.key}: it is later, or has other "
                f"tensors"
            )
        if len(steps) >= CHAIN_MAX:
            raise StateError(f"version {base} is at the end of a chain: archive an anchor first")
        with self._removing():
            shards, tables = [], []
            for number, (manifest, its) in enumerate(zip(content.manifests, frames, strict=True)):
                sizes, lengths = self._put_frames(version, number, manifest, its)
                shards.append(replace(version.shards[number], frames=tuple(sizes)))
                tables += [content.digests[number], struct.pack(f"<{len(lengths)}I", *lengths)]
            version = replace(version, base=base, shards=tuple(shards))
            return self._finished(version, b"".join(tables))

    def anchor_again(self, key: Key, apply: Apply) -> Version:
        """Store an archived version anew, as an anchor with the files that its present one has
        beside the tensors: what it is based on is not needed any more.
        """
        catalogue = self.catalogue
        steps = catalogue.chain(key)
        first, old = steps[0], steps[-1]
        shards = range(len(old.shards))
        published = catalogue.published(old)
        whole = Whole(published, publication_of(published, catalogue.parts(old)))
        version = replace(
            old,
            base=None,
            turn=old.turn + 1,
            data=f"data/{key}-{token_hex(8)}",
        )
        index = b"".join([digests for digests, _ in catalogue.tables(old)])
        assert first.anchor is not None  # a chain begins with one
        at = first.anchor.directory
        sizes = {name: size for name, size in first.anchor.beside.items() if name != INDEX}
        if sum(sizes.values()) > SMALL_BYTES_MAX:
            raise catalogue.changed(first.path)
        beside = {
            name: self._store.read(catalogue.at(f"{at}/{name}"), size)
            for name, size in sizes.items()
        }
        with Reader(catalogue, key, apply) as reader, self._removing():
            manifests = [reader.manifest(shard) for shard in shards]
            return self._anchored(
                version, whole, manifests, Views(reader, len(manifests)), beside, FILE_BYTES, index
            )

    def _begun(self, content: Content) -> Version:
        """Its manifest so far, with its parts stored."""
        catalogue, key = self.catalogue, content.key
        self.claim.check()
        said = zip(content.manifests, content.digests, content.published.shards, strict=True)
        for number, (manifest, digests, _) in enumerate(said):
            if len(digests) != manifest.chunk_count * WIDTHS[manifest.digest]:
                raise InvalidValue(f"shard {number} has not one digest for each chunk")
        encoded = {each.manifest_id: each.encode() for each in content.manifests}
        publication = content.published
        wanted = {**content.parts, **encoded, publication.publication_id: publication.encode()}
        for part_id in {*encoded, *publication.part_ids, publication.publication_id} - self._there:
            if not self._store.create(catalogue.at(f"parts/{part_id}"), wanted[part_id]):
                raise catalogue.changed(f"parts/{part_id}")
            self._there.add(part_id)
        shards = tuple([Shard(each.manifest_id, each.chunk_count) for each in content.manifests])
        return Version(
            catalogue.model,
            key,
            content.content_id,
            content.nbytes,
            publication.digest,
            publication.publication_id,
            content.layout_id,
            shards,
            f"data/{key}-{token_hex(8)}",
            "",
            content.after,
        )

    def _anchored(
        self,
        version: Version,
        whole: Whole,
        manifests: Sequence[Manifest],
        view: View,
        others: Mapping[str, bytes],
        file_bytes: int,
        index: bytes,
    ) -> Version:
        files = files_of(whole, file_bytes)
        beside = {**others, INDEX: files.index}
        for name in others:
            fault = file_name_fault(name, "")
            if fault or name == INDEX or name.endswith(SUFFIX):
                raise InvalidValue(f"a file beside the tensors cannot be called {name!r}")
        if sum(map(len, others.values())) > SMALL_BYTES_MAX:
            raise InvalidValue(f"files beside the tensors have {SMALL_BYTES_MAX} bytes at most")
        directory = version.data.replace("data/", "anchors/", 1)
        put = self._put
        for name, header in files.headers.items():
            size = header.file_bytes
            put(f"{directory}/{name}", _file(files, name, view), size)
        for name, text in beside.items():
            put(f"{directory}/{name}", [text], len(text))
        shards, headers = list[Shard](), list(files.headers.values())
        for rank, (shard, manifest) in enumerate(zip(version.shards, manifests, strict=True)):
            places = ChunkPlaces(whole, headers, manifest, rank)
            if nbytes := places.rest_bytes:
                put(version.rest(rank), _rest(places, manifest, rank, view), nbytes)
            shards.append(replace(shard, frames=(), rest=nbytes))
        sizes = {name: header.file_bytes for name, header in files.headers.items()}
        texts = {name: len(text) for name, text in beside.items()}
        anchor = Anchor(directory, sizes, texts)
        return self._finished(replace(version, anchor=anchor, shards=tuple(shards)), index)

    def _put_frames(
        self, version: Version, shard: int, manifest: Manifest, frames: Iterable[Buffer | None]
    ) -> tuple[list[int], list[int]]:
        """The sizes of the objects, and the length of each frame."""
        lengths, sizes, rest = list[int](), list[int](), iter(frames)

        def of_chunks(chunk_sizes: Sequence[int]) -> Iterator[Buffer]:
            for nbytes, frame in zip(chunk_sizes, rest, strict=False):
                lengths.append(0 if frame is None else len(frame))
                if lengths[-1] > nbytes:
                    raise InvalidValue(f"a frame is longer than its chunk of {nbytes} bytes")
                if frame is not None:
                    yield frame

        for part, group in enumerate(_groups(manifest.sizes)):
            pieces = of_chunks(group)
            first = next(pieces, None)
            path = version.frames(shard, part)
            sizes.append(0 if first is None else self._put(path, chain([first], pieces)))
        if (count := len(lengths) + len([*rest])) != manifest.chunk_count:
            raise InvalidValue(f"shard {shard} has {manifest.chunk_count} chunks, not {count}")
        return sizes, lengths

    def _put(self, path: str, pieces: Iterable[Buffer], nbytes: int | None = None) -> int:
        self._began.append(path)
        size = self._store.put(self.catalogue.at(path), pieces, nbytes or 0)
        if nbytes is not None and size != nbytes:
            raise InvalidValue(f"{self.catalogue.name(path)} got {size} bytes, and not {nbytes}")
        return size

    def _finished(self, version: Version, index: bytes) -> Version:
        """All of its objects are there: make it visible."""
        self._put(version.index, [index], len(index))
        version = replace(version, index_id=id_of(index))
        text = version.encode()
        self.claim.check()
        # From here on nothing is removed: after an error it may be visible all the same.
        began, self._began = self._began, []
        is_mine = self._store.create(self.catalogue.at(version.path), text)
        if not is_mine:
            self._store.delete(map(self.catalogue.at, began))
        self.catalogue.load()
        if (there := self._same(version.key, version.content_id)) is None:
            raise self.catalogue.changed(version.path)
        return there

    def _same(self, key: Key, content_id: str) -> Version | None:
        """The archived version of that number, if there is one. VersionConflict: it has other
        content.
        """
        there = self.catalogue.versions.get(key)
        if there is not None and there.content_id != content_id:
            raise VersionConflict(
                f"{self._store.url} has another version {key} of {self.catalogue.model!r} "
                f"({there.content_id}, not {content_id}): archive to another URL"
            )
        return there

    @contextmanager
    def _removing(self) -> Iterator[None]:
        """Remove all objects of a version that does not come as far as its manifest."""
        self._began = []
        try:
            yield
        except BaseException:
            with suppress(TensorHubError):
                self._store.delete(map(self.catalogue.at, self._began))
            raise

    # ----------------------------------------------------------------------------------------------
    # removing

    def decide(self, keep: Keep, in_use: Collection[str] = ()) -> Decision:
        """Apply the rules of retention to the catalogue. `in_use`: `Reader.uses` of all readers."""
        counting, replaced = self.catalogue.versions.values(), self.catalogue.replaced
        return decide([self._entry(each) for each in (*counting, *replaced)], keep, in_use)

    def retain(self, keep: Keep, apply: Apply, uses: Uses = tuple) -> Decision:
        """Store versions anew where retention asks for it, then delete. The result says both."""
        decision = self.shorten(keep, apply, uses)
        self.remove(decision)
        return decision

    def shorten(self, keep: Keep, apply: Apply, uses: Uses = tuple) -> Decision:
        """Store versions anew where retention asks for it. The result says that, and what is to be
        deleted then. `uses`: `Reader.uses` of all readers, at any time.
        """
        first = self.decide(keep, uses())
        for key in first.anchor_first:
            self.anchor_again(key, apply)
        return replace(self.decide(keep, uses()), anchor_first=first.anchor_first)

    def remove(self, decision: Decision) -> None:
        """Delete in the order of the decision, which was made of the catalogue as it is now.
        LeaseLost: another process has taken over, and nothing is deleted from then on.
        """
        if not decision.manifests:
            return
        check_whole(self.catalogue)
        for path in decision.manifests:
            self._delete([self.catalogue.at(path)])
        self._forget(decision.objects)
        self._delete([self.catalogue.at(path) for path in decision.objects])
        self.catalogue.load()

    def sweep(self, age: timedelta = LEFTOVER_AGE) -> list[str]:
        """Delete what dead writers left, if it is older than `age`; the paths that were deleted."""
        self.claim.check()
        self.catalogue.load()
        found = leftovers(self.catalogue, age)
        self._forget(path.removeprefix(self.catalogue.at("")) for path in found)
        self._delete(found)
        return found

    def _delete(self, paths: Sequence[str]) -> None:
        """Look before each request whether this process still writes here."""
        for first in range(0, len(paths), DELETED_AT_ONCE):
            self.claim.check()
            self._store.delete(paths[first : first + DELETED_AT_ONCE])

    def _forget(self, paths: Iterable[str]) -> None:
        self._there -= {path.removeprefix("parts/") for path in paths}

    def _entry(self, version: Version) -> Entry:
        parts = frozenset([f"parts/{each}" for each in parts_of(self.catalogue, version)])
        return Entry(
            version.path,
            version.key,
            version.turn,
            version.base,
            version.own_objects,
            parts,
            version.nbytes,
        )


# --------------------------------------------------------------------------------------------------
# streams


def _file(files: Files, name: str, view: View) -> Iterator[Buffer]:
    yield files.headers[name].encode()
    for nbytes, ranges in files.pieces(name, BLOCK_BYTES):
        yield from _joined(nbytes, ranges, view)


def _joined(nbytes: int, ranges: Sequence[Range], view: View) -> Iterator[Buffer]:
    """These ranges, in order: a single one as it is, several as one copy."""
    if len(ranges) == 1:
        yield from view(*_place(ranges[0]))
        return
    block, at = bytearray(nbytes), 0
    for each in ranges:
        for piece in view(*_place(each)):
            block[at : at + len(piece)] = piece
            at += len(piece)
    yield block


def _place(its: Range) -> tuple[int, int, int, int]:
    return its.source, its.region, its.offset, its.nbytes


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Sizes of consecutive chunks, whose frames go to one object."""
    group, total = list[int](), 0
    for nbytes in sizes:
        if group and total + nbytes > OBJECT_BYTES_MAX:
            yield group
            group, total = [], 0
        group.append(nbytes)
        total += nbytes
    if group:
        yield group


def _rest(places: ChunkPlaces, manifest: Manifest, rank: int, view: View) -> Iterator[Buffer]:
    for chunk in manifest.chunks:
        for at, nbytes in places.gaps(chunk.index):
            yield from view(rank, chunk.region, at, nbytes)
