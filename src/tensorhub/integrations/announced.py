"""The engines of a model, by their URLs, as the coordinator knows them: a trainer need not name
them, and one that starts late is found.

Each engine publishes a version of a model of its own, in a group named by its URL, and never
unpublishes it. So it is listed while it lives.

Responsible for that list. Not responsible for which engines are waited for (`fleet`).
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Final

import numpy as np

from tensorhub import sync
from tensorhub.errors import InvalidValue, VersionConflict, VersionUnavailable
from tensorhub.integrations.http_calls import checked_url

SERVERS: Final = "servers"  # that `vllm_session.ExtensionClient` calls
SEATS: Final = "seats"  # that `OneVersion` calls


def announce(
    hub: sync.Hub, model: str, kind: str, url: str, timeout_s: float = 60.0
) -> sync.Weights:
    """Until the result is closed, or this process ends. Raises InvalidValue (no URL), and as
    `Hub.register` and `Weights.publish`.
    """
    url = checked_url(url, "this engine")
    deadline = time.monotonic() + timeout_s
    # the word: the engine before it at this URL may not be known to be gone
    weights = hub.register(
        f"{model}/{kind}",
        {"engine": np.zeros(1, np.uint8)},
        group=f"{url} {secrets.token_hex(8)}",
        spot=True,
    )
    while True:
        try:
            mark = hub.describe(f"{model}/{kind}", limit=0).mark
            weights.publish(0 if mark is None else mark + 1)
            return weights
        except VersionConflict:  # another engine was quicker
            if time.monotonic() > deadline:
                weights.close()
                raise


def announced(hub: sync.Hub, model: str, kind: str) -> list[str]:
    """The URLs of the engines that live; what is no URL, no engine has announced. Raises as
    `Hub.describe`.
    """
    try:
        found = hub.describe(f"{model}/{kind}").replicas
    except VersionUnavailable:
        return []
    urls = set()
    for each in found:
        with suppress(InvalidValue):
            urls.add(checked_url(each.group.partition(" ")[0], "an engine"))
    return sorted(urls)
