"""Layouts: which rank holds which part of a version, and what a reader of another layout takes from whom. PURE.

    boxes         indices of a dimension, equally far apart; a box has them for each dimension
    views         `source(...)` and `at[...]`: what a caller writes
    sharding      which indices of a DTensor a rank has
    pieces        which part of which global tensor lies where in a rank's memory
    catalogue     names, dtypes and shapes of a version's tensors, once for all ranks
    arrangement   a rank's pieces as its peers hear them: arrangement and coordinates
    columns       how all three are encoded
    chunks        how a rank's pieces are cut into chunks
    publication   what the ranks of a group hold together, and the checks of it
    cells         bytes that a source has and a reader wants, and families of them
    plan          what a reader takes from whom

docs/layouts.md has the picture. Not responsible for moving a byte, nor for when: values in, values out.
"""

from tensorhub.layouts.arrangement import Arrangement, Coordinates, arrange
from tensorhub.layouts.catalogue import Catalogue, Kind
from tensorhub.layouts.cells import Cell, Family, Loop
from tensorhub.layouts.chunks import Chunk, Grid
from tensorhub.layouts.pieces import LocalTensor, Piece, pieces_of
from tensorhub.layouts.plan import Plan, plan
from tensorhub.layouts.publication import Publication, ShardClass
from tensorhub.layouts.sharding import Sharding, is_dtensor, sharding_of
from tensorhub.layouts.views import Place, View, at, source

__all__ = [
    "Arrangement",
    "Catalogue",
    "Cell",
    "Chunk",
    "Coordinates",
    "Family",
    "Grid",
    "Kind",
    "LocalTensor",
    "Loop",
    "Piece",
    "Place",
    "Plan",
    "Publication",
    "ShardClass",
    "Sharding",
    "View",
    "arrange",
    "at",
    "is_dtensor",
    "pieces_of",
    "plan",
    "sharding_of",
    "source",
]
