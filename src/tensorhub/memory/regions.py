"""What memory of one registration is to the rest of the library, and where the regions of a
manifest are in it.

Not responsible for any kind of it: a caller's tensors (`tensors`), files (`files`, `file_target`),
host memory (`host`), what a fetch allocates (`allocated`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tensorhub.cuda.device import Device
from tensorhub.errors import ManifestMismatch
from tensorhub.memory.addresses import Bytes, copy_bytes
from tensorhub.memory.claims import NO_CLAIM, Claim
from tensorhub.model.manifest import Manifest, TensorDescription, TensorSpec

PADDING_MAX = 256  # bytes beside each tensor of a packed region; publishers take less


class Pack(Protocol):
    """A packed region's bytes, beside the tensors that they belong to."""

    def pack(self) -> None:
        """Copy the tensors' bytes into the region."""

    def unpack(self) -> None:
        """Copy the region's bytes into the tensors."""


Pieces = tuple[tuple[int, Bytes], ...]
"""What is where in a region: (offset, a tensor's bytes)."""


@dataclass(frozen=True, slots=True)
class MappedRegions:
    """Where a manifest's regions are in this process.

    `regions`: one view per region, writable if they are to be filled. `copies`: (from, to) for
    tensors that share bytes at the source and are apart here. `unwanted`: regions that are not read
    here; their views are empty. `left_out`: further chunks that are not read. `then`: a last step
    with the verified bytes; it runs in a thread, and raises TensorHubErrors. `scattered`: packed
    regions with tensors that are apart here; their views are empty until `packs` are made of them.
    """

    regions: tuple[Bytes, ...]
    copies: tuple[tuple[Bytes, Bytes], ...]
    unwanted: frozenset[int] = frozenset()
    left_out: Sequence[int] = ()
    then: Callable[[], None] | None = None
    scattered: Mapping[int, Pieces] = field(default_factory=dict)
    packs: tuple[Pack, ...] = ()

    def pack(self) -> None:
        """Bring the tensors' bytes to the packed regions: before a version of them is promised."""
        for pack in self.packs:
            pack.pack()

    @property
    def is_in_place(self) -> bool:
        """Whether `unpack` has nothing to do."""
        return not self.packs and not self.copies and self.then is None

    def unpack(self) -> None:
        """Copy the regions' bytes to the other tensors that hold them: when all is verified, before
        READY.
        """
        for pack in self.packs:
            pack.unpack()
        for source, target in self.copies:
            copy_bytes(source, target)
        if self.then is not None:
            self.then()


class Memory:
    """The memory of one registration: the caller's tensors, a file's bytes, or memory that a fill
    allocates.
    """

    # as this memory would be published; empty where it never is
    descriptions: tuple[TensorDescription, ...] = ()
    metadata = b""  # see `Manifest.metadata`
    digests_first = False  # `digests` makes every chunk's digest, before anything is promised
    device: Device | None = None  # that has the memory; None: the CPU can address it
    claim: Claim = NO_CLAIM  # on the caller's tensors, which may be registered more than once

    def check_unreplaced(self) -> None:
        """RegistrationError if this is not the memory that was registered any more."""

    def check_writable(self, *, again: bool = False) -> None:
        """RegistrationError, naming each tensor that is to be filled and cannot be written. Tensors
        that were writable once are checked only `again`.
        """

    def versions(self, tensors: Iterable[int] | None = None) -> tuple[int, ...]:
        """Counts of writes, of each tensor or of those with these numbers. If they are equal before
        and after, no write was seen in between.
        """
        return ()

    def moved(self, tensors: Iterable[int] | None = None) -> list[int]:
        """The numbers of tensors (of all, or of these) with memory that was replaced, freed or
        resized since it was registered: it must not be touched. Any thread may ask.
        """
        return []

    def count_write(self) -> None:
        """Count a write of the library's as if the owner had written."""

    def digests(self, manifest: Manifest, check: Callable[[], object]) -> Sequence[int] | None:
        """Every chunk's digest; None: each is made when it is first sent, or a fill brings it.

        Blocks. `check` is called every few MiB, and ends the call by raising. Memory that makes its
        digests here is never digested by its views, which may be of a file that is truncated
        meanwhile.
        """
        return None

    def map(self, manifest: Manifest) -> MappedRegions:
        """Find the regions of a manifest, its own or a compatible source's. ManifestMismatch if
        they are not here.
        """
        raise NotImplementedError


