"""Finds the tensors, by name, of the nn.Module or the (nested) mapping that a caller has
registered. Looks anew each time.

The tensors of a module are its named parameters, its persistent buffers and further state that it
saves in place (`module_state`), in the order of its `state_dict()`. Tied tensors appear under each
of their names. `state_dict()` itself is never called: it runs hooks, and FSDP's hooks gather. The
prefixes of torch's own wrappers are left out. Not responsible for whether a tensor can be
registered (`describing`).

torch is never imported here. A caller with a module has imported it already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tensorhub.errors import RegistrationError, some
from tensorhub.memory.describing import is_torch
from tensorhub.memory.module_state import (
    PLAIN,
    kept_at_parameters,
    plain_tensors,
    saved_beside,
    saves_more,
)

# Where torch defines a wrapper, its class, and the name under which it keeps the module that it
# wraps.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
NAMES_MAX = 5  # in an error
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp", "FSDPModule"


def is_module(value: object) -> bool:
    """Whether it is a torch.nn.Module."""
    nn = getattr(sys.modules.get("torch"), "nn", None)
    return isinstance(value, getattr(nn, "Module", ()))


@dataclass(frozen=True, slots=True)
class Resolved:
    """The tensors of a module or of a mapping, by name. `carried`: those of them that are no
    parameters or buffers, which a later look must find again. `left_out`: other state of the
    module, by name, with what it is.
    """

    tensors: dict[str, Any]
    carried: frozenset[str]
    left_out: dict[str, str]


def resolve(given: object, carried: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The present tensors of a module or of a mapping; entries of a mapping within it get dotted
    names. `carried`: see `Resolved`.

    RegistrationError: it is neither, two entries have one name, or a module is flattened, or
    gathered now, by FSDP.
    """
    return _resolve(given, _Found(carried)).tensors


def resolve_all(given: object) -> Resolved:
    """The present tensors and a module's further state, at registration. RegistrationError as of
    `resolve`.
    """
    found = _resolve(given, _Found(None))
    found.look_at_all()
    return Resolved(found.tensors, frozenset(found.carried), found.left_out)


def _resolve(given: object, found: _Found) -> _Found:
    try:
        if is_module(given):
            found.enter_module(given, "")
        elif isinstance(given, Mapping):
            found.enter_mapping(given, "")
        else:
            what = f"{type(given).__module__}.{type(given).__qualname__}"
            raise RegistrationError(
                f"tensors: give an nn.Module or a mapping of names to tensors, not {what}"
            )
    except RecursionError:
        raise RegistrationError(
            "tensors: they are nested too deeply; nothing can hold itself"
        ) from None
    if found.gathered:
        names = some([*map(repr, found.gathered)], most=NAMES_MAX)
        raise RegistrationError(
            f"{len(found.gathered)} parameter(s) are gathered by FSDP now ({names}): that memory "
            f"is freed again. Call "
            "`reshard()` on the module first: a forward without a backward leaves it gathered"
        )
    if found.twice:
        names = ", ".join(map(repr, list(found.twice)[:NAMES_MAX]))
        raise RegistrationError(
            f"tensors: two entries have one name ({names}), since nested names are joined by dots: "
            f"rename one"
        )
    return found


