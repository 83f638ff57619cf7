"""Which versions an archive has: one manifest for each.

    Key                (lineage, number): the order of versions
    Version            what a manifest says: content, lineage, shards, and where the bytes are
    VersionCatalogue   reads manifests; what it finds is hostile, and checked before it is used

A version is visible from the atomic creation of its manifest on, which comes after all of its
objects. A version that is stored anew, as an anchor, gets a newer manifest (`turn` 1, 2, ...),
which replaces the older manifest.

A delta's base comes before it in the order of keys, so no chain has a circle, whatever is written.

Responsible for these values, their encoding, and their checks. Not responsible for tensors' bytes
(`writing`, `reading`), nor for which versions stay (`retention`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, NamedTuple, NoReturn, get_args

from tensorhub.archives.store import Store
from tensorhub.archives.store_faults import MissingObject
from tensorhub.errors import (
    IntegrityError,
    ProtocolError,
    StateError,
    VersionUnavailable,
    shown,
    some,
)
from tensorhub.layouts.published import Published
from tensorhub.memory.checkpoint import SUFFIX, file_name_fault
from tensorhub.memory.json_pieces import Pieces
from tensorhub.model.digests import WIDTHS
from tensorhub.model.dtypes import INT_MAX
from tensorhub.model.manifest import CHUNK_BYTES_MAX, CHUNKS_MAX, Digest, Manifest, id_of
from tensorhub.types import VersionInfo

FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 4 * 2**20
SHARDS_MAX: Final = 2**14
FILES_MAX: Final = 4096  # of one anchor, and of one shard's frames
CHAIN_MAX: Final = 64  # versions from an anchor to the version that is read
TURN_MAX: Final = 10**6
VERSIONS_MAX: Final = 10**5  # manifests of one model
MANIFESTS_BYTES_MAX: Final = 2**30  # of all of them
PARTS_BYTES_MAX: Final = 2**30  # that are kept for the next version; of one publication
READS_AT_ONCE: Final = 16
FRAME_LENGTH_BYTES: Final = 4  # of the length of a frame
LEFTOVER_AGE: Final = timedelta(hours=24)

_ID: Final = re.compile(r"[0-9a-f]{32}")
_PATH: Final = re.compile(r"(anchors|data)/[0-9]+-[0-9]+-[0-9a-f]{16}")
_MANIFEST: Final = re.compile(r"versions/([0-9]{20})-([0-9]{20})\.([0-9]{7})\.json")


class Key(NamedTuple):
    """One version: its lineage and its number. Later lineages and numbers are greater."""

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}-{self.number}"


@dataclass(frozen=True, slots=True)
class Anchor:
    """A whole version as a checkpoint. `files`: bytes of the files with tensors. `beside`: bytes of
    the index, config.json and the like.
    """

    directory: str
    files: Mapping[str, int]
    beside: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """`manifest`: the id of its encoded manifest, a part. `chunks`: their number. `frames`: the
    sizes of the objects with its frames, in order; 0: there is no object. `rest`: with an anchor,
    how many of its bytes no checkpoint can hold.
    """

    manifest: str
    chunks: int
    frames: tuple[int, ...] = ()
    rest: int = 0


@dataclass(frozen=True)
class Version:
    """What a manifest says. `after`: the version that was published before it in this model, if the
    archive knows. Either `anchor` is there or `base` is, the version that the frames start from.
    `layout_id`: as the coordinator names the layout in which it was published.

    `data`: the directory of `index` and frames. `index_id`: the hash of the object `index`, which
    has for each shard the digests of its chunks, then, with a base, the lengths of their frames.
    """

    model: str
    key: Key
    content_id: str
    nbytes: int
    digest: Digest
    publication: str
    layout_id: str
    shards: tuple[Shard, ...]
    data: str
    index_id: str
    after: Key | None = None
    base: Key | None = None
    anchor: Anchor | None = None
    turn: int = 0

    @property
    def info(self) -> VersionInfo:
        """As callers and the coordinator know it."""
        place = self.nbytes, len(self.shards), self.key.lineage
        return VersionInfo(self.model, self.key.number, self.content_id, *place)

    @property
    def path(self) -> str:
        """Of its manifest."""
        return f"versions/{self.key.lineage:020d}-{self.key.number:020d}.{self.turn:07d}.json"

    @property
    def index(self) -> str:
        return f"{self.data}/index"

    @property
    def index_bytes(self) -> int:
        length = FRAME_LENGTH_BYTES if self.base is not None else 0
        return sum(shard.chunks for shard in self.shards) * (WIDTHS[self.digest] + length)

    def frames(self, shard: int, part: int) -> str:
        """An object with frames of a shard."""
        return f"{self.data}/frames-{shard}-{part}"

    def rest(self, shard: int) -> str:
        return f"{self.data}/rest-{shard}"

    @cached_property
    def own_objects(self) -> Mapping[str, int]:
        """Objects that no other version uses, and their bytes."""
        found = {self.index: self.index_bytes}
        for number, shard in enumerate(self.shards):
            sizes = {self.frames(number, part): size for part, size in enumerate(shard.frames)}
            sizes[self.rest(number)] = shard.rest
            found |= {path: size for path, size in sizes.items() if size}
        if self.anchor is not None:
            named = [*self.anchor.files.items(), *self.anchor.beside.items()]
            found |= {f"{self.anchor.directory}/{name}": size for name, size in named}
        return found

    @property
    def parts(self) -> frozenset[str]:
        """The ids of the parts that this manifest names; the publication names more."""
        return frozenset([self.publication, *(shard.manifest for shard in self.shards)])

    def encode(self) -> bytes:
        said = asdict(self)
        for name in ("key", "after", "base"):
            said[name] = said[name] and list(said[name])
        text = json.dumps({"format": FORMAT, **said}, separators=(",", ":"))
        if len(text) > MANIFEST_BYTES_MAX:
            raise StateError(
                f"version {self.key} of {self.model!r} has too many shards to be archived"
            )
        return text.encode()


# --------------------------------------------------------------------------------------------------
# checks


def decode(text: bytes) -> Version:
    """What a manifest says. ValueError, with the reason, for anything that no archive writes."""
    if len(text) > MANIFEST_BYTES_MAX:
        raise ValueError(f"it has more than {MANIFEST_BYTES_MAX} bytes")
    pieces = Pieces(text, "it")
    said = Fields(pieces.value(MANIFEST_BYTES_MAX))
    pieces.end()
    if (form := said.whole("format", 10**6)) != FORMAT:
        raise ValueError(f"its format {form} is unknown to this version of TensorHub")
    key = said.key("key")
    model, digest = said.text("model", 512), said.text("digest", 16)
    if not model.isprintable() or digest not in get_args(Digest):
        raise ValueError("its model or its digest is none")
    shards = tuple([_shard(Fields(each)) for each in said.items("shards", SHARDS_MAX)])
    base, after = said.key("base", or_none=True), said.key("after", or_none=True)
    anchor = said.take("anchor")
    version = Version(
        model,
        key,
        said.text("content_id", 64),
        said.whole("nbytes"),
        digest,  # type: ignore[arg-type]  # checked above
        said.matched("publication", _ID),
        said.text("layout_id", 512),
        shards,
        said.matched("data", _PATH),
        said.matched("index_id", _ID),
        after,
        base,
        None if anchor is None else _anchor(Fields(anchor)),
        said.whole("turn", TURN_MAX),
    )
    said.end()
    if not shards or (base is None) == (version.anchor is None):
        raise ValueError("it has no shard, or not exactly one of an anchor and a base")
    if any(shard.frames if base is None else shard.rest for shard in shards):
        raise ValueError("it has frames without a base, or a rest without an anchor")
    if sum(shard.chunks for shard in shards) > CHUNKS_MAX:
        raise ValueError(f"its shards have more than {CHUNKS_MAX} chunks")
    if any(each is not None and each >= key for each in (base, after)):
        raise ValueError("it follows a version that comes later")
    return version


def _shard(said: Fields) -> Shard:
    frames = tuple([_whole(each) for each in said.items("frames", FILES_MAX)])
    chunks = said.whole("chunks", CHUNKS_MAX)
    shard = Shard(said.matched("manifest", _ID), chunks, frames, said.whole("rest"))
    said.end()
    if sum(frames) > chunks * CHUNK_BYTES_MAX:
        raise ValueError("a shard has more bytes of frames than its chunks can have")
    return shard


def _anchor(said: Fields) -> Anchor:
    anchor = Anchor(said.matched("directory", _PATH), said.sizes("files"), said.sizes("beside"))
    said.end()
    for name in [*anchor.files, *anchor.beside]:
        if fault := file_name_fault(name, SUFFIX if name in anchor.files else ""):
            raise ValueError(f"a file cannot be called {name[:64]!r}: {fault}")
    if anchor.files.keys() & anchor.beside.keys():
        raise ValueError("its anchor has a file twice")
    return anchor


class Fields:
    """An object of JSON, of which each field is taken once, checked."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            _no("an object is none")
        self._rest: dict[str, Any] = dict(value)

    def take(self, name: str) -> Any:
        if name not in self._rest:
            _no(f"{name} is missing")
        return self._rest.pop(name)

    def whole(self, name: str, most: int = INT_MAX) -> int:
        return _whole(self.take(name), most)

    def text(self, name: str, most: int) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
            _no(f"{name} is no text of 1 to {most} characters")
        return value

    def matched(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self.text(name, 128)
        if pattern.fullmatch(value) is None or not value.isascii():
            _no(f"{name} is not of its form")
        return value

    def items(self, name: str, most: int) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list) or len(value) > most:
            _no(f"{name} is no list of at most {most}")
        return value

    def sizes(self, name: str) -> dict[str, int]:
        value = self.take(name)
        if not isinstance(value, dict) or len(value) > FILES_MAX:
            _no(f"{name} tells of no files, or of too many")
        return {file: _whole(size) for file, size in value.items()}

    def key(self, name: str, *, or_none: bool = False) -> Any:
        value = self.take(name)
        if value is None and or_none:
            return None
        if not isinstance(value, list) or len(value) != 2:
            _no(f"{name} is no version")
        return Key(*map(_whole, value))

    def end(self) -> None:
        if self._rest:
            _no(f"it says more than it can: {some([*map(repr, self._rest)], most=3)[:200]}")


