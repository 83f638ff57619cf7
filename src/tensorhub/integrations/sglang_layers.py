"""SGLang's layers: a second model of an engine's, without memory, by which it is known how the
engine's own loader fills each layer, and what post-processing makes of it.

The second model has the parameters that the loader gets, before any post-processing. Its layers get
memory one after the other, are loaded and post-processed there by SGLang's own code, and are
compared with the engine's layers, or copied into them. So a quantized layer is quantized by the
engine's own method, and keeps its memory, which captured graphs refer to.

Responsible for these layers, and for the differences between SGLang's releases there. Not
responsible for when an engine is updated (`sglang_engine`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader import loader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub.integrations.drafts import PREFIX, joined
from tensorhub.integrations.probing import own_tensors, pattern, same_bytes
from tensorhub.integrations.recorder import Specs
from tensorhub.integrations.recording import Recording, record
from tensorhub.integrations.sglang_lora import without_adapters
from tensorhub.memory.safetensors import read_header

try:
    from sglang.srt.runtime_context import get_server_args
except ImportError:  # before 0.5.15
    from sglang.srt.server_args import get_global_server_args as get_server_args

BATCH_BYTES = 256 * 2**20  # of layers that have memory at the same time
SESSIONS = "_modules_with_quant_method"  # which SGLang's loader has where there are sessions
COPIED = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
PLAIN = (bool, int, str, type(None), torch.dtype)
_aten = torch.ops.aten
FILLS = {_aten.zeros.default: 0.0, _aten.zero_.default: 0.0, _aten.ones.default: 1.0}


class Unsupported(Exception):
    """Post-processing leaves something that cannot be copied into the engine's layer."""


