"""The ranks of one engine of a fleet with one version on all engines, or none: see `one_version`.

Rank 0 has the engine's seat, and takes the trainer's calls in threads of its own. Each step of the
engine, on all its ranks, is one use of the weights: it waits until a version may be served, and a
flip waits for the step to end. So the engine itself is not paused, and requests go on with the new
weights.

The other ranks of a tensor-parallel engine begin a step when rank 0 has begun it, and do in a
thread of their own what rank 0 orders.

Responsible for one rank. Not responsible for the seat (`one_version_engine`), nor for how a
publication gets into the model: that is a `Part`'s, one for each framework.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tensorhub import sync
from tensorhub.errors import ManifestMismatch, StateError, TensorHubError, some, text_of
from tensorhub.integrations.one_version_engine import Engine, fill
from tensorhub.logs import get_logger
from tensorhub.types import VersionInfo

log = get_logger(__name__)
PREFIXES = (
    "an engine with a prefix cache cannot join a fleet with one version: after a flip it would "
    "answer from prefixes of the old version. Start it with "
)
FOREVER = timedelta(days=3650)  # a rank waits for rank 0, and the framework ends it with rank 0


def not_quick(casts: Mapping[str, tuple[str, str]], loaded: str) -> TensorHubError:
    """Why a version cannot be put in place quickly. `casts`: published tensors that the framework
    would cast, with the dtypes from and to; `loaded`: what its loader alone can load.
    """
    if not casts:
        return StateError(
            f"{loaded}, so no version can be put in place quickly: update this engine outside of "
            f"the fleet"
        )
    differences = tuple(
        f"{name!r}: published as {has}, and the engine has {wants}"
        for name, (has, wants) in casts.items()
    )
    return ManifestMismatch(
        f"{len(casts)} published tensor(s) have another dtype than the engine, and a fleet with "
        f"one version casts none: publish them with the engine's "
        f"(tensorhub.conversion.register_converted); {some(differences, '; ', most=3)}",
        differences=differences,
    )


class Part(ABC):
    """One rank's part of two slots, in host memory."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.device, self._timeout_s = device, timeout_s
        self._plan: object = None
        self._tensors: list[Mapping[str, torch.Tensor]] = []
        self._weights: list[sync.Weights] = []
        self._infos: list[VersionInfo | None] = [None, None]
        self.lock = threading.Lock()  # of the model: a step, a plan, or a version that is put there

    # -- what differs between frameworks

    @abstractmethod
    def planned(self, version: int) -> tuple[VersionInfo, object, Any]:
        """The version, the plan for its tensors, and what keeps it from being all that this rank
        needs. The plan is another object where tensors have changed. Takes `lock` as needed.
        """

    @abstractmethod
    def mismatch(self, version: int, faults: Sequence[Any]) -> TensorHubError | None:
        """What is wrong with the version, given each rank's faults."""

    @abstractmethod
    def allocate(self) -> Mapping[str, torch.Tensor]:
        """Host memory for this rank's tensors of the plan. Called with `lock`."""

    @abstractmethod
    def register(self, tensors: Mapping[str, torch.Tensor], word: str) -> sync.Weights:
        """`word`: another one for each slot."""

    @abstractmethod
    def write(self, tensors: Mapping[str, torch.Tensor], info: VersionInfo) -> None:
        """Have the model hold them. Called with `lock`."""

    # -- what rank 0 orders

    def holding(self, version: int) -> set[int]:
        return {n for n, each in enumerate(self._weights) if each.version == version}

    def plan(self, slot: int, version: int) -> Any:
        self.synchronize()
        info, plan, faults = self.planned(version)
        if plan is not self._plan:
            self.close()
            with self.lock:
                self._tensors = [self.allocate(), self.allocate()]
            self._weights = [self.register(self._tensors[n], f"-{n}") for n in (0, 1)]
            self._infos, self._plan = [None, None], plan
        self._infos[slot] = info
        return faults

    def fetch(self, slot: int, version: int) -> None:
        fill(self._weights[slot], version, self._timeout_s)

    def put(self, slot: int) -> None:
        with self.lock:
            self.synchronize()
            info = self._infos[slot]
            if info is None or not self._weights or self._weights[slot].version is None:
                raise StateError("there is no version to put in place")
            self.write(self._tensors[slot], info)
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for what the rank's steps have begun, in any thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize()

    def close(self) -> None:
        for each in self._weights:
            each.close(abandon=True)
        self._weights, self._plan = [], None


