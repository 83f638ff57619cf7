"""The tensors of a LoRA adapter that a request names.

A request comes from a client of the engine, and may name any model of the cluster: a base model's
weights need not fit into the engine's memory. So what is no adapter is refused before it is
fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tensorhub import sync
from tensorhub.api.tools import published_tensors
from tensorhub.errors import ManifestMismatch
from tensorhub.runtime.loop_thread import finish_blocking

if TYPE_CHECKING:
    import torch

CONFIG: Final = "adapter_config.json"


def fetch_adapter(
    hub: sync.Hub, model: str, version: int, timeout_s: float
) -> Mapping[str, torch.Tensor]:
    """Raises ManifestMismatch: it is no adapter; and as `Hub.fetch`."""
    asked = published_tensors(hub._async, model, version, timeout_s)
    if finish_blocking(asked).kinds.get(CONFIG, ("", ()))[0] != "uint8":
        text = (
            f"{model!r} has no tensor {CONFIG!r} that says what it is: publish "
            f"adapter_tensors(weights, config)"
        )
        raise ManifestMismatch(text, differences=(text,))
    return hub.fetch(model, version, rank=None, timeout=timeout_s)
