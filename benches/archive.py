"""How small the archive of a training run is, and how fast any version of it is read.

The model and its training are those of `benches.deltas`, with fewer contexts in a step. Every step
is published as bf16, and archived on an S3 server on loopback (SeaweedFS). `of full copies`: the
bytes of all objects, of as many anchors. Then versions drawn at random are read, in turns with
versions that are anchors (twice: what noise there is), and with the anchor's bytes alone, by the
same client library (`bare`): so many requests at once, as `archives.reading` makes them, or one
request, the faster one. Each read goes into the same touched memory, and is compared whole, by a
digest. Ratios are of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgpack
import xxhash

from benches.comparison.facts import facts
from benches.deltas import published, training_of
from benches.one_to_n import spread
from tensorhub import deltas
from tensorhub.layouts import Published
from tensorhub.model.digests import hasher
from tensorhub.model.manifest import Digest, Manifest, TensorDescription, build_manifest
from tensorhub.types import Options

if TYPE_CHECKING:
    from tensorhub.archives.catalogue import Key, VersionCatalogue
    from tensorhub.archives.store import Store
    from tensorhub.archives.writing import Content

CONTEXTS: Final = 8
MODEL: Final = "actor"
DIGEST: Final[Digest] = "xxh3-64"
WORD: Final = 2  # bytes


@dataclass
class History:
    """A run: its first version, and by chunk what makes each later one of the version before it.
    None: the chunk is equal. `changed`: of each later version, how many words in 100.
    """

    shapes: list[tuple[str, list[int]]]
    first: bytes
    frames: list[list[bytes | None]]
    changed: list[float]

    @cached_property
    def manifest(self) -> Manifest:
        described, at = list[TensorDescription](), 0
        for name, shape in self.shapes:
            nbytes = WORD * prod(shape)
            described.append(TensorDescription(name, "bfloat16", tuple(shape), at, nbytes))
            at += nbytes
        return build_manifest(described, Options().chunk_bytes, DIGEST)

    def chunks(self, memory: bytes | bytearray) -> list[memoryview]:
        """Its chunks, which follow one another in their order."""
        found, at = list[memoryview](), 0
        for nbytes in self.manifest.sizes:
            found.append(memoryview(memory)[at : at + nbytes])
            at += nbytes
        return found

    def versions(self) -> Iterator[bytearray]:
        """Each in turn, in the same memory."""
        memory = bytearray(self.first)
        chunks = self.chunks(memory)
        yield memory
        for frames in self.frames:
            for frame, chunk in zip(frames, chunks, strict=True):
                make(frame, chunk)
            yield memory

    @classmethod
    def trained(cls, learning_rate: float, contexts: int, steps: int) -> History:
        import numpy as np

        found: History | None = None
        before = b""
        for parameters in islice(training_of(learning_rate, contexts), steps):
            after = b"".join(published([*parameters.values()], "bf16"))
            if found is None:
                shapes = [(name, list(each.shape)) for name, each in parameters.items()]
                found = cls(shapes, after, [], [])
            else:
                pairs = zip(found.chunks(before), found.chunks(after), strict=True)
                found.frames.append([frame_of(old, new) for old, new in pairs])
                words = np.frombuffer(before, np.uint16) != np.frombuffer(after, np.uint16)
                found.changed.append(100 * np.count_nonzero(words) / words.size)
            before = after
        assert found is not None
        return found

    @classmethod
    def random(cls, mebibytes: int) -> History:
        """One version of random words."""
        shapes = [(f"layers.{number}.weight", [1024, 512]) for number in range(mebibytes)]
        return cls(shapes, os.urandom(mebibytes * 2**20), [], [])

    def save(self, file: Path) -> None:
        file.write_bytes(msgpack.packb([self.shapes, self.first, self.frames, self.changed]))

    @classmethod
    def load(cls, file: Path) -> History:
        return cls(*msgpack.unpackb(file.read_bytes()))


def frame_of(old: memoryview, new: memoryview) -> bytes | None:
    if xxhash.xxh3_64_digest(old) == xxhash.xxh3_64_digest(new):
        return None
    return deltas.encode(old, new, WORD) or bytes(new)


def make(frame: bytes | None, chunk: memoryview) -> None:
    if frame is not None and len(frame) == chunk.nbytes:
        chunk[:] = frame
    elif frame is not None:
        deltas.apply([frame], chunk)


# --------------------------------------------------------------------------------------------------
# writing


@dataclass
class Archived:
    """`digests`: of all of each version. `seconds`: of each version, by whether it is an anchor."""

    catalogue: VersionCatalogue
    nbytes: int
    digests: list[bytes]
    seconds: dict[bool, list[float]]

    @property
    def anchors(self) -> list[Key]:
        return [key for key, each in self.catalogue.versions.items() if each.anchor is not None]


def archived(history: History, store: Store) -> Archived:
    from tensorhub.archives.catalogue import Key
    from tensorhub.archives.chains import base_for
    from tensorhub.archives.writing import Archive

    archive = Archive(store, MODEL, "cluster", "bench")
    found = Archived(archive.catalogue, 0, [], {True: [], False: []})
    key, kept = Key(0, 0), dict[Key, bytes]()
    for number, memory in enumerate(history.versions(), 1):
        before, key = key, Key(0, number)
        content = _content(history, memory, key, before if number > 1 else None)
        began, base = time.perf_counter(), base_for(archive.catalogue, key)
        if base is None:
            archive.add_anchor(content, partial(_view, history, memory))
        else:
            pairs = zip(history.chunks(kept[base]), history.chunks(memory), strict=True)
            archive.add_delta(content, base, [[frame_of(old, new) for old, new in pairs]])
        found.seconds[base is None].append(time.perf_counter() - began)
        found.digests.append(xxhash.xxh3_128_digest(memory))
        anchor = archive.catalogue.chain(key)[0].key
        kept = {each: copy for each, copy in kept.items() if each == anchor} | {key: bytes(memory)}
    found.nbytes = sum(each.nbytes for each in store.objects(MODEL))
    archive.close()
    return found


def _content(history: History, memory: bytearray, key: Key, after: Key | None) -> Content:
    from tensorhub.archives.writing import Content

    manifest = history.manifest
    digests = list[bytes]()
    for chunk in history.chunks(memory):
        digest = hasher(DIGEST)
        digest.update(chunk)
        digests.append(digest.digest())
    published = Published(DIGEST, manifest.chunk_bytes, ((manifest.manifest_id,),))
    return Content(
        key,
        f"content {key}",
        manifest.nbytes,
        "layout",
        published,
        {manifest.manifest_id: manifest.encode()},
        [manifest],
        [b"".join(digests)],
        after,
    )


def _view(
    history: History, memory: bytearray, rank: int, region: int, offset: int, nbytes: int
) -> Iterator[memoryview]:
    start = sum(each.nbytes for each in history.manifest.regions[:region]) + offset
    yield memoryview(memory)[start : start + nbytes]


# --------------------------------------------------------------------------------------------------
# reading


def read(archive: Archived, history: History, key: Key, memory: bytearray) -> float:
    """Seconds of a version, from its chain's tables on."""
    from tensorhub.archives.reading import Reader

    chunks = history.chunks(memory)
    began = time.perf_counter()
    with Reader(archive.catalogue, key, deltas.apply) as reader:
        reader.read(0, range(len(chunks)), chunks)
        took = time.perf_counter() - began
    if xxhash.xxh3_128_digest(memory) != archive.digests[key.number - 1]:
        raise RuntimeError(f"version {key} was read as another one")
    return took


