"""Parts of layouts that a call needs: each is looked for on this worker first, and asked for once.

Not responsible for keeping parts (`known_parts`), nor for their use (`planning`, `coverage`).
"""

from __future__ import annotations

from tensorhub import messages
from tensorhub.worker.member_context import MemberContext


class Gathering:
    """The gathering of one call. `found`: the wanted parts that are here, by id."""

    def __init__(self, context: MemberContext) -> None:
        self.found: dict[str, bytes] = {}
        self._context = context
        self._asked: dict[int, str] = {}  # by request: the requested part, which has not come

    @property
    def is_done(self) -> bool:
        """Whether all wanted parts are here."""
        return not self._asked

    def waits_for(self, request: int) -> bool:
        return request in self._asked

    def want(self, *part_ids: str) -> None:
        """Find these parts here, or ask for them."""
        for part_id in part_ids:
            if part_id in self.found or part_id in self._asked.values():
                continue
            part = self._context.parts.get(part_id)
            if part is None:
                self._ask(part_id)
            else:
                self.found[part_id] = part

    def came(self, reply: messages.ManifestReply) -> None:
        """ProtocolError: the reply is not the requested part."""
        part_id = self._asked.pop(reply.request)
        self._context.parts.add(part_id, reply.manifest)
        self.found[part_id] = reply.manifest

    def ask_again(self) -> None:
        """After a lost connection: repeat the questions to a coordinator that knows the parts."""
        missing = list(self._asked.values())
        self._asked.clear()
        for part_id in missing:
            self._ask(part_id)

    def _ask(self, part_id: str) -> None:
        request = self._context.new_request()
        self._asked[request] = part_id
        self._context.say(messages.GetPart(request, part_id))
