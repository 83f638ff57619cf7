"""Which adapters a vLLM worker holds, and when an engine loads one; vLLM itself is not needed
(tests/frameworks has it).
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tensorhub.errors import StateError, VersionConflict, VersionUnavailable
from tensorhub.integrations import vllm_lora, vllm_lora_requests
from tensorhub.integrations.vllm_lora import Adapters

NUMBERS = {("poet", 1): 11, ("poet", 2): 12, ("poet", 3): 13, ("critic", 1): 21}


def request(model: str, version: int, *, inplace: bool = False) -> Any:
    """As `adapter_request` makes it."""
    number = NUMBERS[model, version]
    path = f"tensorhub:{model}@{version}"
    return SimpleNamespace(lora_path=path, lora_int_id=number, load_inplace=inplace)


class Manager:
    """vLLM's, of adapters. `loaded`: by number."""

    def __init__(self) -> None:
        self._adapter_manager = self
        self.loaded: set[int] = set()
        self.fetched: list[tuple[str, int]] = []
        self.has_current = True

    def list_adapters(self) -> set[int]:
        return self.loaded

    def remove_adapter(self, number: int) -> None:
        self.loaded.discard(number)

    def fetch(self, model: str, version: int) -> Any:
        self.fetched.append((model, version))
        return {"a": torch.zeros(1)}, self

    def is_current(self) -> bool:
        return self.has_current

    def conflict(self) -> VersionConflict:
        return VersionConflict("published anew")

    def remove_all_adapters(self) -> None:
        self.loaded.clear()


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def adapters(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    monkeypatch.setattr(vllm_lora, "_made", lambda manager, request, model, tensors: model)
    return Adapters(nn.Module(), manager.fetch)


def load(adapters: Adapters, manager: Manager, *asked: Any) -> None:
    for each in asked:
        adapters.fetch(manager, each)
        adapters.load(manager, each)
        manager.loaded.add(each.lora_int_id)


def test_the_last_two_versions_of_each_adapter_are_held_and_what_requests_need(
    adapters: Adapters, manager: Manager
) -> None:
    first, second, third = (request("poet", version) for version in (1, 2, 3))
    load(adapters, manager, first, request("critic", 1), second)
    assert sorted(adapters.keep([11])) == [11, 12, 21]
    load(adapters, manager, third)
    assert sorted(adapters.keep([11, 13])) == [11, 12, 13, 21]  # a queued request needs the first
    assert sorted(adapters.keep([13])) == [12, 13, 21]
    assert manager.loaded == {12, 13, 21}
    assert adapters.state() == {"poet": [2, 3], "critic": [1]}
    assert manager.fetched == [("poet", 1), ("critic", 1), ("poet", 2), ("poet", 3)]


def test_what_vllm_has_dropped_is_loaded_from_memory_and_what_it_was_told_to_unload_is_freed(
    adapters: Adapters, manager: Manager
) -> None:
    asked = request("poet", 1)
    load(adapters, manager, asked)
    manager.loaded.clear()
    load(adapters, manager, asked)
    assert manager.fetched == [("poet", 1)]
    manager.loaded.clear()
    adapters.forget(11)
    assert adapters.keep([]) == []
    load(adapters, manager, asked)
    assert manager.fetched == [("poet", 1)] * 2


def test_what_was_published_anew_is_refused_to_new_requests_alone(
    adapters: Adapters, manager: Manager
) -> None:
    """A running request, whose adapter vLLM has dropped meanwhile, goes on with what it had."""
    asked = request("poet", 1)
    load(adapters, manager, asked)
    manager.has_current = False
    with pytest.raises(VersionConflict, match="published anew"):
        adapters.asked(manager, asked)
    adapters.unload()  # the memory of all slots goes
    assert manager.loaded == set()
    load(adapters, manager, asked)
    assert manager.fetched == [("poet", 1)]
    adapters.forget(11)
    adapters.asked(manager, request("poet", 1, inplace=True))
    assert manager.fetched == [("poet", 1)] * 2


class Core:
    """vLLM's engine, with two workers. `told`: what they answer."""

    output_queue = None

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={})
        self.model_executor = self
        self.told: list[tuple[Exception | None, list[int]]] = []
        self.asked: list[list[int]] = []
        self.refused: list[str] = []

    def collective_rpc(self, call: Any, args: tuple[Any, list[int]] | None = None) -> Any:
        if args is None:
            return []
        self.asked.append(args[1])
        return self.told

    def add_request(self, request: Any, wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def add_lora(self, lora: Any) -> str:
        return "vLLM's"

    def remove_lora(self, number: int) -> None:
        pass

    def _send_error_outputs_to_client(self, ids: list[str], client: int) -> None:
        self.refused += ids


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Watched(Core):
        """A class of its own for each test: it is changed."""

        add_request, add_lora = Core.add_request, Core.add_lora
        remove_lora, collective_rpc = Core.remove_lora, Core.collective_rpc

    class Llm:
        def add_request(self, request_id: str, prompt: Any, lora_request: Any = None) -> None:
            pass

    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, kind in (("core", {"EngineCore": Watched}), ("llm_engine", {"LLMEngine": Llm})):
        module = ModuleType(f"vllm.v1.engine.{name}")
        vars(module).update(kind)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vllm_lora_requests.watch()
    made = Watched()
    # vLLM's executor is another object than its engine
    made.model_executor = SimpleNamespace(  # type: ignore[assignment]
        collective_rpc=lambda call, args: Core.collective_rpc(made, call, args)
    )
    return made


def queued(name: str, lora: Any) -> Any:
    return SimpleNamespace(request_id=name, lora_request=lora, client_index=0)


def test_a_version_is_loaded_once_and_anew_where_that_is_asked_or_was_undone(core: Any) -> None:
    core.told = [(None, [11, 12]), (None, [11])]
    core.add_request(queued("first", request("poet", 1)))
    core.add_request(queued("again", request("poet", 1)))
    assert core.asked == [[11]]
    core.add_request(queued("base", None))
    core.add_request(queued("second", request("poet", 2)))  # only one worker holds it
    assert core.asked[1:] == [[11, 12]]  # what queued requests need stays
    core.add_lora(request("poet", 1, inplace=True))
    assert core.asked[2:] == [[11, 12]]
    for undo, given in (("remove_lora", 11), ("collective_rpc", "tensorhub_update")):
        core.asked.clear()
        getattr(core, undo)(given)
        core.add_request(queued("after", request("poet", 1)))
        assert len(core.asked) == 1


def test_workers_are_asked_again_after_a_while(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a version that they hold was published anew."""
    clock = [0.0]
    monkeypatch.setattr(vllm_lora_requests, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    core.told = [(None, [11, 12])]
    for second, asks in ((0.0, 1), (0.9, 1), (1.1, 2)):
        clock[0] = second
        core.add_request(queued(f"{second}", request("poet", 1)))
        assert len(core.asked) == asks
    core.told = [(VersionConflict("published anew"), [])]
    clock[0] = 9.0
    core.add_request(queued("late", request("poet", 1)))
    assert core.refused == ["late"]


def test_a_version_that_any_worker_cannot_load_is_its_requests_error(core: Any) -> None:
    core.told = [(None, []), (VersionUnavailable("it is gone"), [])]
    core.add_request(queued("bad", request("poet", 1)))
    assert core.refused == ["bad"]
    with pytest.raises(VersionUnavailable, match="it is gone"):
        core.add_lora(request("poet", 1))
    core.told = [(StateError("no room"), []), (None, [])]
    core.add_request(queued("worse", request("poet", 2)))
    assert core.refused == ["bad", "worse"]
    assert core.scheduler.requests == {}
    core.add_request(queued("base", None))
    assert list(core.scheduler.requests) == ["base"]


def test_adapters_of_files_are_vllms(core: Any) -> None:
    files = SimpleNamespace(lora_path="/adapter", lora_int_id=1, load_inplace=False)
    assert core.add_lora(files) == "vLLM's"
    core.add_request(queued("files", files))
    assert core.asked == []
