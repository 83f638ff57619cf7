"""A trainer's rank 0 that is handed one tensor at a time, and its vLLM engines, with
`vllm_worker.WorkerExtension`: what the adapters of SkyRL and OpenRLHF send by.

Not responsible for pausing the engines, which the framework does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tensorhub.api.arguments import is_list
from tensorhub.errors import InvalidType, InvalidValue, TensorHubError, shown
from tensorhub.integrations.checkpoint_engine import Exchange
from tensorhub.integrations.fleet import Fleet, together
from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings
from tensorhub.runtime.control.addresses import split_addresses

if TYPE_CHECKING:
    import torch

EXTENSION = "tensorhub.integrations.vllm_worker.WorkerExtension"


class EngineFeed:
    """`engines`: servers' URLs, or objects with vLLM's `collective_rpc`. `settings`: see
    `Exchange`; an address is needed.
    """

    def __init__(self, engines: Sequence[Any], **settings: Any) -> None:
        if not is_list(engines):
            raise InvalidType(f'servers={shown(engines)}: give a list, as ["http://HOST:PORT"]')
        self._exchange = exchange(**settings)
        timeout_s = self._exchange.timeout_s
        meeting = self._exchange.join("sender", self._exchange.prepare())
        self._next = meeting.next  # a number that another trainer has used meanwhile is refused
        address = split_addresses(meeting.address)
        init = Settings(list(address), self._exchange.model, pause=None, timeout_s=timeout_s)
        sessions = [Session(ExtensionClient(each, timeout_s), init) for each in engines]
        # the framework generates with all of them, so none is left out
        self._fleet = Fleet(sessions, timeout_s=timeout_s, failures_max=sys.maxsize)

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Publish copies of the tensors as the next version, and have each engine take it. Returns
        its number. Raises what `streamed.Sender.send` raises (VersionConflict: another trainer
        publishes this model), and the first engine's error with a note for each other one.
        """
        version = self._next
        try:
            self._exchange.send(weights, version)
        except TensorHubError as error:
            self._next += error.memory == "in_doubt"  # it may be published all the same
            raise
        self._next += 1
        report = self._fleet.update(self._exchange.published(version))
        if report.failed:
            raise together(report.failed)
        return version

    def close(self) -> None:
        self._fleet.close()
        self._exchange.close()


def exchange(**settings: Any) -> Exchange:
    """Raises InvalidValue: there is no address. Commands call it before they wait for Ray."""
    made = Exchange(host="127.0.0.1", **settings)
    if not made.has_address:
        raise InvalidValue(
            "engines need a coordinator that they reach: start `tensorhub serve`, and set "
            "TENSORHUB_ADDRESS for the trainer's processes"
        )
    return made


def send(feed: EngineFeed | None, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Have rank 0's feed send the weights. Each rank runs through them, also after an error: all of
    them gather each tensor.
    """
    left = iter(weights)
    try:
        if feed is not None:
            feed.send(left)
    finally:
        for _ in left:
            pass
