"""vLLM: LoRA adapters, which are models of their own beside their base.

A trainer registers an adapter's tensors, with its configuration as one more (`adapter_tensors`),
and publishes them as it publishes any model. Where an engine runs, `fetch_adapter` makes of a
version what vLLM loads adapters from: a directory, and the request that names it.

Responsible for that form. Not responsible for the base's weights (`vllm`), nor for loading: that is
vLLM's own route.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tensorhub import sync
from tensorhub.errors import InvalidType, ManifestMismatch, shown
from tensorhub.types import LATEST, Selector

__all__ = ["adapter_tensors", "fetch_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# versions of an adapter in a directory: requests may still be answered with the version before
KEPT = 2


def adapter_tensors(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """What to register as an adapter: its tensors where they are, and the bytes of its
    configuration.

    `weights`: by the names of a PEFT checkpoint, as `peft.get_peft_model_state_dict(model)` has
    them. `config`: what its `adapter_config.json` says, as
    `model.peft_config["default"].to_dict()`.
    """
    try:
        text = json.dumps(dict(config), default=_listed)
    except (TypeError, ValueError) as error:
        raise InvalidType(
            f"config={shown(config)}: {error}; give what adapter_config.json is to say"
        ) from error
    return {**weights, CONFIG: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _listed(value: object) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{shown(value)} cannot be written as JSON")


def fetch_adapter(
    hub: sync.Hub,
    model: str,
    directory: str | os.PathLike[str],
    selector: Selector = LATEST,
    *,
    timeout: float | None = None,
) -> LoRARequest:
    """Fetch a version of an adapter into `directory`, where all workers of the engine can read it,
    and return the request by which vLLM loads it in place of an earlier version: for `add_lora`,
    for `/v1/load_lora_adapter`, or with a prompt.

    The last versions of each adapter are kept there. Raises as `Hub.fetch`; ManifestMismatch: the
    model is no adapter.
    """
    fetched = hub.fetch(model, selector, rank=None, timeout=timeout)
    tensors = dict(fetched)
    config = tensors.pop(CONFIG, None)
    if config is None or config.dtype != torch.uint8:
        text = f"{model!r} has no tensor {CONFIG!r}: publish adapter_tensors(weights, config)"
        raise ManifestMismatch(text, differences=(text,))
    path = Path(
        directory, hashlib.sha256(model.encode()).hexdigest()[:16], f"{fetched.info.version:020}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as made:
        new = Path(made, "new")
        new.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new / WEIGHTS)
        (new / CONFIG).write_bytes(config.numpy().tobytes())
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)  # this number, of another lineage perhaps
        new.rename(path)
    for old in sorted(each for each in path.parent.iterdir() if not each.name.startswith("."))[
        :-KEPT
    ]:
        shutil.rmtree(old, ignore_errors=True)
    # The number is the adapter's in all of the engine's processes, and fits vLLM's arrays.
    number = 1 + int.from_bytes(hashlib.sha256(model.encode()).digest()[:8], "big") % (2**31 - 1)
    return LoRARequest(lora_name=model, lora_int_id=number, lora_path=f"{path}", load_inplace=True)