@dataclass
class Layer:
    """A module with tensors of its own, in the engine and in the second model. `is_in_place`: what
    is loaded can be written where the engine has it. `reason`: why nothing can update this layer,
    or empty.
    """

    name: str
    live: nn.Module
    second: nn.Module
    is_in_place: bool = True
    reason: str = ""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What the loader gets, by the name in the whole model."""
        own = own_tensors(self.second)
        return {f"{self.name}.{name}".removeprefix("."): each for name, each in own.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class SecondModel:
    """The engine's model once more, on torch's meta device, made by SGLang's own code with the
    settings of this process. `layers`: those with tensors of their own. `live`: the engine's
    modules, without those for adapters. `draft`: its draft model, which both have, too, below
    `draft`; what it shares with its base is the base's.
    """

    def __init__(self, live: nn.Module, draft: nn.Module | None = None) -> None:
        self.draft, self._device = draft, next(live.parameters()).device
        self._constants = _Constants()
        self.live: nn.Module = without_adapters(live)
        self._model: Any = self._made(is_draft=False)
        of_base: set[int] = set()
        if draft is not None:
            of_base = {id(each) for each in live.parameters()}
            settings = get_server_args()
            is_one = settings.speculative_draft_model_path == settings.model_path
            self.live = joined(self.live, draft, is_one_checkpoint=is_one)
            second = self._made(is_draft=True)
            self._model = joined(self._model, second, is_one_checkpoint=is_one)
        self.layers: list[Layer] = []
        lives, seen = dict(self.live.named_modules()), set[int]()
        for name, module in self._model.named_modules():
            own = {id(each) for each in own_tensors(module).values()}
            is_shared = name.startswith(PREFIX) and all(
                id(each) in of_base for each in own_tensors(lives[name]).values()
            )
            if own - seen and not is_shared:
                self.layers.append(Layer(name, lives[name], module))
            seen |= own
        for layer in self.layers:
            layer.is_in_place = self._is_left_alone(layer)
        self.spare()
        for layer in self.layers:
            if not layer.is_in_place:
                layer.reason = self._refusal(layer)

    def _made(self, *, is_draft: bool) -> Any:
        settings = get_server_args()
        of_draft = {
            "model_path": settings.speculative_draft_model_path,
            "model_revision": settings.speculative_draft_model_revision,
            "is_draft_model": True,
        }
        config = ModelConfig.from_server_args(settings, **(of_draft if is_draft else {}))
        load = LoadConfig(load_format="dummy")
        quantization = loader._get_quantization_config(config, load)
        with set_default_torch_dtype(config.dtype), torch.device("meta"), self._constants:
            return loader._initialize_model(config, load, quantization)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the loader gets, by name."""
        return {name: each for layer in self.layers for name, each in layer.tensors.items()}

    def record(self, specs: Specs, usual: Specs | None = None) -> Recording:
        """What the model's loader does with published tensors of these names, dtypes and shapes.
        `usual`, and what it raises: see `recording.record`.
        """
        return record(self._model.load_weights, self.tensors, specs, usual)

    def loaded(
        self, layers: Sequence[Layer], tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[Layer]:
        """Each of these layers, while its second module has what SGLang's loader and
        post-processing make of these tensors.
        """
        with self._allocated(layers):
            self._model.load_weights(iter(tensors.items()))
            for layer in layers:
                _process(layer.second)
                yield layer

    def blank(self, layers: Sequence[Layer]) -> dict[str, torch.Tensor]:
        """Copies of what the loader is given to write these layers, on the CPU."""
        with self._allocated(layers):
            return {
                name: each.data.cpu().clone()
                for layer in layers
                for name, each in layer.tensors.items()
            }

    def refill(self, needs: Container[str]) -> None:
        """Once the engine's memory was lost: give its parameters that no publication fills the
        numbers that SGLang made them with.
        """
        for layer in self.layers:
            left = {name for name in layer.tensors if name not in needs}
            if not layer.is_in_place and len(left) == len(layer.tensors):
                for each in self.loaded([layer], {}):
                    copy_to_live(each)
            live = own_tensors(layer.live) if layer.is_in_place else {}
            for attribute, tensor in own_tensors(layer.second).items():
                number = self._constants.found.get(_storage(tensor))
                is_left = f"{layer.name}.{attribute}".removeprefix(".") in left
                if is_left and number is not None and isinstance(live.get(attribute), nn.Parameter):
                    live[attribute].data.fill_(number)

    def post_load(self) -> None:
        """What SGLang does once parameters were written by something else than its loader."""
        for model in (self.live, self.draft):
            if hasattr(model, "post_load_weights"):
                model.post_load_weights()  # type: ignore[operator, union-attr]

    def spare(self) -> None:
        """Have the end of SGLang's session leave alone all layers that are not written in place,
        and undo what its begin has done to them: SGLang post-processes every layer at the end,
        loaded or not. More than once in a session does nothing.
        """
        for layer in self.layers:
            method = getattr(layer.live, "quant_method", None)
            if layer.is_in_place or method is None or not hasattr(loader, SESSIONS):
                continue
            if "process_weights_after_loading" in vars(method):
                continue
            mine = [
                each for each, its in loader._modules_with_quant_method(self.live) if its is method
            ]
            if _restores(method):
                for each in mine:
                    method.process_weights_after_loading(each)
            _skip(method, len(mine))

    def _is_left_alone(self, layer: Layer) -> bool:
        """Whether post-processing leaves this layer as it is loaded, and derives nothing from it.
        Tried with random numbers.
        """
        method = getattr(layer.live, "quant_method", None)
        if _kinds(layer.live) != _kinds(layer.second):
            return False
        if method is None or _does_nothing(method):
            return True
        own = own_tensors(layer.second)
        patterns = {name: pattern(each, self._device) for name, each in own.items()}
        with self._filled(layer, patterns):
            has_derived = _process(layer.second)
            after = own_tensors(layer.second)
            return (
                set(after) == set(own)
                and all(same_bytes(after[name], each) for name, each in patterns.items())
                and not has_derived
            )

    def _refusal(self, layer: Layer) -> str:
        own = own_tensors(layer.second)
        try:
            with self._filled(layer, {n: pattern(each, self._device) for n, each in own.items()}):
                _process(layer.second)
                _check_same_kinds(layer)
        except Unsupported as error:
            return f"{error}"
        return ""

    @contextmanager
    def _filled(self, layer: Layer, patterns: Mapping[str, torch.Tensor]) -> Iterator[None]:
        with self._allocated([layer]):
            for name, each in own_tensors(layer.second).items():
                each.data.copy_(patterns[name])
            yield

    @contextmanager
    def _allocated(self, layers: Sequence[Layer]) -> Iterator[None]:
        """These layers have memory, and afterwards they are as they were."""
        parts = [each for layer in layers for each in _parts(layer.second)]
        before = [(each, {**each.__dict__}) for each in parts]
        try:
            for layer in layers:
                for name in COPIED & set(vars(layer.second)):
                    layer.second.__dict__[name] = vars(layer.second)[name].copy()
                for attribute, tensor in own_tensors(layer.second).items():
                    made = torch.empty_like(tensor, device=self._device)
                    made.fill_(self._constants.found.get(_storage(tensor), 0))
                    _put(layer.second, attribute, made, tensor)
            yield
        finally:
            for each, attributes in before:
                each.__dict__.clear()
                each.__dict__.update(attributes)


def pads_itself(layer: Layer) -> bool:
    """Whether what is loaded fills a part of this layer, and its shape is checked: a vocabulary."""
    return isinstance(layer.second, VocabParallelEmbedding)


def copy_to_live(layer: Layer) -> None:
    """Give the engine's layer what its loaded second module has, in the engine's memory."""
    _check_same_kinds(layer)
    live = own_tensors(layer.live)
    for name, tensor in own_tensors(layer.second).items():
        live[name].data.copy_(tensor.data)
    for mine, other in _pairs(layer):
        for name, value in _attributes(other).items():
            if isinstance(value, torch.Tensor):
                mine.__dict__[name].copy_(value)
            elif isinstance(value, float):  # such as a scale
                mine.__dict__[name] = value


def differing(layer: Layer) -> list[str]:
    """The tensors of the engine's layer with other bytes than its loaded second module's."""
    live, other = own_tensors(layer.live), own_tensors(layer.second)
    found = [(name, live.get(name), other.get(name)) for name in {**live, **other}]
    found += [
        (name, mine.__dict__.get(name), value)
        for mine, its in _pairs(layer)
        for name, value in _attributes(its).items()
        if isinstance(value, torch.Tensor)
    ]
    return [
        f"{layer.name}.{name}"
        for name, one, two in found
        if one is None or two is None or not _are_equal(one, two)
    ]


def _restores(method: Any) -> bool:
    """Whether the begin of a session may change layers with this method."""
    base = getattr(QuantizeMethodBase, "restore_weights_before_loading", None)
    return getattr(type(method), "restore_weights_before_loading", base) is not base


def _does_nothing(method: Any) -> bool:
    return (
        getattr(type(method), "process_weights_after_loading", None)
        is QuantizeMethodBase.process_weights_after_loading
    )


def _skip(method: Any, times: int) -> None:
    left = iter(range(times - 1, -1, -1))

    def process_weights_after_loading(layer: Any) -> None:
        if not next(left):
            del method.process_weights_after_loading

    method.process_weights_after_loading = process_weights_after_loading


def has_backup() -> bool:
    """Whether the engine keeps its weights while it sleeps."""
    return bool(getattr(get_server_args(), "enable_weights_cpu_backup", False))


def has_random_weights() -> bool:
    """Whether the engine has loaded no checkpoint."""
    return bool(get_server_args().load_format == "dummy")


def checkpoint(has_draft: bool) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Names, dtypes and shapes of the tensors in the files that the engine was started with, though
    it may have loaded nothing of them. None: there are no safetensors files on this machine.
    """
    settings = get_server_args()
    found = _in_files(settings.model_path, settings.revision)
    path = settings.speculative_draft_model_path
    if not has_draft or path == settings.model_path or found is None:
        return found
    of_draft = _in_files(path, settings.speculative_draft_model_revision)
    if of_draft is None:
        return None
    return {**found, **{f"{PREFIX}{name}": each for name, each in of_draft.items()}}


def _in_files(
    model_path: str, revision: str | None
) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    directory = Path(model_path)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        directory = Path("")
        with suppress(Exception):  # it is not on this machine
            directory = Path(
                snapshot_download(model_path, revision=revision, local_files_only=True)
            )
    files = sorted(directory.glob("*.safetensors")) if directory.name else []
    if len(files) > 1:  # the same tensors may be in one large file, too
        files = [each for each in files if not each.name.startswith("consolidated")]
    headers = [read_header(each) for each in files]
    found = {entry.name: (entry.dtype, entry.shape) for each in headers for entry in each.entries}
    return found or None


def _process(layer: nn.Module) -> bool:
    """Post-process a layer. Returns whether it has derived something else than its tensors."""
    method = getattr(layer, "quant_method", None)
    if method is None or _does_nothing(method):
        return False
    before = [_attributes(each) for each in _parts(layer)]
    method.process_weights_after_loading(layer)
    return any(
        was.get(name) is not value and not isinstance(value, PLAIN)
        for was, each in zip(before, _parts(layer), strict=True)
        for name, value in _attributes(each).items()
    )


def _check_same_kinds(layer: Layer) -> None:
    """Raise Unsupported unless each tensor of the loaded module has its place in the engine's."""
    method = type(getattr(layer.live, "quant_method", None)).__name__
    if _kinds(layer.live) != _kinds(layer.second):
        raise Unsupported(f"{method} changes what is loaded, and lays it out in another way now")
    for mine, its in _pairs(layer):
        for name, value in _attributes(its).items():
            there = vars(mine).get(name)
            if isinstance(value, torch.Tensor) and (
                not isinstance(there, torch.Tensor)
                or (there.shape, there.dtype) != (value.shape, value.dtype)
            ):
                raise Unsupported(f"{method} derives {name!r}, and the engine's layer has none")
    for name, tensor in own_tensors(layer.second).items():
        if any(isinstance(each, torch.Tensor) for each in vars(tensor).values()):
            raise Unsupported(f"{method} keeps tensors with {name!r}, which it derives from it")


def _kinds(layer: nn.Module) -> dict[str, Any]:
    own = own_tensors(layer)
    return {name: (each.shape, each.dtype, each.stride()) for name, each in own.items()}


def _pairs(layer: Layer) -> Iterator[tuple[Any, Any]]:
    yield from zip(_parts(layer.live), _parts(layer.second), strict=True)


def _attributes(each: Any) -> dict[str, Any]:
    hidden = {*COPIED, "quant_method"}
    return {name: value for name, value in vars(each).items() if name not in hidden}


def _parts(layer: nn.Module) -> list[Any]:
    """A layer and its method, which post-processing may change, too."""
    return [each for each in (layer, getattr(layer, "quant_method", None)) if each is not None]


def _put(layer: nn.Module, attribute: str, made: torch.Tensor, like: torch.Tensor) -> None:
    made.__class__, made.__dict__ = like.__class__, {**like.__dict__}
    kind = "_parameters" if attribute in layer._parameters else "_buffers"
    vars(layer)[kind][attribute] = made


def _are_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.contiguous().reshape(-1).view(torch.uint8)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the number with which a new tensor was filled: a layer that nothing is loaded into
    keeps it, and post-processing may look at it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, float] = {}
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        value = FILLS.get(func)
        if func in (_aten.fill_.Scalar, _aten.full.default):
            value = float(args[1])
        if isinstance(made, torch.Tensor) and made.device.type == "meta":
            self._kept.append(made)
            if value is not None and made.untyped_storage().nbytes() == made.nbytes:
                self.found[_storage(made)] = value
            elif func._schema.is_mutable:
                self.found.pop(_storage(made), None)
        return made
