"""The context that the parts of one rank's machine share: its shard, the time, the single way to
act. It has no rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensorhub.messages import FromWorker
from tensorhub.worker.calls import Action, LocalCopy, Say
from tensorhub.worker.known_parts import KnownParts, KnownReadings
from tensorhub.worker.manifests import KnownManifests
from tensorhub.worker.registration_session import RegistrationSession, Shard


class Copies(Protocol):
    """The memories of one worker; see `worker.local_copies`."""

    def find(self, shard: Shard, content_id: str, grid_id: str) -> list[LocalCopy]: ...

    def keep(self, shard: Shard, content_id: str, grid_id: str) -> bool: ...


class MemberContext:
    """One rank under one registration. `requests` and `generations` mint numbers that are used
    once.
    """

    def __init__(
        self,
        shard: Shard,
        requests: Callable[[], int],
        generations: Callable[[], int],
        copies: Copies,
        manifests: KnownManifests,
        parts: KnownParts,
    ) -> None:
        self.shard = shard
        self.session = RegistrationSession(shard, requests)
        self.new_request = requests
        self.new_generation = generations
        self.copies = copies  # that a fill of this rank may copy from
        self.manifests = manifests
        self.parts = parts  # of publications, that this worker knows
        self.readings = KnownReadings()
        self.now = 0.0
        self.cause = 0  # ordinal number of the input being handled
        self._actions: list[Action] = []

    @property
    def title(self) -> str:
        """The rank's name in error texts."""
        return self.shard.title

    def enter(self, now: float) -> None:
        """An input begins to be handled."""
        self.now = max(now, self.now)
        self.cause += 1

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def say(self, message: FromWorker) -> None:
        """Tell the coordinator. Without a connection the message is dropped (what matters is
        restated over the next one).
        """
        if self.session.online:
            self.act(Say(message))