class Member:
    """One rank. `ranks`: the engine's, in torch's default group, rank 0 first. `wait_s`: how long a
    step waits for a version that may be served; then it raises. `settings`: of `Engine`.
    """

    def __init__(
        self,
        part: Part,
        rank: int,
        ranks: Sequence[int],
        hub: sync.Hub,
        model: str,
        *,
        wait_s: float,
        **settings: Any,
    ) -> None:
        self.part, self._ranks, self._wait_s = part, list(ranks), wait_s
        self._steps = self._orders = None
        self._lock = threading.Lock()  # of orders
        self.engine: Engine | None = None
        if len(ranks) > 1:
            self._steps, self._orders = _new_group(self._ranks), _new_group(self._ranks)
        if rank == 0:
            self.engine = Engine(hub, model, self, **settings)
        else:
            threading.Thread(target=self._obey, name="tensorhub-orders", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The weights stay, and are those of the version that is served; on all ranks together.

        Raises StateError: no version may be served.
        """
        with ExitStack() as stack:
            if self.engine is None:
                self._agree(False)
            else:
                try:
                    # a step that ends too late ends no engine: its tokens are the old version's
                    stack.enter_context(self.engine._use(self._wait_s))
                except BaseException:
                    self._agree(False)
                    raise
                self._agree(True)
            stack.enter_context(self.part.lock)
            yield

    def _agree(self, may_begin: bool) -> None:
        """Rank 0 tells the others whether a step begins."""
        if self._steps is None:
            return
        flag = torch.tensor([may_begin])
        dist.broadcast(flag, self._ranks[0], group=self._steps)
        if self.engine is None and not flag.item():
            raise StateError("no version may be served now: see rank 0 of this engine")

    def lost(self) -> None:
        """The weights in place are gone: serve none until they were put in place anew."""
        if self.engine is not None:
            self.engine.lost()

    def distrust(self) -> None:
        """The model is not what it should be: take all of a version anew."""
        self.lost()
        self.part.close()

    # -- the slots of rank 0's engine, on all ranks

    def holding(self, version: int) -> int | None:
        # of all ranks: one of them may have failed to fetch what the others have
        return min(set.intersection(*self._order("holding", version)), default=None)

    def fill(self, slot: int, version: int) -> None:
        faults = self._order("plan", slot, version)
        if error := self.part.mismatch(version, faults):
            raise error
        self._order("fetch", slot, version)

    def put(self, slot: int) -> None:
        self.part.synchronize()  # other ranks have begun what this one has ended
        self._order("put", slot)

    def close(self) -> None:
        self._order("close")

    def _order(self, call: str, *given: Any) -> list[Any]:
        """Make a call on all ranks. Returns what each has answered; raises the first error."""
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
        """What each rank answers, with its error."""
        answer: Any = None
        error: Exception | None = None
        try:
            with torch.inference_mode(False), torch.no_grad():
                answer = getattr(self.part, call)(*given)
        except Exception as each:
            error = each
        if self._orders is None:
            return [(answer, error)]
        text = None if error is None else text_of(error)
        said: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(said, (answer, text), group=self._orders)
        return said

    def _obey(self) -> None:
        order: list[Any] = [None]
        while order[0] is None or order[0][0] != "close":
            try:
                dist.broadcast_object_list(order, self._ranks[0], group=self._orders)
                self._answer(*order[0])
            except Exception as error:  # rank 0 is gone
                log.warning("engine_orders_ended", reason=text_of(error))
                return


def _new_group(ranks: list[int]) -> Any:
    """Of these ranks alone, for one thread on each."""
    return dist.new_group(ranks, FOREVER, "gloo", use_local_synchronization=True)
