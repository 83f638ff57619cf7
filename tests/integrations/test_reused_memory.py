"""Memory is lent to one set of tensors at a time, and comes back when nobody can see it any
more.
"""

from __future__ import annotations

import threading

import pytest
import torch

from tensorhub.integrations.reused_memory import KEPT_MAX, SMALL_BYTES, ReusedMemory

KINDS = [
    ((2**18,), torch.float32),
    ((3, 5), torch.bfloat16),
    ((), torch.float64),
    ((0, 4), torch.int8),
    ((7,), torch.bool),
]


def places(tensors: list[torch.Tensor]) -> list[int]:
    return [each.data_ptr() for each in tensors if each.numel()]


def test_tensors_are_as_asked_for_and_apart() -> None:
    tensors = ReusedMemory().tensors(KINDS)
    assert [(tuple(each.shape), each.dtype) for each in tensors] == KINDS
    assert all(each.is_contiguous() and each.data_ptr() % 64 == 0 for each in tensors)
    assert [each.untyped_storage().nbytes() for each in tensors] == [
        each.nbytes for each in tensors
    ]
    for value, each in enumerate(tensors):
        each.fill_(value)
    assert [set(each.double().flatten().tolist()) for each in tensors] == [
        {0.0},
        {1.0},
        {2.0},
        set(),
        {1.0},
    ]


@pytest.mark.parametrize("view", ["tensor", "slice", "numpy", "storage", "autograd"])
def test_memory_comes_back_only_when_the_last_view_of_it_is_gone(view: str) -> None:
    memory = ReusedMemory()
    tensors = memory.tensors(KINDS)
    at_first = places(tensors)
    first = tensors[0]
    kept: object = {
        "tensor": first,
        "slice": first[7:9],
        "numpy": first.numpy()[3:],
        "storage": first.untyped_storage(),
        "autograd": (torch.ones(1, requires_grad=True) * first).sum(),  # the graph holds it
    }[view]
    del tensors, first
    others = [memory.tensors(KINDS) for _ in range(2)]
    assert at_first not in map(places, others)
    del kept
    assert places(memory.tensors(KINDS)) == at_first


def test_what_is_kept_is_bounded_and_of_the_last() -> None:
    memory = ReusedMemory()
    sizes = [((SMALL_BYTES * number,), torch.uint8) for number in range(1, 5)]
    at_first = {size: places(memory.tensors([size])) for size in sizes}
    assert len(memory._free) == KEPT_MAX
    *_, last = sizes
    assert places(memory.tensors([last])) == at_first[last]
    assert repr(memory).startswith("<ReusedMemory that keeps ")


def test_threads_never_have_the_same_memory() -> None:
    memory, together, right = ReusedMemory(), threading.Barrier(4, timeout=30), list[bool]()

    def run(value: int) -> None:
        for _ in range(20):
            (tensor,) = memory.tensors([((SMALL_BYTES,), torch.uint8)])
            tensor[::4096] = value
            together.wait()  # all have theirs
            right.append(set(tensor[::4096].tolist()) == {value})
            del tensor

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert right == 80 * [True]