class _Found:
    """What has been found so far. `wanted`: names of state that is carried besides parameters and
    buffers; None: all that can be.
    """

    def __init__(self, wanted: frozenset[str] | None) -> None:
        self._wanted = wanted
        self.carried: list[str] = []
        self.left_out: dict[str, str] = {}
        self._saves_more: dict[type, bool] = {}
        self._plain: list[tuple[str, Any]] = []  # tensors that are plain attributes
        self._places: set[int] = set()  # of storages that are known
        self.tensors: dict[str, Any] = {}
        self.twice: dict[str, None] = {}  # names of more than one entry
        defined = [(_defined(where, kind), inner) for where, kind, inner in _WRAPPERS]
        self._wrappers = [(kind, inner) for kind, inner in defined if kind is not None]
        self.gathered: list[str] = []  # names of parameters that stand in for those that FSDP keeps
        self._fsdp, self._fsdp2 = _defined(*_FSDP), _defined(*_FSDP2)
        self._stand_ins: set[int] = set()  # the ids of such parameters
        # by kind, the attribute of the wrapped module; None: no wrapper
        self._inner: dict[type, str | None] = {}

    def enter_mapping(self, given: Mapping[Any, Any], prefix: str) -> None:
        for name, value in given.items():
            # a name that is none is refused with its tensor
            whole = prefix + name if isinstance(name, str) else name
            if isinstance(value, Mapping) and isinstance(name, str):
                self.enter_mapping(value, f"{whole}.")
            else:
                self._enter_tensor(whole, value)

    def _enter_tensor(self, name: str, tensor: Any) -> None:
        if name in self.tensors:
            self.twice[name] = None
        self.tensors[name] = tensor

    def enter_module(self, module: Any, prefix: str) -> None:
        """As `named_parameters(remove_duplicate=False)` and `named_buffers` do, which take their
        own pass each.
        """
        if self._fsdp2 is not None and isinstance(module, self._fsdp2):
            self._stand_ins.update(map(id, _stand_ins(module)))
        for name, tensor in module._parameters.items():
            if id(tensor) in self._stand_ins:
                self.gathered.append(prefix + name)
            if tensor is not None:
                self._enter_tensor(prefix + name, tensor)
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                self._enter_tensor(prefix + name, tensor)
        kind = type(module)
        if kind not in self._inner:
            self._inner[kind] = self._inner_of(module, prefix)
        if self._wanted is None or self._wanted:
            self._enter_state(module, prefix)
        inner = self._inner[kind]
        for name, child in module._modules.items():
            if child is not None:
                self.enter_module(child, prefix if name == inner else f"{prefix}{name}.")

    def _enter_state(self, module: Any, prefix: str) -> None:
        """The further state of this one module. (`state_dict()` would run hooks.)"""
        kind = type(module)
        if kind not in self._saves_more:
            self._saves_more[kind] = saves_more(kind)
        if self._saves_more[kind] and (
            self._wanted is None or any(name.startswith(prefix) for name in self._wanted)
        ):
            carried, left_out = saved_beside(module)
            for name, tensor in carried.items():
                if self._wanted is None or prefix + name in self._wanted:
                    self._enter_tensor(prefix + name, tensor)
                    self.carried.append(prefix + name)
            self.left_out |= {prefix + name: why for name, why in left_out.items()}
        if self._wanted is None:
            if not self._saves_more[kind]:
                self.left_out |= {prefix + name: why for name, why in kept_at_parameters(module)}
            self._plain += [(prefix + name, tensor) for name, tensor in plain_tensors(module)]
            self._places.update(_storages(module._buffers.values()))

    def look_at_all(self) -> None:
        """Sort out what can only be told once all is found."""
        at = {
            str(tensor.device)
            for name, tensor in self.tensors.items()
            if name not in self.carried and is_torch(tensor)
        }
        for name in [
            name for name in self.carried if at and str(self.tensors[name].device) not in at
        ]:
            self.carried.remove(name)
            self.left_out[name] = f"it is on {self.tensors.pop(name).device}, where no parameter is"
        self._places.update(_storages(self.tensors.values()))
        for name, tensor in self._plain:
            if not self._places.issuperset(_storages([tensor])):
                self.left_out[name] = PLAIN

    def _inner_of(self, module: Any, prefix: str) -> str | None:
        if self._fsdp is not None and isinstance(module, self._fsdp):
            where = f" {prefix[:-1]!r}" if prefix else ""
            raise RegistrationError(
                f"the module{where} is wrapped in FullyShardedDataParallel, which flattens its "
                f"parameters and frees them "
                "between steps: register tensors of your own, and in mutate() copy into them what "
                "`FullyShardedDataParallel.summon_full_params(module)` shows"
            )
        return next(
            (inner for wrapper, inner in self._wrappers if isinstance(module, wrapper)), None
        )


def _stand_ins(module: Any) -> Iterator[Any]:
    """What FSDP2 has put in the place of parameters of this module until they are sharded again."""
    # torch does not promise these names: without them, nothing is known
    with contextlib.suppress(AttributeError):
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or filter(
            None, [state._fsdp_param_group]
        ):
            for each in group.fsdp_params:
                if each.sharded_state.name != "SHARDED":
                    yield getattr(each._module_info.module, each._module_info.param_name)


def _storages(tensors: Iterable[Any]) -> Iterator[int]:
    """Where their bytes are, of those that can tell."""
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            yield tensor.untyped_storage().data_ptr()


def _defined(where: str, name: str) -> type | None:
    """A class of torch's, if the module that defines it was imported: else there can be no instance
    of it.
    """
    kind: type | None = getattr(sys.modules.get(where), name, None)
    return kind
