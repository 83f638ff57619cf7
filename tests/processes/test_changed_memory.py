"""An owner whose published memory was freed lives on, however it is read: the first read asks where
the bytes are.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tensorhub import sync
from tensorhub.errors import TensorHubError
from tests.rig import OPTIONS, WAIT_S
from tests.runtime.data_rig import KINDS, waited_out_s

OWNER = """
import sys
import torch
from tensorhub import sync
from tensorhub.runtime.worker import handle

if sys.argv[2] == "lazily":
    handle.Handle._digest_early = lambda self: None
with sync.connect(sys.argv[1], token="") as hub:
    tensor = torch.full((16 * 2**20,), 1.5)  # 64 MiB, which the allocator gives back to the system
    weights = hub.register("m", {"w": tensor})
    weights.publish(1)
    tensor.untyped_storage().resize_(0)
    print("freed", flush=True)
    sys.stdin.readline()
    try:
        weights.unpublish()
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.usefixtures("prepared_with_torch")
@pytest.mark.parametrize(("way", "digests"), list(zip(KINDS, ("lazily", "early"), strict=False)))
def test_an_owner_whose_memory_was_freed_is_not_ended_by_its_readers(
    way: str, digests: str
) -> None:
    import torch

    with sync.serve(token="", options=OPTIONS) as coordinator:
        command = [sys.executable, "-c", OWNER, coordinator.address, digests]
        with (
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as owner,
            sync.connect(coordinator.address, token="", transports=[way], options=OPTIONS) as hub,
        ):
            assert owner.stdin is not None
            assert owner.stdout is not None
            assert owner.stdout.readline() == "freed\n"
            memory = {"w": torch.zeros(16 * 2**20)}
            with pytest.raises(TensorHubError):
                hub.register("m", memory).replicate(timeout=waited_out_s(2))
            said, _ = owner.communicate("go on\n", timeout=WAIT_S)
            assert said == "MutabilityViolation\n"
        assert owner.returncode == 0
