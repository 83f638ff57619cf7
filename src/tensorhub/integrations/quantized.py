"""A second publication of a model, quantized once at the publisher's site: engines at other sites
fetch half of the bytes, or a quarter.

    tensorhub republish actor actor-fp8 --quantization FP8_DYNAMIC

does it in a process of its own, and says with which `quantization_config` the engines are started
that follow `actor-fp8`. Within a program:

    with Republisher(hub, "actor", "actor-fp8", quantization_config("FP8_DYNAMIC")) as quantized:
        for info in hub.watch("actor"):
            quantized.publish(info.version)

The package compressed-tensors quantizes, by the `quantization_config` that engines also read.

Responsible for what is quantized, and for following the model. Not responsible for the arithmetic
(compressed-tensors), nor for the memory that is published (`tensorhub.conversion`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from tensorhub import sync
from tensorhub.api.tools import PublishedTensors, published_tensors
from tensorhub.conversion import Conversion, ConversionReport
from tensorhub.errors import InvalidValue, StateError, TensorHubError, shown
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import LATEST, Selector

BATCH_BYTES = 256 * 2**20  # that are fetched together
KEPT = ["lm_head", r"re:.*\.(gate|router|shared_expert_gate)$"]  # which engines do not quantize


def quantization_config(given: str) -> dict[str, Any]:
    """What the `config.json` at this path says; or a scheme of compressed-tensors (FP8_DYNAMIC,
    FP8_BLOCK, W4A16), for all linear layers but the head and what chooses experts.

    Raises InvalidValue (it is neither), StateError (compressed-tensors is not installed).
    """
    if given.endswith(".json"):
        try:
            found = json.loads(Path(given).read_text())["quantization_config"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidValue(f"{given}: no file with a quantization_config ({error})") from error
        return dict(found)
    _check_installed()
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, is_preset_scheme

    if not is_preset_scheme(given):
        raise InvalidValue(
            f"quantization={shown(given)}: give a scheme of compressed-tensors, such as "
            f"FP8_DYNAMIC, or a config.json"
        )
    config = QuantizationConfig(config_groups={given: ["Linear"]}, ignore=KEPT)
    (scheme,) = config.config_groups.values()
    form = infer_module_format(torch.nn.Linear, scheme).value
    made = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return {**made, "quant_method": "compressed-tensors", "format": form}


def _check_installed() -> None:
    if find_spec("compressed_tensors") is None:
        raise StateError("compressed-tensors is not installed here: pip install compressed-tensors")


class Quantizer:
    """Makes tensors by a `quantization_config` of compressed-tensors: weights in float or integer
    formats, symmetric, with scales per tensor, channel, group or block; activations dynamic.
    Matrices of layers that `targets` and `ignore` choose by name are quantized ("Linear": all);
    embeddings never.

    Raises InvalidValue (another configuration), StateError (compressed-tensors is not installed).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _check_installed()
        from compressed_tensors.quantization import QuantizationConfig

        try:
            self._config = QuantizationConfig.model_validate(dict(config))
        except ValueError as error:
            raise InvalidValue(f"quantization_config={shown(config)}: {error}") from error
        for name, scheme in self._config.config_groups.items():
            weights, inputs = scheme.weights, scheme.input_activations
            if weights is None or not weights.symmetric or weights.strategy == "tensor_group":
                raise InvalidValue(
                    f"config_groups[{name!r}]: give symmetric weights, with scales per tensor, "
                    f"channel, group or block; NVFP4's scales are shared by layers that an engine "
                    f"fuses: quantize such a model in the trainer, and publish that"
                )
            if inputs is not None and inputs.dynamic is not True:
                raise InvalidValue(
                    f"config_groups[{name!r}]: give dynamic activations; static ones need samples"
                )

    def quantize(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is published in place of one tensor, by name: itself, if it is not quantized."""
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization.utils import calculate_qparams
        from compressed_tensors.utils.match import match_quantizable_tensors

        if tensor.dim() != 2 or "embed" in name:
            return {name: tensor}
        for scheme in self._config.config_groups.values():
            found = match_quantizable_tensors(
                {name: tensor}, self._config.ignore or (), scheme.targets
            )
            for module, _ in found:
                form = scheme.format or infer_module_format(torch.nn.Linear, scheme)
                low, high = _extremes(tensor, scheme.weights)
                scale, zero = calculate_qparams(low, high, scheme.weights)
                made = BaseCompressor.get_value_from_registry(
                    getattr(form, "value", form)
                ).compress(
                    {"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}, scheme
                )
                return {f"{module}.{attribute}": each for attribute, each in made.items()}
        return {name: tensor}


def _extremes(weight: torch.Tensor, how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest number for each scale. Scales of floats are of 32 bits, as vLLM
    keeps them; those of integers have the weight's dtype.
    """
    from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant

    values = weight.float() if how.type == "float" else weight
    if how.strategy == "tensor":
        return values.min(), values.max()
    if how.strategy == "channel":
        return values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    if how.strategy == "group":
        values = values.reshape(len(values), -1, how.group_size)
        return values.amin(-1), values.amax(-1)
    rows, columns = how.block_structure
    values = maybe_pad_tensor_for_block_quant(values, (rows, columns))
    values = values.reshape(len(values) // rows, rows, -1, columns)
    return values.amin((1, 3)), values.amax((1, 3))


class Republisher:
    """Publishes versions of `model` as `target`, quantized, under the same numbers.

    It holds two quantized copies, and some tensors of a version at a time. `timeout_s`: per call.
    Raises as `Quantizer`.
    """

    def __init__(
        self,
        hub: sync.Hub,
        model: str,
        target: str,
        config: Mapping[str, Any],
        *,
        timeout_s: float = 300.0,
    ) -> None:
        if model == target:
            raise InvalidValue(f"target={shown(target)}: give another name than the model's")
        self._hub = hub
        self._model = model
        self._target = target
        self._quantizer = Quantizer(config)
        self._timeout_s = timeout_s
        self._published: PublishedTensors | None = None
        self._copies: sync.ConvertedWeights | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def publish(self, selector: Selector = LATEST) -> ConversionReport:
        """Fetch a version, whole, quantize it and publish that. Returns what it cost; readers of
        the earlier version go on meanwhile.

        Raises as `Hub.fetch` and `Weights.publish`: VersionConflict, if the target has this version
        or a newer one. After an error nothing was published, and the next call starts anew.
        """
        asked = published_tensors(
            self._hub._async, self._model, selector, self._timeout_s, self._published
        )
        published = finish_blocking(asked)
        if self._published is None or self._published.kinds != published.kinds:
            self._forget()
        self._published = published
        if self._copies is None:
            conversion = Conversion(self._allocate, self._convert)
            self._copies = sync.register_converted(
                self._hub, self._target, conversion, group=f"quantized/{self._hub.name}"
            )
        version = published.version.version
        with self._hub.pin(self._model, version, self._timeout_s):
            return self._copies.publish(version, self._timeout_s)

    def close(self) -> None:
        """Take back what is published, once other workers hold it."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()

    def _forget(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            with suppress(TensorHubError):
                copies.close(abandon=True)

    def _allocate(self) -> dict[str, torch.Tensor]:
        assert self._published is not None
        made: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in self._published.kinds.items():
            like = torch.zeros(shape, dtype=getattr(torch, dtype))
            made |= self._quantizer.quantize(name, like)
        return made

    def _convert(self, target: Mapping[str, torch.Tensor]) -> None:
        assert self._published is not None
        for names in self._batches(self._published):
            fetched = self._hub.fetch(
                self._model,
                self._published.version.version,
                rank=None,
                names=names,
                timeout=self._timeout_s,
            )
            for name, tensor in fetched.items():
                for each, values in self._quantizer.quantize(name, tensor).items():
                    target[each].copy_(values)

    @staticmethod
    def _batches(published: PublishedTensors) -> Iterator[list[str]]:
        batch: list[str] = []
        room = BATCH_BYTES
        for name, (dtype, shape) in published.kinds.items():
            nbytes = torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
            if batch and nbytes > room:
                yield batch
                batch, room = [], BATCH_BYTES
            batch.append(name)
            room -= nbytes
        if batch:
            yield batch