def read_barely(archive: Archived, key: Key) -> float:
    """Seconds of the files of an anchor, in memory of the client library."""
    from tensorhub.archives.reading import REQUEST_BYTES, REQUESTS_AT_ONCE

    catalogue = archive.catalogue
    anchor = catalogue.versions[key].anchor
    assert anchor is not None
    files = [(catalogue.at(f"{anchor.directory}/{k}"), size) for k, size in anchor.files.items()]
    requests = [
        (path, (at, min(REQUEST_BYTES, size - at)))
        for path, size in files
        for at in range(0, size, REQUEST_BYTES)
    ]
    took = list[float]()
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for wanted in (requests, [(path, (0, size)) for path, size in files]):
            began = time.perf_counter()
            list(pool.map(lambda each: catalogue.store.ranges(each[0], [each[1]]), wanted))
            took.append(time.perf_counter() - began)
    return min(took)


def reads(archive: Archived, history: History, rounds: int) -> list[dict[str, Any]]:
    """The first round does not count."""
    drawn, memory = random.Random(1), bytearray(history.manifest.nbytes)
    figures = list[dict[str, Any]]()
    for number in range(rounds + 1):
        key, anchor = drawn.choice([*archive.catalogue.versions]), drawn.choice(archive.anchors)
        ways: dict[str, Callable[[], float]] = {
            "version": partial(read, archive, history, key, memory),
            "full": partial(read, archive, history, anchor, memory),
            "full again": partial(read, archive, history, anchor, memory),
            "bare": partial(read_barely, archive, anchor),
        }
        order = list(ways) if number % 2 else list(ways)[::-1]
        seconds = {way: ways[way]() for way in order}
        links = len(archive.catalogue.chain(key)) - 1
        figures.append({"version": str(key), "deltas": links, "seconds": seconds})
    return figures[1:]


