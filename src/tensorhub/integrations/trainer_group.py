"""The one group of a model in which an adapter's trainer publishes.

Its name is the same for each trainer, so that of two trainers of one model the second is refused. A
trainer that was killed and starts again finds its own old registration, until the coordinator has
found the old process dead.

Responsible for that wait. Not responsible for what is published.
"""

from __future__ import annotations

import time
from typing import Any

from tensorhub import sync
from tensorhub.errors import RegistrationError

GROUP = "trainer"
LEASES = 2  # for so many leases it is waited: then the other trainer lives
RETRY_S = 0.2


def register_trainer(
    hub: sync.Hub, model: str, source: Any, timeout_s: float, **given: Any
) -> sync.Weights:
    """`Hub.register`, as the model's trainer. Waits for a trainer before it that may be dead, at
    most for `timeout_s`. Raises RegistrationError: another one lives; and as `Hub.register`.
    """
    lease_s = hub._async._worker.lease_s
    deadline = time.monotonic() + min(timeout_s, LEASES * lease_s)
    while True:
        try:
            return hub.register(model, source, group=GROUP, **given)
        except RegistrationError as error:
            if not error.retryable:
                raise
            if time.monotonic() >= deadline:
                raise RegistrationError(
                    f"another trainer publishes {model!r}, or one has died less than "
                    f"{lease_s:g} s ago: end it, or give this one another model= ({error})",
                    retryable=True,
                ) from error
        time.sleep(RETRY_S)
