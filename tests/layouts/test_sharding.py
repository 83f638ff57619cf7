"""Which indices a rank has of a DTensor: against torch's own, on fake process groups, and against
FSDP2 on real ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorhub.errors import RegistrationError
from tensorhub.layouts.boxes import Span
from tensorhub.layouts.sharding import Cut, Sharding, cut, is_dtensor, sharding_of


@contextmanager
def mesh_of(*sizes: int, rank: int) -> Iterator[DeviceMesh]:
    """As one rank sees it; collectives do nothing."""
    distributed.init_process_group("fake", rank=rank, world_size=prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        distributed.destroy_process_group()


def elements(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(*shape)


def taken(full: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    indices = [
        [n for run in runs for n in range(run.start, run.start + run.size)]
        for runs in sharding.runs
    ]
    return torch.from_numpy(full.numpy()[np.ix_(*indices)])


def rows(sharding: Sharding) -> list[int]:
    return [n for run in sharding.runs[0] for n in range(run.start, run.start + run.size)]


CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((13, 4), (4,), [Shard(0)]),
    ((3, 4), (4,), [Shard(0)]),  # the last rank has nothing
    ((6, 5), (2,), [Shard(-1)]),
    ((13, 5), (3, 2), [Shard(0), Shard(0)]),
    ((13, 4), (3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((7, 4), (2, 2), [Replicate(), Shard(0)]),  # HSDP
    ((13, 4), (2, 3, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
    ((0, 4), (2,), [Shard(0)]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CASES)
def test_as_torch_distributes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Any]
) -> None:
    full = elements(shape)
    for rank in range(prod(mesh_shape)):
        with mesh_of(*mesh_shape, rank=rank) as mesh:
            dtensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            assert is_dtensor(dtensor)
            sharding = sharding_of(dtensor)
            assert sharding is not None
            assert sharding.shape == shape
            assert torch.equal(taken(full, sharding), dtensor.to_local())


@pytest.mark.parametrize("seed", range(40))
def test_random_placements_as_torch_distributes(seed: int) -> None:
    random = Random(seed)
    shape = [random.randint(1, 17) for _ in range(random.randint(1, 3))]
    mesh_shape = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
    placements = [
        random.choice(
            [
                Replicate(),
                Shard(dimension),
                Shard(dimension),
                _StridedShard(dimension, split_factor=random.randint(2, 3)),
            ]
        )
        for dimension in [random.randrange(len(shape)) for _ in mesh_shape]
    ]
    full, rank = elements(shape), random.randrange(prod(mesh_shape))
    with mesh_of(*mesh_shape, rank=rank) as mesh:
        dtensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        try:
            sharding = sharding_of(dtensor)
        except RegistrationError as error:
            if "do not tell which indices" in str(error):
                return  # FSDP2 would have other ones in a part of this shape
            raise
        assert sharding is not None
        assert torch.equal(taken(full, sharding), dtensor.to_local())


def test_a_strided_shard_of_uneven_size_is_several_runs() -> None:
    """DTensor's own offset of this rank is 6, which says nothing of the row 11."""
    sharding = cut((13, 4), [Cut(0, 3, 2, split=2), Cut(0, 2, 0)])
    assert sharding.runs == ((Span(6, 1), Span(11, 1)), (Span(0, 4),))
    assert sharding.placed_runs() == [[(0, Span(6, 1)), (1, Span(11, 1))], [(0, Span(0, 4))]]


def test_where_fsdp2_has_other_rows_than_its_placements_say_its_memory_decides() -> None:
    with mesh_of(3, 2, rank=4) as mesh:
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        local = elements((13, 4))[6:7]
        dtensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size((13, 4)), stride=(4, 1)
        )
        sharding = sharding_of(dtensor)
        assert sharding is not None
        assert rows(sharding) == [6]


def test_where_not_even_the_memory_decides_the_tensor_is_refused() -> None:
    """27 rows on 3 x 4: rank (2, 2) of FSDP2 has row 20, and torch's distributing gives it row
    26.
    """
    cuts = [Cut(0, 3, 2, split=4), Cut(0, 4, 2)]
    assert rows(cut((27,), cuts)) == [26]
    assert rows(cut((27,), [cuts[1], Cut(0, 3, 2)])) == [20]
    with mesh_of(3, 4, rank=10) as mesh:
        dtensor = distribute_tensor(
            elements((27,)), mesh, [_StridedShard(0, split_factor=4), Shard(0)], src_data_rank=None
        )
        with pytest.raises(
            RegistrationError, match=r"do not tell which indices it has \(.*26.* or .*20"
        ):
            sharding_of(dtensor)


class Scattered(Shard):
    """A placement that another library defines."""


@pytest.mark.parametrize(
    ("placement", "advice"),
    [
        (Shard(0), r"shape \(3, 4\).*say \(4, 4\)"),
        (Partial(), "Partial"),
        (Scattered(0), "unknown here"),
    ],
)
def test_what_cannot_be_registered_is_refused(placement: Any, advice: str) -> None:
    with mesh_of(2, rank=0) as mesh:
        dtensor = DTensor.from_local(
            torch.zeros(3, 4),
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size((8, 4)),
            stride=(4, 1),
        )
        with pytest.raises(RegistrationError, match=advice):
            sharding_of(dtensor)


# ----------------------------------------------------------------------------------------------
# real processes


def fsdp_rank(rank: int, sizes: tuple[int, int], store: str, problems: Any) -> None:
    try:
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", rank=rank, world_size=prod(sizes), init_method=f"file://{store}"
        )
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        for size in (13, 17, 5, 12):
            full = elements((size, 4)).float()
            module = torch.nn.Linear(4, size, bias=False)
            parallel = distribute_tensor(full, mesh["tp"], [Shard(0)])
            module.weight = torch.nn.Parameter(parallel)
            fully_shard(module, mesh=mesh["dp"])
            dtensor: Any = module.weight
            assert torch.equal(dtensor.full_tensor(), full)
            sharding = sharding_of(dtensor)
            assert sharding is not None
            assert torch.equal(taken(full, sharding), dtensor.to_local().detach()), (
                rank,
                size,
                sharding,
            )
        distributed.destroy_process_group()
    except BaseException as error:
        problems.put(f"rank {rank}: {error!r}")
        raise


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fsdp2_over_tensor_parallelism_of_uneven_sizes() -> None:
    sizes = (3, 2)
    context = torch.multiprocessing.get_context("spawn")
    problems = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, sizes, f"{folder}/store", problems) for rank in range(prod(sizes))]
        processes = [context.Process(target=fsdp_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    found = [] if problems.empty() else [problems.get()]
    assert (found, [process.exitcode for process in processes]) == ([], [0] * len(processes))