def row_of(
    learning_rate: float, history: History, archive: Archived, figures: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    seconds = [each["seconds"] for each in figures]
    slower, noise = (
        sorted(each[way] / each["full"] for each in seconds) for way in ("version", "full again")
    )
    steps, nbytes = len(archive.digests), history.manifest.nbytes
    return {
        "lr": learning_rate,
        "versions": steps,
        "changed %": spread(history.changed) if history.changed else None,
        "anchors": len(archive.anchors),
        "of full copies": round(archive.nbytes / (steps * nbytes), 4),
        "version of full": spread(slower),
        "version of full, p95": round(slower[int(0.95 * (len(slower) - 1))], 3),
        "full again of full": spread(noise),
        "full again of full, p95": round(noise[int(0.95 * (len(noise) - 1))], 3),
        "full of bare": spread([each["bare"] / each["full"] for each in seconds]),
        "full GiB/s": spread([nbytes / 2**30 / each["full"] for each in seconds]),
        "archived s": {
            "anchor" if is_anchor else "delta": round(statistics.median(its), 3)
            for is_anchor, its in archive.seconds.items()
            if its
        },
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches archive", description=__doc__)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6])
    parser.add_argument("--steps", type=int, default=100, help="versions")
    parser.add_argument("--contexts", type=int, default=CONTEXTS, help="of a step")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--history", type=Path, help="a directory that keeps what was trained")
    parser.add_argument(
        "--random", type=int, metavar="MIB", help="read one version of random words"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if min(options.steps, options.contexts, options.rounds) < 1:
        parser.error("give at least 1 step, context and round")
    if fault := deltas.fault_here():
        parser.error(fault)
    from tensorhub.archives.store import Store
    from tests.archives.servers import CannotStart, seaweedfs

    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    rows = []
    with ExitStack() as stack:
        try:
            server = stack.enter_context(seaweedfs())
        except CannotStart as error:
            print(f"skipped: {error}")
            return 0
        for learning_rate in options.lr[: 1 if options.random else None]:
            history = (
                History.random(options.random)
                if options.random
                else _history(learning_rate, options.contexts, options.steps, options.history)
            )
            store = Store(f"{server.url}/{learning_rate}", options=server.options)
            archive = archived(history, store)
            figures = reads(archive, history, options.rounds)
            rows.append(row_of(learning_rate, history, archive, figures) | {"reads": figures})
            print("  ".join(f"{k}: {v}" for k, v in rows[-1].items() if k != "reads"), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": known, "rows": rows}) + "\n")
    return 0


def _history(learning_rate: float, contexts: int, steps: int, directory: Path | None) -> History:
    if directory is None:
        return History.trained(learning_rate, contexts, steps)
    file = directory / f"{learning_rate}-{contexts}-{steps}"
    if not file.exists():
        History.trained(learning_rate, contexts, steps).save(file)
    return History.load(file)