def _whole(value: object, most: int = INT_MAX) -> int:
    if type(value) is not int or not 0 <= value <= most:
        _no(f"{shown(value)} is no whole number up to {most}")
    return value


def _no(why: str) -> NoReturn:
    raise ValueError(why)


# --------------------------------------------------------------------------------------------------
# reading


def directory_of(model: str) -> str:
    """Where a model's versions are: models have different directories, and plain names keep
    theirs.
    """

    def escaped(found: re.Match[str]) -> str:
        return "".join([f"={byte:02X}" for byte in found[0].encode()])

    path = re.sub(r"[^A-Za-z0-9._-]", escaped, model)
    if len(path) <= 100 and not path.startswith("."):
        return path
    name = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
    return f"{path[:100].lstrip('.')}={name}"


class VersionCatalogue:
    """The versions of one model in a store. `faults`: a sentence for each manifest that is
    none.
    """

    def __init__(self, store: Store, model: str) -> None:
        self.store, self.model, self._at = store, model, directory_of(model)
        self.versions: dict[Key, Version] = {}  # those that count
        self.replaced: list[Version] = []  # those with a newer turn
        self.faults: list[str] = []
        self._paths: set[str] = set()  # of manifests that were read, or found faulty
        self._faults: dict[str, str] = {}
        self._parts: dict[str, bytes] = {}
        self._parts_bytes = 0
        self._values: dict[str, Any] = {}  # that parts encode: versions share most of them
        self.wholes: dict[str, object] = {}  # a `Whole` by its publication's id, of readers

    def __repr__(self) -> str:
        return (
            f"<VersionCatalogue of {self._at} at {self.store.url}: {len(self.versions)} versions>"
        )

    def at(self, path: str) -> str:
        """The path of an object in the store."""
        return f"{self._at}/{path}"

    def name(self, path: str) -> str:
        """How errors name an object."""
        return self.store.name(self.at(path))

    def load(self) -> VersionCatalogue:
        """Read the manifests that are there now and were not read before. IntegrityError: they are
        more than all bounds.
        """
        sizes = self._listed()
        paths = sizes.keys()
        known = [*self.versions.values(), *self.replaced]
        found = {each.path: each for each in known if each.path in paths}
        if sum(sizes.values()) > MANIFESTS_BYTES_MAX:
            raise IntegrityError(
                f"{self.name('versions')} has more than {MANIFESTS_BYTES_MAX} bytes: delete what "
                f"is not TensorHub's, or keep fewer versions"
            )
        new = sorted(paths - self._paths)
        with ThreadPoolExecutor(READS_AT_ONCE, "tensorhub-archive") as pool:
            for path, version in zip(
                new, pool.map(self._read, new, map(sizes.__getitem__, new)), strict=True
            ):
                if isinstance(version, Version):
                    found[path] = version
                elif version is not None:
                    self._faults[path] = f"{self.name(path)} is no manifest of a version: {version}"
        self._paths.update(new)
        self._paths &= paths
        self.faults = [each for path, each in self._faults.items() if path in paths]
        versions: dict[Key, Version] = {}
        replaced = []
        for path in sorted(found, reverse=True):  # the highest turn first
            version = found[path]
            if versions.setdefault(version.key, version) is not version:
                replaced.append(version)
        # at once, because other threads read them
        self.versions, self.replaced = dict(sorted(versions.items())), replaced
        return self

    def find(self, key: Key, *, alone: bool = False) -> None:
        """Instead of `load`: read the manifests of that version and of those that it is based on
        (not if `alone`), and no others.
        """
        newest: dict[Key, str] = {}
        for path in self._listed():
            if said := _MANIFEST.fullmatch(path):
                its = Key(int(said[1]), int(said[2]))
                newest[its] = max(path, newest.get(its, ""))
        found: dict[Key, Version] = {}
        wanted: Key | None = key
        while wanted is not None and wanted in newest and len(found) <= CHAIN_MAX:
            version = self._read(newest[wanted])
            if not isinstance(version, Version):
                why = version or "another process has deleted it"
                raise IntegrityError(f"{self.name(newest[wanted])} is no manifest: {why}")
            found[wanted] = version
            wanted = None if alone else version.base
        self.versions = found

    def _listed(self) -> dict[str, int]:
        """The paths of manifests, and of what is among them, and their bytes."""
        listed = self.store.objects(self.at("versions"), VERSIONS_MAX)
        return {each.path.removeprefix(f"{self._at}/"): each.nbytes for each in listed}

    def _read(self, path: str, nbytes: int = MANIFEST_BYTES_MAX) -> Version | str | None:
        """A version, or why the object is none; None: it was deleted since it was listed."""
        try:
            version = decode(self.store.read(self.at(path), min(nbytes, MANIFEST_BYTES_MAX)))
        except MissingObject:
            return None
        except (ValueError, IntegrityError) as error:
            return str(error)
        if version.path != path or version.model != self.model:
            return f"it tells of version {version.key} of {version.model!r}"
        return version

    @property
    def effective(self) -> list[Version]:
        """The versions that no rollback has made invalid, ascending: a number of a later lineage
        replaces that number and all above it.
        """
        found: list[Version] = []
        for key in sorted(self.versions, reverse=True):
            if not found or key.number < found[-1].key.number:
                found.append(self.versions[key])
        return found[::-1]

    def chain(self, key: Key) -> list[Version]:
        """From an anchor to this version. VersionUnavailable: there is no such version.
        IntegrityError: one that it is based on is not there, or there are too many.
        """
        if key not in self.versions:
            raise VersionUnavailable(
                f"{self.store.url} has no version {key} of {self.model!r}; it has "
                f"{some([*map(str, self.versions)], most=5) or 'none'}",
                retryable=False,
            )
        found = [self.versions[key]]
        while (base := found[-1].base) is not None:
            if base not in self.versions:
                raise IntegrityError(
                    f"version {found[-1].key} of {self.model!r} in {self.store.url} is based on "
                    f"{base}, of which the manifest is missing: another process has deleted it"
                )
            if len(found) == CHAIN_MAX:
                raise IntegrityError(f"version {key} of {self.model!r} is based on too many others")
            found.append(self.versions[base])
        return found[::-1]

    def part(self, part_id: str) -> bytes:
        """A part by its id. IntegrityError: it is not what its id names, or is missing."""
        if (blob := self._parts.get(part_id)) is None:
            path = f"parts/{part_id}"
            blob = self.store.read(self.at(path))
            if id_of(blob) != part_id:
                raise self.changed(path)
            if self._parts_bytes + len(blob) > PARTS_BYTES_MAX:
                for kept in (self._parts, self._values, self.wholes):
                    kept.clear()
                self._parts_bytes = 0
            self._parts[part_id] = blob
            self._parts_bytes += len(blob)
        return blob

    def parts(self, version: Version) -> dict[str, bytes]:
        """All parts that its publication names. IntegrityError, as above; or they have too many
        bytes.
        """
        found, size = dict[str, bytes](), 0
        for each in self.published(version).part_ids:
            if each not in found:
                found[each] = self.part(each)
                size += len(found[each])
            if size > PARTS_BYTES_MAX:
                raise IntegrityError(
                    f"{self.name(f'parts/{version.publication}')} names parts of more than "
                    f"{PARTS_BYTES_MAX} bytes: it is not what TensorHub wrote"
                )
        return found

    def manifest(self, version: Version, shard: int) -> Manifest:
        """A shard's manifest. IntegrityError: it is none, or not that of this version."""
        said = version.shards[shard]
        manifest: Manifest = self._decoded(said.manifest, Manifest.decode)
        if (manifest.digest, manifest.chunk_count) != (version.digest, said.chunks):
            raise self.changed(version.path)
        return manifest

    def published(self, version: Version) -> Published:
        """How the version was published. IntegrityError, as above."""
        published: Published = self._decoded(version.publication, Published.decode)
        if len(published.shards) != len(version.shards):
            raise self.changed(version.path)
        return published

    def _decoded(self, part_id: str, decode_: Any) -> Any:
        if (value := self._values.get(part_id)) is None:
            try:
                value = decode_(self.part(part_id))
            except ProtocolError as error:
                raise IntegrityError(f"{self.name(f'parts/{part_id}')}: {error}") from None
            self._values[part_id] = value
        return value

    def tables(self, version: Version) -> list[tuple[bytes, bytes]]:
        """Of each shard: its digests, and the lengths of its frames (none for an anchor)."""
        text = self.store.read(self.at(version.index), version.index_bytes)
        if (len(text), id_of(text)) != (version.index_bytes, version.index_id):
            raise self.changed(version.index)
        width, at = WIDTHS[version.digest], 0
        each = FRAME_LENGTH_BYTES if version.base is not None else 0
        found = []
        for shard in version.shards:
            middle = at + shard.chunks * width
            end = middle + shard.chunks * each
            found.append((text[at:middle], text[middle:end]))
            at = end
        return found

    def changed(self, path: str) -> IntegrityError:
        return IntegrityError(
            f"{self.name(path)} is not what TensorHub wrote there: it was damaged, or changed by "
            f"another process"
        )


