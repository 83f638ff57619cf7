"""Targets: what is read out of messages, files, the environment and the store, once its bytes are
there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from tensorhub.coordinator import (
    Coordinator,
    Decision,
    Described,
    Durable,
    Forgotten,
    Pinned,
    Publication,
    Restoration,
    Retention,
    Rollback,
)
from tensorhub.errors import AuthenticationFailed, ManifestMismatch, ProtocolError, StateError
from tensorhub.layouts import Published, Selection
from tensorhub.layouts.columns import pack_all
from tensorhub.memory.checkpoint import (
    FORMAT,
    SUFFIX,
    Checkpoint,
    Index,
    file_name_fault,
    find_files,
)
from tensorhub.memory.file_target import FileTarget, plan
from tensorhub.memory.safetensors import (
    METADATA,
    TORCH_NAMES,
    Header,
    make_header,
    parse_header,
    read_from,
)
from tensorhub.model.compatibility import check_compatible
from tensorhub.model.dtypes import ITEMSIZE
from tensorhub.model.manifest import (
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    Manifest,
    TensorDescription,
    build_manifest,
    id_of,
)
from tensorhub.model.strips import Strip
from tensorhub.protocol.secret import TOKEN_BYTES_MAX, TOKENS_MAX, is_loopback, read_token_file
from tensorhub.runtime.control.store import SqliteStore
from tensorhub.types import (
    OpKey,
    Options,
    check_name,
    check_selector,
    format_address,
    parse_address,
)
from tests.fuzz.protocol import bounded
from tests.fuzz.source import Source

# --------------------------------------------------------------------------------------------------
# manifests

DTYPES = ("uint8", "float32", "qint8", "bits8", "complex128", "nothing")
TENSORS = [
    TensorDescription("a", "float32", (3, 2), 0, 24),
    TensorDescription("b", "uint8", (5000,), 4096, 5000),
    TensorDescription("tied", "float32", (3, 2), 0, 24),
    TensorDescription("none", "bfloat16", (0, 4), 9999, 0),
    TensorDescription("q", "qint8", (4,), 20000, 4, (0.5, -3)),
]
HONEST = build_manifest(TENSORS, 4096, "xxh3-64")
COMPUTED_CHUNKS_MAX = 4096
SMALL_BYTES = 2**20  # of files that are really made


def manifests(data: bytes) -> None:
    """Bytes are the one encoding of a manifest, or a ProtocolError; what a manifest says can be
    relied on.
    """
    source = Source(data)
    blob = source.rest() if source.flag() else _columns(source)
    try:
        with bounded(blob, per_byte=600):
            manifest = Manifest.decode(blob)
    except ProtocolError as error:
        assert len(str(error)) < 1500
        return
    assert manifest.encode() == blob
    assert manifest.chunk_count <= CHUNKS_MAX
    if manifest.chunk_count <= COMPUTED_CHUNKS_MAX:
        _check_grid(manifest)
    with contextlib.suppress(ManifestMismatch):
        check_compatible(manifest, HONEST)
    with contextlib.suppress(ManifestMismatch):
        check_compatible(HONEST, manifest)
    check_compatible(manifest, manifest)
    _fetch_to_files(manifest)


def _columns(source: Source) -> bytes:
    """An encoding whose parts are of the right kinds, with any numbers."""
    count, dimensions = source.below(4), source.below(3)

    def column(items: int) -> bytes:
        return b"".join(
            [
                source.number(0, 2**64 - 1).to_bytes(8, "little")
                for _ in range(items + (source.byte() > 250))
            ]
        )

    names = [source.choice(("a", "b", "../x", "é", "")) for _ in range(count)]
    metadata = _files_said(source) if source.flag() else source.blob(40)
    head = [
        2,
        source.choice(("xxh3-64", "none", "md5")),
        source.choice((4096, 2**20, 2**30, 1)),
        "",
        metadata,
        list(DTYPES),
    ]
    lengths = b"".join([len(name).to_bytes(8, "little") for name in names])
    per_tensor = [
        lengths,
        column(count),
        dimensions.to_bytes(8, "little") * count,
        column(count),
        column(count),
    ]
    per_dimension = [column(count * dimensions) for _ in range(3)]
    if source.flag():  # most tensors are whole, each in a region of its own
        shape = per_dimension[0]
        per_dimension = [shape, bytes(len(shape)), shape]
        per_tensor[3:] = [
            b"".join([index.to_bytes(8, "little") for index in range(count)]),
            bytes(8 * count),
        ]
    quantized = source.below(2)
    packed: bytes = msgpack.packb(
        [
            *head,
            "".join(names),
            column(count),
            *per_tensor,
            *per_dimension,
            *[column(quantized)] * 3,
        ]
    )
    return packed


def _check_grid(manifest: Manifest) -> None:
    assert len(manifest.chunks) == manifest.chunk_count
    at = dict.fromkeys(range(len(manifest.regions)), 0)
    for index, chunk in enumerate(manifest.chunks):
        assert chunk.index == index
        assert chunk.offset == at[chunk.region]
        assert 0 < chunk.nbytes <= manifest.chunk_bytes
        at[chunk.region] += chunk.nbytes
        manifest.tensors_in(index)  # none of padding
    assert [at[index] for index in at] == [region.nbytes for region in manifest.regions]


def _fetch_to_files(manifest: Manifest) -> None:
    """Where a fetch writes what a manifest says, nothing is written but in the directory that was
    asked for.
    """
    for name in ("model.safetensors", None):
        for wanted in (manifest.tensors, manifest.tensors[:1]):
            try:
                files = plan(manifest, wanted, name)
            except ManifestMismatch:
                continue
            said = [*files.headers, *([files.index[0]] if files.index else [])]
            assert all(map(_is_plain, said)), said
            if name is None and len(wanted) == len(manifest.tensors) and files.nbytes < SMALL_BYTES:
                _write(manifest, set(said))


def _write(manifest: Manifest, said: set[str]) -> None:
    with _scratch() as place:
        with FileTarget(place / "out") as target, contextlib.suppress(ManifestMismatch, StateError):
            target.map(manifest)
            target.commit()
            assert {path.name for path in (place / "out").iterdir()} == said
        assert {path.name for path in place.iterdir()} <= {"out"}


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _is_plain(name: str) -> bool:
    return (
        name == os.path.basename(name)
        and name not in ("", ".", "..")
        and "\0" not in name
        and len(os.fsencode(name)) < 256
    )


# --------------------------------------------------------------------------------------------------
# layouts

SIZES = (0, 1, 7, 64, 64, 4096, 2**40)  # of regions
RUNS_WALKED_MAX = 4096
PER_SELECTION = 2**26  # bytes for what a few bytes can say: 2**18 strips, which follow a rule
PER_PUBLICATION = 2**29  # the same for 2**20 shards


def selections(data: bytes) -> None:
    """Bytes are the one encoding of a selection, or a ProtocolError. One without a fault has no
    byte beyond its regions; one with a fault has such a byte.
    """
    source = Source(data)
    blob = source.rest() if source.flag() else _selection_said(source)
    try:
        with bounded(blob, per_byte=600, most=PER_SELECTION):
            parts = Selection.parts_said(blob)
            selection = Selection.decode(blob)
    except ProtocolError as error:
        assert len(str(error)) < 1500
        return
    assert selection.encode() == blob == Selection(tuple(selection.chunks), selection.of).encode()
    assert selection.sizes == Selection(tuple(selection.chunks)).sizes
    assert parts >= sum([strip.length + 1 for chunk in selection.chunks for strip in chunk])
    assert all(0 < size <= CHUNK_BYTES_MAX for size in selection.sizes)
    if len(selection.chunks) > COMPUTED_CHUNKS_MAX:
        return
    for chunk in selection.chunks:
        found = Selection((chunk,)).fault(SIZES)
        if sum(strip.runs for strip in chunk) <= RUNS_WALKED_MAX:
            assert (found is None) == all(_is_within(strip) for strip in chunk)
    each = [Selection((chunk,)).fault(SIZES) for chunk in selection.chunks]
    assert (selection.fault(SIZES) is None) == (not any(each))


def _is_within(strip: Strip) -> bool:
    """Run by run."""
    return all(
        0 <= region < len(SIZES) and offset >= 0 and offset + strip.run <= SIZES[region]
        for region, offset in strip.places()
    )


def _selection_said(source: Source) -> bytes:
    """An encoding whose columns agree about their lengths, with any numbers."""
    counts = [1 + source.below(3) for _ in range(source.below(4))]
    loops = [source.below(3) for _ in range(sum(counts))]

    def numbers(count: int, least: int, most: int) -> list[int]:
        odd = (0, 0, source.number(0, 2**63 - 1), least)
        return [
            source.choice(odd) if source.byte() > 248 else least + source.below(most)
            for _ in range(count)
        ]

    strips = len(loops)
    lengths = [1 if source.flag() else each for each in numbers(strips, 1, 5)]
    steps = [numbers(strips, 0, most) for most in (4, 40)]
    if source.byte() < 230:
        steps = [
            [step * (length != 1) for step, length in zip(each, lengths, strict=True)]
            for each in steps
        ]
    columns = [
        counts,
        numbers(strips, 0, len(SIZES)),
        numbers(strips, 0, 50),
        *steps,
        lengths,
        loops,
        numbers(strips, 1, 10),
        numbers(sum(loops), 2, 3),
        numbers(sum(loops), 0, 20),
    ]
    return pack_all(1, [source.choice(("", "c" * 32, "d" * 65))], columns)


def publications(data: bytes) -> None:
    """Bytes are the one encoding of what was published, or a ProtocolError."""
    source = Source(data)
    blob = source.rest() if source.flag() else _publication_said(source)
    try:
        with bounded(blob, per_byte=600, most=PER_PUBLICATION):
            published = Published.decode(blob)
    except ProtocolError as error:
        assert len(str(error)) < 1500
        return
    assert published.encode() == blob
    assert published.shards
    assert {len(shard) for shard in published.shards} <= {1, 3}
    assert all(published.part_ids)


def _publication_said(source: Source) -> bytes:
    said = [
        source.choice(("a", "b", "c" * 32, "é", "\n", "d" * 65)) for _ in range(1 + source.below(4))
    ]
    ids = list(dict.fromkeys(said))
    counts = [source.choice((1, 3, 3, 3, 1, 2)) for _ in range(source.below(4))]
    numbers = [source.below(len(ids)) + (source.byte() > 250) for _ in range(sum(counts))]
    if source.byte() < 230:  # in order of first use
        order = {number: at for at, number in enumerate(dict.fromkeys(numbers))}
        numbers, ids = [order[number] for number in numbers], ids[: len(order)]
    digest = source.choice(("xxh3-64", "sha-256", "none", "xxh3-64", "md5"))
    return pack_all(
        1,
        [digest, "".join(ids)],
        [[source.choice((4096, 2**23, 2**30, 5))], map(len, ids), counts, numbers],
    )


# --------------------------------------------------------------------------------------------------
# files


def headers(data: bytes) -> None:
    """A file is a whole safetensors file, or a ValueError; its tensors fill it from the first byte
    to the last.
    """
    source = Source(data)
    text = source.rest() if source.flag() else json.dumps(_header_said(source)).encode()
    try:
        with bounded(text, per_byte=600):
            header: Header | None = parse_header(text)
    except ValueError:
        header = None
    if header is not None:
        _check_header(header)
    content = len(text).to_bytes(8, "little") + text
    if header is not None and header.file_bytes < SMALL_BYTES:
        content += bytes(header.file_bytes - header.data_at)
    for said in (content, content[:-1], text):
        with _file(said) as descriptor, contextlib.suppress(ValueError):
            read = read_from(descriptor, Path("its-name"))
            assert read.file_bytes == len(said)


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[int]:
    descriptor = _memory_file()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
    yield descriptor


@functools.cache
def _memory_file() -> int:
    descriptor = os.memfd_create("fuzz")
    os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
    return descriptor


def _check_header(header: Header) -> None:
    end = 0
    for entry in header.entries:
        assert entry.offset == end
        end += entry.nbytes
        assert entry.dtype in ITEMSIZE
    assert all(isinstance(text, str) for text in header.metadata.values())
    try:
        again = parse_header(
            make_header([(e.name, e.dtype, e.shape) for e in header.entries], header.metadata).text
        )
    except (
        ValueError
    ):  # one header says what the format's own library does not write: a tensor of that name
        assert any(entry.name == METADATA for entry in header.entries)
    else:
        assert {(e.name, e.dtype, e.shape) for e in again.entries} == {
            (e.name, e.dtype, e.shape) for e in header.entries
        }


def _header_said(source: Source) -> Any:
    said: dict[str, Any] = {}
    end = 0
    for _ in range(source.below(4)):
        dtype, shape = (
            source.choice((*TORCH_NAMES, "?")),
            [source.number(0, 2**63) for _ in range(source.below(3))],
        )
        start, end = end, end + source.number(0, 2**40)
        if source.flag() and dtype in TORCH_NAMES:
            end = start + functools.reduce(int.__mul__, shape, ITEMSIZE[TORCH_NAMES[dtype]])
        fields: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        if source.byte() > 240:
            fields[source.choice(("dtype", "shape", "data_offsets", "more"))] = _json(source, 3)
        said[source.text(40)] = fields
    if source.flag():
        said[METADATA] = {source.text(10): source.text(10)} if source.flag() else _json(source, 3)
    return said


def _json(source: Source, depth: int) -> Any:
    """Any JSON, shallow; or a text of it that is very deep, as a string would not show."""
    kind = source.below(8)
    if kind < 2 and depth:
        items = [_json(source, depth - 1) for _ in range(source.below(3))]
        return items if kind else {source.text(10): item for item in items}
    return (
        None,
        True,
        1e308,
        -1,
        2**70,
        source.text(20),
        float("inf"),
        source.number(-(2**63), 2**64),
    )[kind]


def checkpoints(data: bytes) -> None:
    """A manifest's metadata tells of files in one directory, or is a ValueError, or nothing; so
    does a model's index.
    """
    source = Source(data)
    metadata = source.rest() if source.flag() else _files_said(source)
    try:
        with bounded(metadata, per_byte=600):
            found = Checkpoint.decode(metadata)
    except ValueError:
        found = None
    if found is not None:
        names = [*found.headers, *([found.index.name] if found.index else [])]
        assert all(map(_is_plain, names)), names
        assert Checkpoint.decode(found.encode()) == found
    with contextlib.suppress(ValueError):
        index = Index.parse("model.safetensors.index.json", metadata)
        assert all(map(_is_plain, index.weight_map.values()))
    with _scratch() as place:
        (place / "model.safetensors.index.json").write_bytes(metadata)
        (place / "model.safetensors").touch()
        for given in (place, place / "model.safetensors.index.json"):
            with contextlib.suppress(ValueError):
                files, _ = find_files(given)
                assert all(file.parent == place for file in files)
    name = source.text(300)
    assert file_name_fault(name, SUFFIX) is not None or _is_plain(name)


def _files_said(source: Source) -> bytes:
    files: list[Any] = []
    weight_map: dict[str, Any] = {}
    for _ in range(source.below(3)):
        said = _header_said(source)
        name: Any = source.choice(
            (
                "model.safetensors",
                "other.safetensors",
                "config.json",
                "../up",
                "/etc/passwd",
                ".hidden",
                "a\0b",
                5,
            )
        )
        files += [name, json.dumps(said).encode() if source.byte() < 240 else _packable(source)]
        weight_map |= dict.fromkeys([key for key in said if key != METADATA], name)
    index: list[Any] = ["", b""]
    if source.flag():
        text = json.dumps({"metadata": {"x": _json(source, 3)}, "weight_map": weight_map})
        depth = source.below(1200) if source.byte() > 200 else 0
        text = text.replace('"x": ', '"x": ' + "[" * depth).replace(
            '}, "weight', "]" * depth + '}, "weight'
        )
        index = [
            source.choice(("i.index.json", "i.json", "../i.index.json", "model.safetensors", 7)),
            text.encode(),
        ]
    if source.byte() > 240:
        return json.dumps({"weight_map": weight_map, "metadata": _json(source, 3)}).encode()
    said = [*index, *files] if source.byte() < 240 else [_packable(source)]
    return FORMAT + b"".join(map(msgpack.packb, said))


def _packable(source: Source) -> Any:
    return source.choice((None, [], {}, [[]], 5, "text", b"{}", msgpack.ExtType(1, b"x")))


# --------------------------------------------------------------------------------------------------
# texts


def texts(data: bytes) -> None:
    """Addresses, selectors, names, hosts and tokens, as users, peers and the environment give
    them.
    """
    source = Source(data)
    given = source.rest()
    text = given.decode("utf-8", "surrogateescape")
    with contextlib.suppress(StateError):
        host, port = parse_address(text)
        assert 0 <= port <= 65_535
        assert parse_address(format_address(host, port)) == (host, port)
    with contextlib.suppress(StateError):
        assert check_name("model", text).isprintable()
    with contextlib.suppress(StateError):
        check_selector(text)
    is_loopback(text)
    with _file(given) as descriptor, contextlib.suppress(AuthenticationFailed):
        secrets = read_token_file(Path(f"/proc/self/fd/{descriptor}"))
        assert 0 < len(secrets) <= TOKENS_MAX
        assert 0 < sum(map(len, secrets)) <= TOKEN_BYTES_MAX
        assert (
            {repr(secret) for secret in secrets}
            == {str(secret) for secret in secrets}
            == {"<Secret: hidden>"}
        )


# --------------------------------------------------------------------------------------------------
# store

KEY = OpKey("actor", "g", 1, 2)
ENTRIES = (
    Publication("actor", 0, 3, "c3", 100, 1, "", KEY),
    Publication("actor", 0, 4, "c4", 100, 2, "tp", KEY),
    Decision(KEY, "actor", 4, "c4", 100, 2),
    Rollback("actor", 1, 3, "ident"),
    Retention("actor", 2),
    Restoration(
        "fresh",
        2,
        9,
        "gone",
        (Publication("fresh", 1, 5, "c5", 100, 1, "", OpKey("fresh", "", 0, 0), b"i" * 32),),
        (b"r" * 32,),
    ),
    Pinned("p1", "worker.1", "actor", 3, "c3"),
    Forgotten("actor", "elsewhere"),
    Described(
        "actor",
        3,
        "c3",
        Published("xxh3-64", 4096, ((id_of(b"manifest"),),)).encode(),
        (b"manifest",),
    ),
)
STATE = "state.sqlite3"


@functools.cache
def _honest_state() -> bytes:
    with _scratch() as place:
        store = SqliteStore(place)
        store.write(ENTRIES)
        store.close()
        return (place / STATE).read_bytes()


def stores(data: bytes) -> None:
    """A coordinator begins on what its store holds, or with a StateError that names the directory:
    whatever was damaged.
    """
    source = Source(data)
    state = bytearray(_honest_state())
    is_raw = source.flag()
    while source and is_raw:
        kind, at = source.byte(), source.below(len(state)) if state else 0
        if kind < 250:
            patch = source.blob(8)
            state[at : at + len(patch)] = patch
        else:
            del state[at:]
    with _scratch() as place:
        (place / STATE).write_bytes(state)
        if not is_raw:
            _overwrite_rows(place / STATE, source)
        try:
            store = SqliteStore(place)
        except StateError as error:
            assert str(place) in str(error)
            return
        try:
            durable = store.read()
        except StateError as error:
            assert str(place) in str(error)
        else:
            _begin_on(store, durable)
        finally:
            store.close()


def _overwrite_rows(path: Path, source: Source) -> None:
    """Other values, also of other types, where a row of any table has some."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        columns = [
            (table, name)
            for (table,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
            ).fetchall()
            for _, name, *_ in db.execute(f"PRAGMA table_info({table})").fetchall()
        ]
        while source:
            table, column = source.choice(columns)
            value = source.choice(
                (
                    source.number(-(2**63), 2**63 - 1),
                    source.text(2000),
                    source.blob(20),
                    0.5,
                    None,
                    "x" * 2000,
                )
            )
            with contextlib.suppress(sqlite3.IntegrityError):
                db.execute(f'UPDATE {table} SET "{column}" = ?', (value,))
        db.commit()


def _begin_on(store: SqliteStore, durable: Durable) -> None:
    made = Coordinator(
        cluster=store.cluster,
        epoch=store.epoch,
        options=Options(),
        ids=lambda: "id",
        now=0.0,
        durable=durable,
    )
    made.check_invariants()
