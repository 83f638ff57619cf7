"""What is in an archive: every version whose manifest is visible there, each word of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benches import byte_patterns
from benches.chaos.bench_process import STRIPES
from tensorhub import deltas
from tensorhub.archives.catalogue import VersionCatalogue
from tensorhub.archives.reading import Reader
from tensorhub.archives.store import Store


def read(url: str, model: str) -> Iterator[tuple[int, int, set[int]]]:
    """The number, the shard and its contents, of all lineages. Raises TensorHubError for what
    cannot be read.
    """
    catalogue = VersionCatalogue(Store(url), model).load()
    assert not catalogue.faults, catalogue.faults
    for key, version in catalogue.versions.items():
        with Reader(catalogue, key, deltas.apply) as reader:
            for shard in range(len(version.shards)):
                yield key.number, shard, _contents(reader, shard)


def _contents(reader: Reader, shard: int) -> set[int]:
    manifest = reader.manifest(shard)
    regions = [bytearray(each.nbytes) for each in manifest.regions]
    targets = [
        memoryview(regions[chunk.region])[chunk.offset : chunk.offset + chunk.nbytes]
        for chunk in manifest.chunks
    ]
    reader.read(shard, range(len(targets)), targets)
    tensors = {
        tensor.name: np.frombuffer(
            regions[tensor.region], np.uint64, tensor.nbytes // 8, tensor.offset
        )
        for tensor in manifest.tensors
    }
    return byte_patterns.contents(dict(sorted(tensors.items())), shard, STRIPES)