# --------------------------------------------------------------------------------------------------
# deleting


def check_whole(catalogue: VersionCatalogue) -> None:
    """IntegrityError if a manifest cannot be read: it may name objects that would be deleted."""
    if catalogue.faults:
        raise IntegrityError(
            f"nothing is deleted from {catalogue.store.url}, because it is not known what these "
            f"need: restore them, or delete them: {some(catalogue.faults, '; ', most=3)}"
        )


def leftovers(catalogue: VersionCatalogue, age: timedelta = LEFTOVER_AGE) -> list[str]:
    """Objects that no visible version uses, and that are older than this: what writers left that
    died. Paths as in the store. Ages are by the server's clock alone. The catalogue is loaded.
    IntegrityError, as `check_whole`.
    """
    check_whole(catalogue)
    store, used = catalogue.store, set[str]()
    for version in [*catalogue.versions.values(), *catalogue.replaced]:
        used.update(map(catalogue.at, version.own_objects))
        used.update(catalogue.at(f"parts/{each}") for each in parts_of(catalogue, version))
    before = store.now() - age
    found = []
    for directory in ("anchors", "data", "parts"):
        stored = [
            *store.objects(catalogue.at(directory)),
            *store.unfinished(catalogue.at(directory)),
        ]
        found += [each.path for each in stored if each.path not in used and each.modified < before]
    return found


def parts_of(catalogue: VersionCatalogue, version: Version) -> Iterable[str]:
    """The ids of all parts of a version."""
    return {*version.parts, *catalogue.published(version).part_ids}
