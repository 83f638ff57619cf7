"""One vLLM engine of a fleet with one version on all engines, or on none: see `one_version`.

The worker of rank 0 has the engine's seat, and takes the trainer's calls in threads of its own.
Each step of the engine, on all its workers, is one use of the weights: `execute_model` waits until
a version may be served, and a flip waits for the step to end. So vLLM itself is not paused, and
requests go on with the new weights.

The other workers of a tensor-parallel engine begin a step when rank 0 has begun it, and do in a
thread of their own what rank 0 orders.

Responsible for one worker. Not responsible for the seat (`one_version_engine`), nor for how a
publication gets into the model (`vllm_updater`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state

from tensorhub import sync
from tensorhub.errors import StateError, TensorHubError, text_of
from tensorhub.integrations.one_version_engine import Engine
from tensorhub.integrations.vllm_plan import Faults, Plan, mismatch
from tensorhub.integrations.vllm_updater import Updater
from tensorhub.logs import get_logger
from tensorhub.types import VersionInfo

log = get_logger(__name__)
FOREVER = timedelta(days=3650)  # a worker waits for rank 0, and vLLM ends it with rank 0


class Part:
    """One worker's part of two slots. `points`: the model's tensors become a slot's, and are not
    copied: nothing has captured where they are.
    """

    def __init__(self, updater: Updater, device: torch.device, *, points: bool) -> None:
        self._updater, self._points, self._device = updater, points, device
        self._plan: Plan | None = None
        self._tensors: list[dict[str, torch.Tensor]] = []
        self._weights: list[sync.Weights] = []
        self._infos: list[VersionInfo | None] = [None, None]
        self.lock = threading.Lock()  # of the model: a step, a plan, or a version that is put there

    def holding(self, version: int) -> int | None:
        return next((n for n, each in enumerate(self._weights) if each.version == version), None)

    def plan(self, slot: int, version: int) -> Faults:
        """What keeps the version from being all that the worker needs."""
        updater = self._updater
        self.synchronize()
        info = updater.plan_for(version, self.lock)
        plan = updater.planned()
        if plan is not self._plan:
            if plan.loaded:
                raise StateError(
                    f"{len(plan.loaded)} tensor(s) can only be loaded by the model's load_weights, "
                    f"so no version can be put in place quickly: update this engine by `fleet`"
                )
            self.close()
            with self.lock:
                updater.note_live()
                self._tensors = [updater.host_memory(), updater.host_memory()]
            self._weights = [updater.register(self._tensors[n], f"-{n}") for n in (0, 1)]
            self._infos, self._plan = [None, None], plan
        self._infos[slot] = info
        return plan.faults

    def fetch(self, slot: int, version: int) -> None:
        self._weights[slot].update(version, timeout=self._updater.joined()[1].timeout_s)

    def put(self, slot: int) -> None:
        updater = self._updater
        with self.lock:
            self.synchronize()
            updater.sleep.check_awake()
            info = self._infos[slot]
            if info is None or not self._weights or self._weights[slot].version is None:
                raise StateError("there is no version to put in place")
            updater.is_torn = True
            updater.check_places(updater.planned())
            try:
                updater.write_staged(self._tensors[slot], points=self._points)
            finally:
                updater.note_live()
            updater.finish(info)
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for what the worker's steps have begun, in any thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize()

    def close(self) -> None:
        for each in self._weights:
            each.close(abandon=True)
        self._weights, self._plan = [], None


class Member:
    """One worker. `wait_s`: how long a step waits for a version that may be served; then it raises,
    and vLLM ends the engine. `settings`: see `Engine`.
    """

    def __init__(
        self,
        updater: Updater,
        device: torch.device,
        *,
        points: bool,
        wait_s: float,
        **settings: Any,
    ) -> None:
        self.part = Part(updater, device, points=points)
        self._count, self._wait_s = updater.ranks.count, wait_s
        self._steps = self._orders = None
        self._lock = threading.Lock()  # of orders
        self.engine: Engine | None = None
        self._sleep, self._before_sleep = updater.sleep, updater.sleep.before
        self._sleep.before = self._asleep
        if self._count > 1:
            self._ranks = parallel_state.get_tp_group().ranks
            self._steps, self._orders = _new_group(self._ranks), _new_group(self._ranks)
        if updater.ranks.rank == 0:
            hub, its = updater.joined()
            self.engine = Engine(hub, its.model, self, timeout_s=its.timeout_s, **settings)
        else:
            threading.Thread(target=self._obey, name="tensorhub-orders", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The weights stay, and are those of the version that is served; on all workers together.

        Raises StateError: no version may be served.
        """
        with ExitStack() as stack:
            if self.engine is None:
                self._agree(False)
            else:
                try:
                    stack.enter_context(self.engine.use(self._wait_s))
                except BaseException:
                    self._agree(False)
                    raise
                self._agree(True)
            stack.enter_context(self.part.lock)
            yield

    def _asleep(self, level: int) -> None:
        with self.part.lock:
            self._sleep.is_asleep = True
        if level > 1 and self.engine is not None:
            self.engine.lost()
        self._before_sleep(level)

    def _agree(self, may_begin: bool) -> None:
        """Rank 0 tells the others whether a step begins."""
        if self._steps is None:
            return
        flag = torch.tensor([may_begin])
        dist.broadcast(flag, self._ranks[0], group=self._steps)
        if self.engine is None and not flag.item():
            raise StateError("no version may be served now: see the worker of rank 0")

    def distrust(self) -> None:
        """The model is not what it should be: take all of a version anew."""
        if self.engine is not None:
            self.engine.lost()
        self.part.close()

    # -- the slots of rank 0's engine, on all workers

    def holding(self, version: int) -> int | None:
        return self.part.holding(version)

    def fill(self, slot: int, version: int) -> None:
        faults = self._order("plan", slot, version)
        if error := mismatch(f"version {version}", faults):
            raise error
        self._order("fetch", slot, version)

    def put(self, slot: int) -> None:
        self.part.synchronize()  # other workers have begun what this one has ended
        self._order("put", slot)

    def close(self) -> None:
        self._order("close")

    def _order(self, call: str, *given: Any) -> list[Any]:
        """Make a call on all workers. Returns what each has answered; raises the first error."""
        with self._lock:
            if self._orders is not None:
                dist.broadcast_object_list([(call, given)], self._ranks[0], group=self._orders)
            said = self._answer(call, given)
        failed = {rank: error for rank, (_, error) in enumerate(said) if error is not None}
        if failed and isinstance(failed.get(0), TensorHubError):
            raise failed[0]
        if failed:
            raise StateError("; ".join(f"worker {rank}: {failed[rank]}" for rank in failed))
        return [answer for answer, _ in said]

    def _answer(self, call: str, given: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """What each worker answers, with its error."""
        answer: Any = None
        error: Exception | None = None
        try:
            answer = getattr(self.part, call)(*given)
        except Exception as each:
            error = each
        if self._orders is None:
            return [(answer, error)]
        text = None if error is None else text_of(error)
        said: list[Any] = [None] * self._count
        dist.all_gather_object(said, (answer, text), group=self._orders)
        return said

    def _obey(self) -> None:
        torch.set_grad_enabled(False)
        order: list[Any] = [None]
        while order[0] is None or order[0][0] != "close":
            try:
                dist.broadcast_object_list(order, self._ranks[0], group=self._orders)
                self._answer(*order[0])
            except Exception as error:  # rank 0 is gone
                log.warning("engine_orders_ended", reason=text_of(error))
                return


def _new_group(ranks: list[int]) -> Any:
    """Of these workers alone, for one thread on each."""
    return dist.new_group(ranks, FOREVER, "gloo", use_local_synchronization=True)
