"""What was decided for the engines of a model, kept by the coordinator: see `one_version`.

A record is a number that was published under a model of its own. The coordinator publishes a number
once, so of two processes that record one number only the first succeeds. It keeps the numbers, and
how many bytes each had, also where the publisher has died.

Records are read from one history, and what follows from them is recorded in that one only: not with
a coordinator that has come back without its state.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tensorhub import sync
from tensorhub.errors import (
    InvalidValue,
    LeaseLost,
    RegistrationError,
    StateError,
    VersionConflict,
    VersionUnavailable,
    shown,
)
from tensorhub.integrations.one_version import ABORT, COMMIT, Records
from tensorhub.integrations.trainer_group import register_trainer
from tensorhub.types import ModelInfo

KEPT = 4  # records that a process goes on to hold: the coordinator lists what is held


def check_lease(hub: sync.Hub, lease_s: float) -> None:
    """Raises InvalidValue: an engine that the coordinator lists no more may still serve."""
    most = hub._async._worker.lease_s
    if not 0 < lease_s < most:
        raise InvalidValue(
            f"lease_s={shown(lease_s)}: give more than 0, and less than the coordinator's, {most:g}"
        )


class RecordLog:
    """The records of one model."""

    def __init__(self, hub: sync.Hub, model: str, timeout_s: float) -> None:
        self._hub, self._timeout_s = hub, timeout_s
        self._model, self._flips, self._commits = model, f"{model}/flips", f"{model}/commits"
        self._held: deque[sync.Weights] = deque()
        self._ready: list[sync.Weights] = []
        self.history = self._ready_in = self.current_history  # `history`: that was read last

    @property
    def current_history(self) -> int:
        """Another number once the coordinator has lost its state."""
        return self._hub._async._worker.router.losses

    def lead(self) -> sync.Weights:
        """Be the one trainer that decides, until the result is closed. Waits for one that may be
        dead (`trainer_group`). Raises StateError: another one is.
        """
        source = {"trainer": np.zeros(1, np.uint8)}
        try:
            return register_trainer(self._hub, f"{self._model}/trainer", source, self._timeout_s)
        except RegistrationError as error:
            raise StateError(
                f"another trainer updates the engines of {self._model!r}: {error}", retryable=True
            ) from error

    def read(self) -> Records:
        """Raises as `Hub.describe`."""
        self.history = self.current_history
        return self._read()

    def _read(self) -> Records:
        flips = self._described(self._flips)
        commits = self._described(self._commits)  # after it: of what newer records hide
        known = () if flips is None else flips.versions
        self._check_history()
        return Records(
            {each.version: each.nbytes for each in known}, commits.mark if commits else None
        )

    def _check_history(self) -> None:
        if self.current_history != self.history:
            raise LeaseLost(
                f"the coordinator has come back without its state, and knows nothing of what was "
                f"decided for the engines of {self._model!r} (`serve --state-dir` keeps it): "
                f"update them again"
            )

    def _described(self, model: str) -> ModelInfo | None:
        try:
            return self._hub.describe(model, self._timeout_s, limit=0)
        except VersionUnavailable:
            return None

    def begin(self, attempt: int) -> bool:
        """Whether this process alone makes the attempt, and those after it that it begins likewise,
        or once it has fenced the one before: the one before is aborted.
        """
        return self._append(self._flips, 2 * attempt - 1, ABORT)

    def fence(self, attempt: int) -> bool:
        """Whether it was recorded: nothing newer was."""
        return self._append(self._flips, 2 * attempt, 1)

    def decide(self, attempt: int, is_commit: bool) -> bool:
        """Record a decision, unless another one was recorded first. Returns whether the attempt is
        committed.
        """
        if not self._append(self._flips, 2 * attempt + 1, COMMIT if is_commit else ABORT):
            return bool(self._read().decision(attempt))
        return is_commit

    def note(self, version: int) -> None:
        """A commit of that version was recorded. Newer records may hide that one from now on."""
        self._append(self._commits, version, 1)

    def prepare(self) -> None:
        """Register a fence and a commit beforehand, to have them recorded the sooner."""
        if self._ready_in != self.history:
            self._held += self._ready
            self._ready, self._ready_in = [], self.history
        while len(self._ready) < 2:
            self._ready.append(self._register(self._flips, 1))

    def _register(self, model: str, nbytes: int) -> sync.Weights:
        while len(self._held) > KEPT:  # here, as a flip waits for what records a number
            self._held.popleft().close()
        return self._hub.register(model, {"record": np.zeros(nbytes, np.uint8)})

    def _append(self, model: str, number: int, nbytes: int) -> bool:
        is_ready = self._ready and (model, nbytes) == (self._flips, 1)
        weights = self._ready.pop() if is_ready else self._register(model, nbytes)
        try:
            self._check_history()  # if it changes after this, `publish` raises LeaseLost
            weights.publish(number, self._timeout_s)
        except VersionConflict:
            weights.close()
            return False
        except BaseException:  # perhaps it was recorded
            self._held.append(weights)
            raise
        self._held.append(weights)
        return True
