"""Whether anything reads what a trainer publishes. Without a reader, rollouts generate with old
weights for ever, and no call of the trainer fails.

Responsible for that one question. Not responsible for how far a reader has come.
"""

from __future__ import annotations

from time import monotonic, sleep
from typing import Final

from tensorhub import sync
from tensorhub.api.tools import recent_updates
from tensorhub.errors import StateError
from tensorhub.logs import get_logger
from tensorhub.runtime.loop_thread import finish_blocking

LOOK_S: Final = 0.5
log = get_logger(__name__)


class Readers:
    """The readers of one trainer's versions. `group`: the trainer's own. `are_optional`: a lack of
    readers is logged once, and is no error.

    A reader is any other group that has registered memory under the model now, or that has read a
    version of this trainer's, or waits for one. Once a read was seen, nothing is asked any more.
    """

    def __init__(self, hub: sync.Hub, model: str, group: str, *, are_optional: bool) -> None:
        self._hub, self._model, self._group = hub, model, group
        self._are_optional = are_optional
        self._first: int | None = None
        self._is_known = False  # nothing more is to be asked, or said
        self._has_waited = False  # for a first one, which may have been starting

    def check(self, published: int | None, timeout_s: float | None = None) -> None:
        """Call before each update. `published`: the trainer's last version; None: it has published
        none yet. The first time that there is no reader, one is waited for: it may be starting.

        Raises StateError: nothing reads the model; and as `Hub.describe`.
        """
        if self._is_known or published is None:
            return
        self._first = published if self._first is None else self._first
        if self._are_there(self._first, timeout_s):
            return
        if not self._has_waited:
            self._has_waited = True
            log.warning("no_readers", model=self._model, version=published)
            if self._are_optional:
                self._is_known = True
                return
            until = monotonic() + self._hub._async._worker.timeout_s(timeout_s)
            while monotonic() < until:
                sleep(LOOK_S)
                if self._are_there(self._first, timeout_s):
                    return
        raise StateError(
            f"nothing reads {self._model!r}: version {published} was read by no worker, and no "
            f"worker has registered memory for the next one, so rollouts would go on with old "
            f"weights. Start a rollout that reads {self._model!r} from this coordinator, or "
            f"name the engines to update; allow_no_readers=True publishes all the same"
        )

    def _are_there(self, first: int, timeout_s: float | None) -> bool:
        asked = recent_updates(self._hub._async, self._model, timeout_s)
        self._is_known = any(
            row.key.group != self._group and (row.version is None or row.version >= first)
            for row in finish_blocking(asked)
        )
        if self._is_known:
            return True
        summary = self._hub.describe(self._model, timeout_s, limit=0).summary
        # it may only register now, or be the last trainer's: the next update asks again
        return summary is not None and summary.groups > 1
