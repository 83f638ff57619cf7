"""Files through a real cluster: published in place, carried on by a replica, and fetched to the
byte.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tensorhub import sync
from tensorhub.api.tools import fetch_into, register_memory
from tensorhub.memory.file_target import FileTarget
from tensorhub.memory.files import FileMemory
from tensorhub.memory.safetensors import TORCH_NAMES
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import Options
from tests.memory.test_files import listing, sharded

OPTIONS = Options(op_timeout_s=30.0, chunk_bytes=4096)


class Cluster:
    """A publisher and a replica of one coordinator, for many models one after the other."""

    def __init__(self, publisher: sync.Hub, replica: sync.Hub) -> None:
        self._publisher = publisher
        self._replica = replica
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def published(self, path: Path) -> Iterator[str]:
        """The name of a model whose files were published, replicated, and withdrawn by their
        publisher.
        """
        model = f"model-{next(self._numbers)}"
        with FileMemory(path) as memory:
            files = sync.Weights(
                finish_blocking(register_memory(self._publisher._async, model, memory))
            )
            files.publish(0)
            loaded = [load_file(file) for file in memory.names]
            zeros = {
                name: torch.zeros_like(tensor) for part in loaded for name, tensor in part.items()
            }
            weights = self._replica.register(model, zeros)
            weights.replicate()
            files.close()
        yield model
        weights.close()

    def fetch(self, model: str, out: Path) -> None:
        with FileTarget(out) as target:
            finish_blocking(fetch_into(self._publisher._async, model, "latest", target))
            target.commit()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with sync.serve(token="", options=OPTIONS) as coordinator, contextlib.ExitStack() as stack:
        hubs = [
            stack.enter_context(
                sync.connect(coordinator.address, name=name, token="", options=OPTIONS)
            )
            for name in ("p", "r")
        ]
        yield Cluster(*hubs)


CHARACTERS = st.characters(exclude_categories=["Cs"])


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    dtypes = st.sampled_from(
        [getattr(torch, name) for name in TORCH_NAMES.values() if name != "float8_e8m0fnu"]
    )
    names = st.text(CHARACTERS, min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
    made = {}
    for name in draw(st.lists(names, min_size=1, max_size=8, unique=True)):
        shape, dtype = draw(st.lists(st.integers(0, 7), max_size=4)), draw(dtypes)
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        made[name] = bits[..., 0] > 127 if dtype == torch.bool else bits.view(dtype).reshape(shape)
    return made


METADATA = st.none() | st.dictionaries(st.text(CHARACTERS), st.text("aé\n\x00"), max_size=3)


@pytest.mark.heavy
@settings(max_examples=30)
@given(tensors=state_dicts(), metadata=METADATA, files=st.integers(1, 4), has_index=st.booleans())
def test_files_come_back_to_the_byte(
    cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None,
    files: int,
    has_index: bool,
) -> None:
    folder = tmp_path_factory.mktemp("round")
    names = list(tensors)
    parts = {
        f"part-{n}.safetensors": {name: tensors[name] for name in names[n::files]}
        for n in range(files)
    }
    parts = {name: part for name, part in parts.items() if part}
    index = sharded(folder / "in", parts, metadata)
    if not has_index:
        index.unlink()
    with cluster.published(folder / "in") as model:
        cluster.fetch(model, folder / "out")
        cluster.fetch(model, folder / "one.safetensors")
    assert listing(folder / "out") == listing(folder / "in")
    assert {path.name for path in folder.iterdir()} == {"in", "out", "one.safetensors"}
    if len(parts) == 1:
        assert (folder / "one.safetensors").read_bytes() == (
            folder / "in" / next(iter(parts))
        ).read_bytes()
    merged = load_file(folder / "one.safetensors")
    assert merged.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (merged[name].dtype, merged[name].shape) == (tensor.dtype, tensor.shape)
        assert (
            merged[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        )
    with safe_open(folder / "one.safetensors", "pt") as file:
        assert (file.metadata() or {}) == (metadata or {"format": "pt"})
