"""Layouts: which rank holds which part of a version, and the transfer plans of readers of another
layout. PURE.

    boxes         indices of a dimension, equally far apart; a box has them for each dimension
    views         `source(...)` and `at[...]`: what a caller writes
    sharding      which indices of a DTensor a rank has
    pieces        which part of which global tensor lies where in a rank's memory
    catalogue     names, dtypes and shapes of a version's tensors, once for all ranks
    arrangement   a rank's pieces as its peers hear them: arrangement and coordinates
    columns       how all three are encoded
    publication   what the ranks of a group hold together, and the checks of it
    plan          the bytes that a reader takes from each source
    ranges        the plan, by the reader's memory
    reading       the plan in chunks: requests to sources (selections), places at the reader, and the manifest of both
    published     the parts of a publication, by their ids
    identity      names the layout of a rank
    joining       from received parts to a reading

docs/layouts.md has the picture. Not responsible for moving a byte, nor for when: values in, values
out.
"""  # noqa: E501 - a table

from tensorhub.layouts.arrangement import Arrangement, Coordinates, arrange
from tensorhub.layouts.catalogue import Catalogue, Kind
from tensorhub.layouts.identity import layout_id_of
from tensorhub.layouts.joining import coordinates_of, parts_of, publication_of, reading_for
from tensorhub.layouts.pieces import Declaration, Piece, pieces_of
from tensorhub.layouts.plan import Plan, plan
from tensorhub.layouts.publication import Publication, ShardClass
from tensorhub.layouts.published import Published
from tensorhub.layouts.reading import Part, Reading, ReshardedManifest, Selection, reading_of
from tensorhub.layouts.sharding import Sharding, is_dtensor, sharding_of
from tensorhub.layouts.views import Place, View, at, source

__all__ = [
    "Arrangement",
    "Catalogue",
    "Coordinates",
    "Declaration",
    "Kind",
    "Part",
    "Piece",
    "Place",
    "Plan",
    "Publication",
    "Published",
    "Reading",
    "ReshardedManifest",
    "Selection",
    "ShardClass",
    "Sharding",
    "View",
    "arrange",
    "at",
    "coordinates_of",
    "is_dtensor",
    "layout_id_of",
    "parts_of",
    "pieces_of",
    "plan",
    "publication_of",
    "reading_for",
    "reading_of",
    "sharding_of",
    "source",
]
