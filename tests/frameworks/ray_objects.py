"""What runs in Ray actors in the tests of the tensor transport."""

from __future__ import annotations

from typing import Any

import ray
import torch
from ray.experimental import set_target_for_ref
from ray.experimental.rdt.util import get_tensor_transport_manager

from tensorhub.integrations import ray_transport
from tensorhub.integrations.ray_transport import register_transport

SIZE = 300_000  # floats: what is small is not kept

# before the class that names it, and in each process that has the class: also in one that Ray
# restarts
register_transport()


class Source:
    """Its tensors are objects of Ray."""

    def __init__(self) -> None:
        self._tensors = [
            torch.zeros(SIZE),
            torch.zeros(3, 4, dtype=torch.bfloat16).t(),
            torch.zeros(()),
        ]

    @ray.method(tensor_transport="tensorhub")
    def tensors(self, value: float) -> list[Any]:
        for tensor in self._tensors:
            tensor.fill_(value)
        return self._tensors

    def published(self) -> int:
        """How many objects the transport holds here."""
        return len(get_tensor_transport_manager("TENSORHUB")._published)

    def asked_again(self) -> bool:
        """Whether an object that Ray asks for again, after a retried task, is what it was."""
        manager = get_tensor_transport_manager("TENSORHUB")
        ((obj_id, (_, published)),) = manager._published.items()
        said = manager.extract_tensor_transport_metadata(obj_id, self._tensors)
        return said is published and self.published() == 1


class Destination:
    """Gets them. `serves`: while it fills, as with large objects."""

    def __init__(self, serves: bool = False) -> None:
        if serves:
            ray_transport.SERVED_BYTES_MIN = 0  # type: ignore[misc]

    def take(self, tensors: list[Any]) -> list[tuple[list[int], str, list[float]]]:
        return [(list(each.shape), str(each.dtype), each.unique().tolist()) for each in tensors]

    def kept(self) -> int:
        """How many pieces of memory the transport keeps here for the next object."""
        return len(get_tensor_transport_manager("TENSORHUB")._memory._free)

    def take_in_place(self, refs: list[Any]) -> list[tuple[list[int], str, list[float]]]:
        own = [torch.ones(SIZE), torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(())]
        set_target_for_ref(refs[0], own)
        got = ray.get(refs[0], timeout=100)
        assert [each.data_ptr() for each in got] == [each.data_ptr() for each in own]
        return self.take(own)
