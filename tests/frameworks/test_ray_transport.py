"""`TensorHubTransport` itself, called as Ray calls it, in a driver on a local Ray; and where a
worker on Ray is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import (
    CoordinatorUnavailable,
    Location,
    StateError,
    VersionConflict,
    VersionUnavailable,
    sync,
)

ray: Any = pytest.importorskip("ray")

from ray._private.ray_constants import RDT_FETCH_FAIL_TIMEOUT_SECONDS  # noqa: E402
from ray.experimental.rdt.tensor_transport_manager import (  # noqa: E402
    CommunicatorMetadata,
    TensorTransportManager,
)

from tensorhub.integrations import ray as tensorhub_ray, ray_transport  # noqa: E402
from tensorhub.integrations.ray_transport import FETCH_S, PublishedTensors, TensorHubTransport  # noqa: E402
from tensorhub.runtime.worker.worker import Worker  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.timeout(120)]

BY = CommunicatorMetadata()
DEADLINE_S = 60
SERVED = [pytest.param(2**28, id="fetched"), pytest.param(0, id="served while it fills")]


@pytest.fixture(scope="module", autouse=True)
def on_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                "local",
                num_cpus=1,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                log_to_driver=False,
            )
            yield
        finally:
            ray.shutdown()


def only(tensor: torch.Tensor) -> float:
    """What all of its elements are."""
    (value,) = set(tensor.tolist())
    return float(value)


class Side(TensorHubTransport):
    """The transport of one process."""

    @property
    def worker(self) -> Worker:
        worker = self._hub()._async._worker
        assert isinstance(worker, Worker)
        return worker

    def put(self, obj_id: str, *values: float) -> PublishedTensors:
        self.tensors = [torch.full((1000,), float(value)) for value in values]
        return self.extract_tensor_transport_metadata(obj_id, self.tensors)

    def get(self, of: PublishedTensors, into: list[torch.Tensor] | None = None) -> list[float]:
        return [only(each) for each in self.recv_multiple_tensors("o", of, BY, into)]

    def close(self) -> None:
        if self._joined is not None:
            self._joined.close()


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    """A source and a destination."""
    # so long an object is waited for that nobody has any more
    monkeypatch.setattr(ray_transport, "FETCH_S", 1.0)
    for name in ("TENSORHUB_TOKEN", "TENSORHUB_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with sync.serve(token="") as coordinator:
        monkeypatch.setenv("TENSORHUB_ADDRESS", coordinator.address)
        made = Side(), Side()
        yield made
        for each in made:
            each.close()


def eventually(holds: Any) -> None:
    waited = threading.Event()
    for _ in range(DEADLINE_S * 100):
        if holds():
            return
        waited.wait(0.01)
    raise AssertionError("it never came")


@pytest.mark.parametrize("served_bytes_min", SERVED)
def test_an_object_is_published_until_ray_frees_it(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, served_bytes_min: int
) -> None:
    monkeypatch.setattr(ray_transport, "SERVED_BYTES_MIN", served_bytes_min)
    source, destination = sides
    first, second = source.put("first", 1, 2), source.put("second", 3)
    assert (first.model, second.model, first.version < second.version) == (
        second.model,
        first.model,
        True,
    )
    assert (destination.get(second), destination.get(first)) == ([3], [1, 2])
    own = [torch.zeros(1000), torch.zeros(1000)]
    got = destination.recv_multiple_tensors("first", first, BY, own)
    assert [each is mine for each, mine in zip(got, own, strict=True)] == [True, True]
    assert only(own[1]) == 2
    source.garbage_collect("first", first, [])
    with pytest.raises(VersionUnavailable) as gone:
        destination.get(first, own)
    assert gone.value.memory == ("intact" if served_bytes_min == 0 else "torn"), (
        "it is torn as far as can be known"
    )
    assert destination.get(second) == [3]
    source.garbage_collect("second", second, [])
    source.garbage_collect("second", second, [])  # Ray may say so twice
    source.garbage_collect("unknown", second, [])
    assert source._published == {}
    for side in sides:
        eventually(lambda side=side: not side.worker.router.handles)


@pytest.mark.parametrize("served_bytes_min", SERVED)
def test_a_fetch_has_an_end_before_ray_gives_up(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, served_bytes_min: int
) -> None:
    assert 0 < FETCH_S < RDT_FETCH_FAIL_TIMEOUT_SECONDS
    monkeypatch.setattr(ray_transport, "SERVED_BYTES_MIN", served_bytes_min)
    source, destination = sides
    of, timeouts = source.put("o", 1), list[float | None]()
    timeout_s = Worker.timeout_s

    def noted(worker: Worker, timeout: float | None) -> float:
        timeouts.append(timeout)
        return timeout_s(worker, timeout)

    assert destination.get(of) == [1]
    monkeypatch.setattr(Worker, "timeout_s", noted)
    assert destination.get(of) == [1]
    assert ray_transport.FETCH_S in timeouts


def test_an_object_without_tensors_is_nothing_to_publish(sides: tuple[Side, Side]) -> None:
    source, destination = sides
    of = source.extract_tensor_transport_metadata("o", [])
    assert (of.tensor_meta, of.tensor_device) == ([], None)
    assert destination.recv_multiple_tensors("o", of, BY) == []
    assert destination.recv_multiple_tensors("o", of, BY, []) == []
    source.garbage_collect("o", of, [])
    assert source._joined is destination._joined is None


def test_an_object_that_cannot_be_published_leaves_nothing(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = sides

    def refused(weights: sync.Weights, version: int) -> None:
        raise VersionConflict("the number was used")

    with monkeypatch.context() as patch:
        patch.setattr(sync.Weights, "publish", refused)
        with pytest.raises(VersionConflict):
            source.put("o", 1)
    eventually(lambda: not source.worker.router.handles)
    assert destination.get(source.put("o", 2)) == [2]  # as Ray asks again, when the task is retried


def test_a_source_whose_memory_was_written_is_let_go_all_the_same(sides: tuple[Side, Side]) -> None:
    """Ray frees it in a thread of its own, which must not end."""
    source, destination = sides
    of = source.put("o", 1)
    assert destination.get(of) == [1]
    source.tensors[0].fill_(2)
    source.garbage_collect("o", of, [])
    eventually(lambda: not source.worker.router.handles)


def test_fetches_run_beside_each_other_but_for_those_into_the_callers_tensors(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = sides
    of, other, go_on = source.put("o", 1), source.put("other", 2), threading.Event()
    receive = Side.recv_multiple_tensors

    def held(side: Side, *given: Any) -> list[torch.Tensor]:
        assert go_on.wait(DEADLINE_S)
        return receive(side, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Side, "recv_multiple_tensors", held)
        pending = [
            destination.fetch_multiple_tensors(name, each, BY)
            for name, each in (("o", of), ("other", other))
        ]
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError):
                destination.wait_fetch_complete(pending[0], timeout)
        go_on.set()
        got = [
            destination.wait_fetch_complete(each, timeout)
            for each, timeout in zip(pending, (-1, DEADLINE_S), strict=True)
        ]
        assert [only(each) for (each,) in got] == [1, 2]
    own = [torch.zeros(1000)]
    request = destination.fetch_multiple_tensors("o", of, BY, own)
    assert only(own[0]) == 1, "nobody may write it once this has returned"
    assert destination.wait_fetch_complete(request, 0)[0] is own[0]
    source.garbage_collect("o", of, [])
    failing = destination.fetch_multiple_tensors("o", of, BY)
    with pytest.raises(VersionUnavailable):
        destination.wait_fetch_complete(failing)


def test_a_process_joins_once_where_ray_has_it(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = sides
    monkeypatch.setattr(ray_transport, "location", lambda: Location(site="elsewhere", rack="r"))
    for number in range(2):
        source.put(f"{number}", 1)
    (model,) = source._hub().describe()
    assert [(each.location.site, each.location.rack) for each in model.workers] == [
        ("elsewhere", "r")
    ]


def test_a_release_that_was_not_tested_is_accepted_if_it_makes_these_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Newer(TensorTransportManager):
        def garbage_collect(self, obj_id: str, spans: list[Any]) -> None: ...

    monkeypatch.setattr(ray_transport, "TESTED", ("1.0",))
    monkeypatch.setattr(ray_transport, "register_tensor_transport", lambda *given: None)
    ray_transport.register_transport()
    assert "release_untested" in caplog.text
    monkeypatch.setattr(ray_transport, "TensorTransportManager", Newer)
    with pytest.raises(StateError, match=r"garbage_collect has other arguments.*\['spans'\]"):
        ray_transport.register_transport()


def test_a_coordinator_that_nobody_has_started_is_asked_for_by_name() -> None:
    with pytest.raises(
        CoordinatorUnavailable,
        match=r"has no coordinator 'mine': .*start_coordinator\(\) starts one",
    ):
        tensorhub_ray.look_up("mine")
