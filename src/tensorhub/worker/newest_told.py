"""What a worker was told of the newest versions of the models that it watches (G3).

Theory of operation. A rollback begins a lineage, and within a lineage numbers only grow. So the
pair of both never goes back while coordinators find each other's state. One that says less has an
older copy of it. A worker tells each new coordinator what it was told last, and the coordinator
begins a new cluster, unless the worker has the read-only token: such a worker sees by itself what
is said then.
"""

from __future__ import annotations

from tensorhub.messages import Announce, Watch

NO_VERSION = -1


class NewestTold:
    """Of one cluster."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, int]] = {}  # by model: lineage, and newest number

    def __repr__(self) -> str:
        return f"<NewestTold of {len(self._told)} models>"

    def watch(self, model: str) -> Watch:
        """The question for the newest version."""
        lineage, number = self._told.get(model, (0, NO_VERSION))
        return Watch(model, lineage, None if number == NO_VERSION else number)

    def goes_back(self, message: Announce) -> bool:
        """Take the answer. Whether its coordinator does not know what was told before."""
        newest, lineage = message.newest, message.in_lineage
        number = NO_VERSION if newest is None else newest.version
        before = self._told.get(message.model)
        if lineage is None:  # an older release does not say it
            self._told[message.model] = (0 if newest is None else newest.lineage), number
            return False
        self._told[message.model] = told = lineage, number
        return before is not None and told < before

    def forget(self, *models: str) -> None:
        """These are not watched any more; none: those of another cluster, all of them."""
        for model in models or list(self._told):
            self._told.pop(model, None)
