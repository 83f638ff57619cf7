"""All workers of one vLLM engine, which succeed or fail together.

Responsible for what they tell each other, and for which of them raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed
from vllm.distributed import parallel_state

from tensorhub.errors import StateError, TensorHubError


@dataclass(frozen=True)
class Outcome:
    """Of a call on all workers. `error`: what to raise here. `are_torn`: of each worker that has
    failed, whether its weights are torn. `told`: what each worker has told, by rank.
    """

    error: TensorHubError | None = None
    are_torn: tuple[bool, ...] = ()
    told: Mapping[int, Any] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        return bool(self.are_torn)


class Ranks:
    """The workers of one engine, seen from one of them."""

    def __init__(self, parallel_config: Any) -> None:
        self._parallel = parallel_config

    @property
    def rank(self) -> int:
        return int(self._parallel.rank)

    @property
    def count(self) -> int:
        return int(self._parallel.world_size)

    @property
    def speaks(self) -> bool:
        """Whether this worker raises for all workers of its engine.

        Only the last one does: vLLM's executor reads answers in the order of ranks up to the first
        error, and takes what it leaves unread for answers to later calls.
        """
        return self.rank == self.count - 1

    def together(
        self,
        call: Callable[[], object],
        *,
        is_torn: Callable[[], bool],
        tell: Callable[[], Any] = lambda: None,
    ) -> Outcome:
        """Make a call on all workers, and have each tell the others something after it."""
        error: Exception | None = None
        told = None
        try:
            call()
            told = tell()
        except Exception as each:
            error = each
        text = None if error is None else f"{type(error).__name__}: {error}"
        said = self.share((text, is_torn(), told))
        failed = {rank: text for rank, (text, _, _) in sorted(said.items()) if text is not None}
        are_torn = tuple(said[rank][1] for rank in failed)
        of_all = {rank: told for rank, (_, _, told) in said.items()}
        if not failed or not self.speaks:
            return Outcome(None, are_torn, of_all)
        if len(said) == 1 and isinstance(error, TensorHubError):
            return Outcome(error, are_torn, of_all)
        texts = [
            f"worker {rank}: {text}" if len(said) > 1 else text for rank, text in failed.items()
        ]
        together = StateError("; ".join(texts))
        together.__cause__ = error
        return Outcome(together, are_torn, of_all)

    def share(self, mine: Any) -> dict[int, Any]:
        """What all workers of this engine say, by rank. They wait for each other as long as vLLM's
        groups do.
        """
        said = {self.rank: mine}
        if self.count > 1:
            for name in ("get_tp_group", "get_pcp_group", "get_pp_group"):
                if hasattr(parallel_state, name):
                    group = getattr(parallel_state, name)()
                    of_all: list[Any] = [None] * group.world_size
                    torch.distributed.all_gather_object(of_all, said, group=group.cpu_group)
                    said = {rank: outcome for each in of_all for rank, outcome in each.items()}
        return said
