"""The engines of a model, by their URLs, as the coordinator knows them: a trainer need not name
them, and one that starts late is found.

Each engine publishes a version of a model of its own, in a group named by its URL, and never
unpublishes it. So it is listed while it lives. It looks after that itself: trainers would leave out
an engine that lives and is listed no more, and it would go on with old weights.

Responsible for that list. Not responsible for which engines are waited for (`fleet`).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from tensorhub import sync
from tensorhub.errors import (
    InvalidValue,
    LeaseLost,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.integrations.http_calls import checked_url
from tensorhub.types import ModelInfo

SERVERS: Final = "servers"  # that `vllm_session.ExtensionClient` calls
SEATS: Final = "seats"  # that `OneVersion` calls
LOOK_S: Final = 1.0  # how often an engine looks whether it is still listed


class Announcement:
    """One engine's, until it is closed, or this process ends."""

    def __init__(self, weights: sync.Weights, describe: Callable[[], ModelInfo]) -> None:
        self._weights, self._describe = weights, describe
        self._closed = threading.Event()

    @property
    def is_known(self) -> bool:
        """False: a coordinator that has come back without its state does not list this engine."""
        return self._weights.version is not None

    def renew(self, timeout_s: float) -> None:
        """Announce it again, if it has to be. Raises as `Weights.publish`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_known:
            try:
                mark = self._describe().mark
                self._weights.publish(0 if mark is None else mark + 1, timeout_s)
            except (VersionConflict, LeaseLost):  # another engine was quicker; it says so once
                if time.monotonic() > deadline:
                    raise

    def keep(self) -> None:
        """Look after it in a thread."""
        threading.Thread(target=self._keep, name="tensorhub-announced", daemon=True).start()

    def _keep(self) -> None:
        while not self._closed.wait(LOOK_S):
            with suppress(TensorHubError):  # it is tried again
                self.renew(LOOK_S)

    def close(self) -> None:
        self._closed.set()
        self._weights.close()


def announce(
    hub: sync.Hub, model: str, kind: str, url: str, timeout_s: float = 60.0, called: str = ""
) -> Announcement:
    """`called`: what reports call it; "": by its URL. Raises InvalidValue (no URL), and as
    `Hub.register` and `Weights.publish`.
    """
    url = checked_url(url, "this engine")
    name = f"{model}/{kind}"
    # the word: the engine before it at this URL may not be known to be gone
    group = f"{url} {secrets.token_hex(8)} {called}".strip()
    weights = hub.register(name, {"engine": np.zeros(1, np.uint8)}, group=group, spot=True)
    made = Announcement(weights, partial(hub.describe, name, limit=0))
    try:
        made.renew(timeout_s)
    except BaseException:
        made.close()
        raise
    return made


def announcements(hub: sync.Hub, model: str, kind: str) -> list[tuple[str, str]]:
    """The URL of each engine that lives, and what it is called. A URL comes twice where an engine
    was started anew, and the one before it is not known to be gone. What is no URL, no engine has
    announced. Raises as `Hub.describe`.
    """
    try:
        found = hub.describe(f"{model}/{kind}").replicas
    except VersionUnavailable:
        return []
    made = []
    for each in found:
        url, _, more = each.group.partition(" ")
        with suppress(InvalidValue):
            url = checked_url(url, "an engine")
            made.append((url, more.partition(" ")[2] or url))
    return sorted(made)


def announced(hub: sync.Hub, model: str, kind: str) -> dict[str, str]:
    """The same, with each URL once."""
    return dict(announcements(hub, model, kind))