class FilledMemory(Memory):
    """Memory of the library alone: it is filled, and not published from tensors."""

    patterns: tuple[str, ...] | None = None  # of the names of the tensors that it takes; None: all

    def recall(self, content_id: str, manifest: Manifest) -> Sequence[int | None] | None:
        """The chunks of this content that may have arrived before, in an earlier process: their
        digests, to be compared with the bytes. Called after `map`.
        """
        return None

    def note(self, digests: Sequence[int | None]) -> None:
        """The digests of the chunks that have arrived, for `recall`. Called while it is filled, now
        and then.
        """


class CallersMemory(Memory):
    """What a caller has registered, and may replace or write. These methods are called in the
    caller's own thread.
    """

    def check_current(self) -> None:
        """RegistrationError, naming each tensor, if what he has under these names is not the memory
        that was registered.
        """
        self.check_unreplaced()

    def watch(self) -> Callable[[], bool] | None:
        """A function to call later: True if no write was seen since now. None: writes cannot be
        seen.
        """
        return None


def mapped(
    manifest: Manifest,
    find: Callable[[Sequence[TensorSpec]], Sequence[Bytes]],
    padded: Container[int] = (),
) -> MappedRegions:
    """The manifest's regions, where `find` has the bytes of an alias class: once for each place
    that they have here, or nowhere, where they are not wanted. `padded`: regions of tensors with
    padded rows, which are as they are.
    """
    regions, copies = list[Bytes](), list[tuple[Bytes, Bytes]]()
    scattered, unwanted = dict[int, Pieces](), set[int]()
    for index in range(len(manifest.regions)):
        if index not in padded:
            check_padding(manifest, index)
        pieces = list[tuple[int, Bytes]]()
        for tensors in alias_classes(manifest, index):
            found = find(tensors)
            pieces += [(tensors[0].offset, first) for first in found[:1]]
            copies += [(found[0], other) for other in found[1:] if other.nbytes]
        if not pieces:
            unwanted.add(index)
        elif index not in padded and is_packed(manifest, index):
            scattered[index] = tuple(pieces)
        regions.append(pieces[0][1] if pieces and index not in scattered else memoryview(b""))
    return MappedRegions(tuple(regions), tuple(copies), frozenset(unwanted), scattered=scattered)


def is_packed(manifest: Manifest, region: int) -> bool:
    """Whether this region holds more than the bytes of one tensor."""
    nbytes = manifest.regions[region].nbytes
    return any(tensor.offset or tensor.nbytes != nbytes for tensor in manifest.by_region[region])


def alias_classes(manifest: Manifest, region: int) -> Iterable[Sequence[TensorSpec]]:
    """A region's tensors by the bytes that they are: those that share them together."""
    found: dict[tuple[int, int], list[TensorSpec]] = {}
    for tensor in manifest.by_region[region]:
        found.setdefault((tensor.offset, tensor.nbytes), []).append(tensor)
    return found.values()


def check_padding(manifest: Manifest, region: int) -> None:
    """ManifestMismatch if there is more between a region's tensors than packing leaves: a holder
    makes room for it.
    """
    nbytes = sum(tensors[0].nbytes for tensors in alias_classes(manifest, region))
    if manifest.regions[region].nbytes - nbytes > PADDING_MAX * len(manifest.by_region[region]):
        raise mismatch(
            f"region {region} has {manifest.regions[region].nbytes} bytes, of which only {nbytes} "
            f"are of tensors"
        )


def mismatch(difference: str) -> ManifestMismatch:
    """That keeps a manifest's regions from being found here."""
    return ManifestMismatch(difference, differences=(difference,))
