"""The catalogue's models are the published ones, their shards are whole, and every manifest fits
the protocol's bounds.
"""

from __future__ import annotations

from math import prod

import pytest

from benches import catalogue
from tensorhub.coordinator.limits import MANIFEST_BYTES_OF_WORKER_MAX
from tensorhub.model.manifest import CHUNKS_MAX, ENCODED_BYTES_MAX, Manifest
from tensorhub.types import Options


@pytest.mark.parametrize("name", catalogue.models())
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    found = catalogue.shapes(name)
    made = sum(
        prod(s)
        for n, (_, s) in found.items()
        if not n.endswith(("weight_scale_inv", "position_ids"))
    )
    assert made == catalogue.parameters(name)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [("Llama-3.1-405B", 1), ("Kimi-K2", 8), pytest.param("Kimi-K2", 1, marks=pytest.mark.slow)],
)
def test_the_largest_models_fit_the_bounds_of_a_manifest(model: str, ranks: int) -> None:
    """With room to spare: the largest has 20 MB, whole, and a message carries it."""
    manifest = catalogue.manifest(model, ranks=ranks, rank=ranks - 1)
    encoded = manifest.encode()
    assert ranks == 1 or Manifest.decode(encoded) == manifest
    assert len(encoded) < ENCODED_BYTES_MAX // 2
    assert len(encoded) + 65536 < Options().frame_bytes_max
    assert len(encoded) * 32 < MANIFEST_BYTES_OF_WORKER_MAX
    assert manifest.chunk_count < CHUNKS_MAX // 32
