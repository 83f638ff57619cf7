"""What a worker holds can be compared with the digests of its version: writes that nobody counts
are found, and named.
"""

from __future__ import annotations

import pytest
import torch

from tensorhub import Options, source, sync
from tensorhub.api.tools import changed_tensors
from tensorhub.errors import StateError
from tensorhub.runtime.loop_thread import finish_blocking

CHUNK = 2**16


def changed(weights: sync.Weights) -> tuple[str, ...]:
    return finish_blocking(changed_tensors(weights._async))


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_reader_has_is_compared_with_what_was_published(fused: bool) -> None:
    """Also where the reader has another layout: its chunks are the publisher's."""
    options = Options(chunk_bytes=CHUNK, pack_bytes=0)
    published = {name: torch.randn(256, 128) for name in "ab"}
    if fused:
        memory = {"ab": torch.zeros(512, 128), "other": torch.zeros(4)}
        sources = {"ab": [source("a"), source("b")], "other": []}
    else:
        memory, sources = {name: torch.zeros(256, 128) for name in "ab"}, None
    with (
        sync.serve() as coordinator,
        sync.connect(coordinator.address, options=options) as trainer,
        sync.connect(coordinator.address, options=options) as rollout,
    ):
        trained = trainer.register("actor", published)
        weights = rollout.register("actor", memory, sources=sources)
        with pytest.raises(StateError, match="holds no version"):
            changed(weights)
        for version in range(2):
            with trained.mutate(version):
                published["a"].normal_()
            weights.update(version)
            assert changed(weights) == changed(trained) == ()
        spoilt = "ab" if fused else "b"
        memory[spoilt].numpy()[-1, 3] += 1  # as a kernel would: torch counts no write
        assert changed(weights) == (spoilt,)
        assert changed(trained) == ()


def test_a_version_without_digests_cannot_be_compared() -> None:
    options = Options(integrity=False)
    with sync.serve() as coordinator, sync.connect(coordinator.address, options=options) as hub:
        weights = hub.register("actor", {"a": torch.zeros(4)})
        weights.publish(0)
        with pytest.raises(StateError, match="no digests"):
            changed(weights)
