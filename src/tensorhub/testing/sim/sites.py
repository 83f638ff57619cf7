"""Two sites and two models: which seeds cut the sites off from each other as a whole, which have
workers that seed for their site, and which have the second model.

The coordinator is in `HERE`. Responsible for these chances. Not responsible for what is done with
them (`drivers`).
"""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple

HERE: Final = "here"
SITES: Final = (HERE, "there")
MODEL: Final = "actor"
MODELS: Final = (MODEL, "critic")
PARTED_DRAWN = 0.2  # of all seeds; partitions there are between sites, half of them
SEEDERS_DRAWN = 0.2  # of all seeds
ARCHIVES_DRAWN = 0.2  # of all seeds
MODELS_DRAWN = 0.2  # of all seeds, less those with an archive


class Drawn(NamedTuple):
    parted: bool
    seeders: int  # workers that bring each version into their own host memory
    archives: bool  # whether one worker archives


def draw_sites(seed: int) -> Drawn:
    """That of one seed. Its other chances stay as they are."""
    random = Random(f"sites of {seed}")
    parted = random.random() < PARTED_DRAWN
    seeders = random.randint(1, 2) if random.random() < SEEDERS_DRAWN else 0
    return Drawn(parted, seeders, Random(f"archive of {seed}").random() < ARCHIVES_DRAWN)
