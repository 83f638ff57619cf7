"""SGLang: its engines take a trainer's weights from TensorHub, by a custom weight loader.

`--custom-weight-loader tensorhub.integrations.sglang.load` is all that a server needs to be told.
The trainer makes a `Trainer`, and calls `send_weights()` after each step; SGLang need not be
installed there.

Responsible for these names. The engine's side is in `sglang_engine`, the trainer's in
`sglang_trainer` and `sglang_server`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorhub.integrations.sglang_server import Offline, Server, Session
from tensorhub.integrations.sglang_session import LOADER
from tensorhub.integrations.sglang_trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

__all__ = ["LOADER", "Offline", "Server", "Session", "Trainer", "load"]


def load(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """The loader, which SGLang calls on each tensor-parallel rank. See `sglang_engine.load`."""
    from tensorhub.integrations import sglang_engine

    sglang_engine.load(model, named_tensors)
