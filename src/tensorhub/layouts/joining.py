"""From received parts to a reading: the publication out of its parts, and a rank's reading of it.

    worker of a publisher    manifest of its tensors + shardings + sources   ──►  coordinates_of  ──►  its parts
    worker of a reader       Start.publication ──► Published ──► its parts   ──►  publication_of  ──►  Publication, kept
                             manifest + shardings + sources + Publication    ──►  reading_for     ──►  ReshardedManifest

Responsible for putting these together, and for all that a rank can check about them alone. Not
responsible for fetching parts, nor for when.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping

from tensorhub.errors import ManifestMismatch, ProtocolError, RegistrationError, some
from tensorhub.layouts.arrangement import Arrangement, Coordinates, arrange
from tensorhub.layouts.catalogue import Catalogue
from tensorhub.layouts.pieces import Declaration, pieces_of
from tensorhub.layouts.publication import Publication, refuse
from tensorhub.layouts.published import Published, grid_id
from tensorhub.layouts.reading import ReshardedManifest, reading_of, resharded
from tensorhub.model.compatibility import dtype_advice, missing_advice
from tensorhub.model.manifest import Manifest, id_of


def coordinates_of(manifest: Manifest, declared: Declaration) -> Coordinates:
    """The coordinates of this manifest's tensors; `sources=` must state all shapes.
    RegistrationError, with every fault.
    """
    pieces, faults = pieces_of(manifest, declared)
    if faults:
        text = "\n  ".join(faults.values())
        raise RegistrationError(
            f"{len(faults)} fault(s) in what the tensors are made of:\n  {text}"
        )
    return arrange(pieces)


def parts_of(coordinates: Coordinates) -> dict[str, bytes]:
    """The three parts of a rank by their ids, in the order of `part_ids`: catalogue, arrangement,
    coordinates.
    """
    arrangement, catalogue = coordinates.arrangement, coordinates.catalogue
    return {
        catalogue.catalogue_id: catalogue.encode(),
        arrangement.arrangement_id: arrangement.encode(),
        coordinates.coordinates_id: coordinates.encode(),
    }


def said_parts(manifest: Manifest) -> dict[str, bytes]:
    """The parts of a resharded manifest, by id; empty for any other manifest."""
    lies = manifest.lies if isinstance(manifest, ReshardedManifest) else None
    return {} if lies is None else parts_of(lies)


def publication_of(published: Published, parts: Mapping[str, bytes]) -> Publication:
    """What the ranks hold, of which `parts` has every part by its id; checked. Takes up to seconds:
    its caller keeps it.

    ProtocolError: a part differs from its id, or does not belong to the part above it.
    ManifestMismatch: the ranks do not make one version.
    """
    return Publication(readers_of(published, parts)).check()


def readers_of(published: Published, parts: Mapping[str, bytes]) -> tuple[Coordinates, ...]:
    """What these ranks hold, or read, as each has said it. ProtocolError, as of
    `publication_of`.
    """
    for part_id in published.part_ids:
        if part_id not in parts or id_of(parts[part_id]) != part_id:
            raise ProtocolError(
                f"bad publication: part {part_id} is missing, or is not what its id names"
            )
    catalogues: dict[str, Catalogue] = {}
    arrangements: dict[str, Arrangement] = {}
    found: dict[tuple[int, tuple[str, ...]], Coordinates] = {}
    ranks = []
    for rank, shard in enumerate(published.shards):
        key = (rank if len(shard) == 1 else 0), shard  # a rank-local tensor names its rank
        if key not in found and len(shard) == 1:
            declared = Declaration(rank, len(published.shards))
            found[key] = coordinates_of(Manifest.decode(parts[shard[0]]), declared)
        elif key not in found:
            of_all, where, which = shard
            if of_all not in catalogues:
                catalogues[of_all] = Catalogue.decode(parts[of_all])
            if where not in arrangements:
                arrangements[where] = Arrangement.decode(parts[where], catalogues[of_all])
            if arrangements[where].catalogue is not catalogues[of_all]:
                raise ProtocolError(
                    f"bad publication: arrangement {where} is of another catalogue than {of_all}"
                )
            found[key] = Coordinates.decode(parts[which], arrangements[where])
        ranks.append(found[key])
    return tuple(ranks)


def reading_for(
    published: Published, publication: Publication, manifest: Manifest, declared: Declaration
) -> ReshardedManifest:
    """This rank's reading of that publication, which is `publication_of(published, ...)`.

    `manifest`: the rank's own, or that of the first group of its layout, which then fits the rank's
    own (`check_compatible`). ManifestMismatch, with every fault: its tensors are not in the
    publication, or differ there; it ties tensors that are not tied there; it is alone, and leaves
    bytes unread without `partial`. RegistrationError: it is cut into too many chunks.
    """
    reader = reader_of(publication, manifest, declared)
    reading = reading_of(publication, reader, chunk_bytes=published.chunk_bytes)
    grid = grid_id(published.publication_id, reader.coordinates_id, declared.rank)
    return resharded(
        manifest, published.digest, published.chunk_bytes, reading, grid, reader, published
    )


def reader_of(publication: Publication, manifest: Manifest, declared: Declaration) -> Coordinates:
    """What the tensors of this manifest want of that publication. Raises as `reading_for`."""
    catalogue, leaves = publication.catalogue, declared.partial or declared.world_size > 1

    def shape_of(name: str) -> tuple[int, ...] | None:
        number = catalogue.find(name)
        if number is None and name in catalogue.local_names:
            raise RegistrationError(
                f"{name!r} is a plain tensor, local to each of the source's ranks: let the source "
                f"say which part of the "
                "model that is, with sources= or DTensors"
            )
        return None if number is None else catalogue.kind(number).shape

    pieces, faults = pieces_of(manifest, declared, shape_of)
    differences = list(faults.values())
    try:
        reader = arrange(pieces, catalogue)
    except ManifestMismatch as error:
        differences += error.differences
    if not differences:
        publication.check_readers([reader], partial=leaves)
        return reader
    wanted = {piece.name for piece in pieces}
    wanted |= {view.name for name in faults for _, view in declared.sources.get(name, ())}
    if not leaves:  # a faulty tensor is named once, and not as unread as well
        differences += publication.unread(wanted | faults.keys())
    published = [(catalogue.find(piece.name, piece.kind), piece.kind.dtype) for piece in pieces]
    advice = dtype_advice(
        (catalogue.kind(number).dtype, dtype) for number, dtype in published if number is not None
    )
    unknown = [
        name
        for name in wanted
        if catalogue.find(name) is None and name not in catalogue.local_names
    ]
    if unknown:
        advice += f". The source has {some([*map(repr, catalogue.names)], most=5)}"
    advice += missing_advice((), {tensor.name for tensor in manifest.tensors}.intersection(unknown))
    refuse(differences, "difference(s) between the published and the registered tensors", advice)
    raise AssertionError("there are differences")
