"""A version as an ordinary Hugging Face checkpoint, and where each published chunk lies in it.

    model-00001-of-00002.safetensors     whole tensors, as any program reads them
    model.safetensors.index.json         which tensor is in which file
    config.json, ...                     files that the publisher gave along
    rest                                 bytes of a shard that no checkpoint can hold: padding between rows, tensors of
                                         dtypes without a name there, tensors that are local to a rank

The checkpoint is one more layout of the model: all of it, on one rank. So a file is written as a
reader of that layout from the published shards would fill its memory, and a chunk is found as a
reader of the published layout would find it in the files (`layouts.ranges`). Of tied tensors one is
in a file.

Responsible for these two directions. Not responsible for moving bytes (`writing`, `reading`).
"""  # noqa: E501 - a table

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from tensorhub.errors import StateError
from tensorhub.layouts import (
    Coordinates,
    Declaration,
    Publication,
    Published,
    arrange,
    coordinates_of,
)
from tensorhub.layouts.ranges import Range, Ranges
from tensorhub.layouts.whole import whole_manifest
from tensorhub.memory.safetensors import FILE_NAMES, METADATA, Header, make_header
from tensorhub.model.manifest import Manifest

# of one file, if no tensor is larger: what Hugging Face's library writes
FILE_BYTES: Final = 5 * 10**9
INDEX: Final = "model.safetensors.index.json"
REST: Final = -1  # stands for a file


class Place(NamedTuple):
    """Bytes of a chunk: in which file (REST: in the shard's rest), from which byte on."""

    file: int
    offset: int
    nbytes: int


class Whole:
    """The whole model as one rank's memory: those of its tensors that a checkpoint can hold."""

    def __init__(self, published: Published, publication: Publication) -> None:
        self.publication, catalogue = publication, publication.catalogue
        self.names = tuple(
            [
                name
                for number, name in enumerate(catalogue.names)
                if name not in catalogue.local_names
                and catalogue.kind(number).dtype in FILE_NAMES
                and name != METADATA
            ]
        )
        self.manifest = whole_manifest(published, publication, self.names)
        self.coordinates = coordinates_of(self.manifest, Declaration())

    def shard(self, rank: int) -> Coordinates:
        """What a rank holds of these tensors."""
        names = set(self.names)
        pieces = [each for each in self.publication.ranks[rank].pieces() if each.name in names]
        return arrange(pieces, self.coordinates.catalogue)


# --------------------------------------------------------------------------------------------------
# writing


@dataclass(frozen=True)
class Files:
    """The files to write. `headers`: by name. `regions`: of each tensor in them, its region in the
    whole model.
    """

    whole: Whole
    headers: Mapping[str, Header]
    regions: Mapping[str, int]

    @cached_property
    def _ranges(self) -> Ranges:
        classes = self.whole.publication.classes
        return Ranges(self.whole.coordinates, [each.coordinates for each in classes])

    @property
    def index(self) -> bytes:
        """The text of the index."""
        weight_map = {e.name: file for file, header in self.headers.items() for e in header.entries}
        total = sum(entry.nbytes for header in self.headers.values() for entry in header.entries)
        said = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(said, indent=2) + "\n").encode()

    def pieces(self, file: str, bytes_max: int) -> Iterator[tuple[int, list[Range]]]:
        """What a file consists of behind its header, in order: at most so many bytes at a time, and
        where they are. A range's source is a rank.
        """
        ranks = [each.ranks[0] for each in self.whole.publication.classes]
        for entry in self.headers[file].entries:
            for at in range(0, entry.nbytes, bytes_max):
                nbytes = min(bytes_max, entry.nbytes - at)
                found = self._ranges.find(self.regions[entry.name], at, nbytes)
                yield nbytes, [each._replace(source=ranks[each.source]) for each in found]


def files_of(whole: Whole, file_bytes: int = FILE_BYTES) -> Files:
    """The files of a checkpoint, with as many tensors in each as it can take, in the published
    order. StateError: the format cannot say these tensors.
    """
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    size, regions, seen = 0, dict[str, int](), set[int]()
    for tensor in whole.manifest.tensors:
        if tensor.region in seen:
            continue
        seen.add(tensor.region)
        if groups[-1] and size + tensor.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append((tensor.name, tensor.dtype, tensor.shape))
        size += tensor.nbytes
        regions[tensor.name] = tensor.region
    count = len(groups)
    try:
        headers = {
            f"model-{number:05d}-of-{count:05d}.safetensors": make_header(group, {"format": "pt"})
            for number, group in enumerate(groups, 1)
            if group
        }
    except ValueError as error:
        raise StateError(f"this model cannot be archived as a checkpoint: {error}") from None
    return Files(whole, headers, regions)


# --------------------------------------------------------------------------------------------------
# reading


class ChunkPlaces:
    """Where each chunk of one published shard is, given the headers of an anchor's files."""

    def __init__(
        self, whole: Whole, headers: Sequence[Header], manifest: Manifest, rank: int
    ) -> None:
        self._manifest = manifest
        self._ranges = Ranges(whole.shard(rank), [whole.coordinates])
        specs = {tensor.name: tensor for tensor in whole.manifest.tensors}
        self._region: dict[int, tuple[int, int]] = {}  # file and offset of each of the whole's
        for file, header in enumerate(headers):
            for entry in header.entries:
                spec = specs.get(entry.name)
                if spec is not None and (spec.dtype, spec.shape) == (entry.dtype, entry.shape):
                    self._region[spec.region] = file, header.data_at + entry.offset
        self.missing = [
            tensor.name
            for tensor in whole.manifest.tensors
            if tensor.nbytes and tensor.region not in self._region
        ]

    @property
    def rest_bytes(self) -> int:
        """Bytes of the shard that are in no file."""
        return self._manifest.region_bytes - self._ranges.nbytes

    @cached_property
    def _rest_at(self) -> list[int]:
        """Where each chunk's bytes begin in the rest."""
        gaps = map(self.gaps, range(self._manifest.chunk_count))
        return list(accumulate((sum(nbytes for _, nbytes in each) for each in gaps), initial=0))

    def _found(self, chunk: int) -> Iterator[tuple[int, int, Range | None]]:
        """The chunk in order: from where in its region, how many bytes, and the range; None: a
        gap.
        """
        place = self._manifest.chunks[chunk]
        at, end = place.offset, place.offset + place.nbytes
        for each in self._ranges.find(place.region, place.offset, place.nbytes):
            if each.at > at:
                yield at, each.at - at, None
            yield each.at, each.nbytes, each
            at = each.at + each.nbytes
        if at < end:
            yield at, end - at, None

    def gaps(self, chunk: int) -> list[tuple[int, int]]:
        """Of a chunk's region, from where on how many bytes are in no file."""
        return [(at, nbytes) for at, nbytes, found in self._found(chunk) if found is None]

    def places(self, chunk: int) -> list[Place]:
        """The bytes of a chunk, in order."""
        made = []
        rest = self._rest_at[chunk] if self.rest_bytes else 0
        for _, nbytes, found in self._found(chunk):
            if found is None:
                made.append(Place(REST, rest, nbytes))
                rest += nbytes
            else:
                file, begin = self._region[found.region]
                made.append(Place(file, begin + found.offset, nbytes))
        return made
