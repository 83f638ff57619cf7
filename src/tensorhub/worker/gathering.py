"""Parts of layouts that one call needs: each is looked for here first, and asked for once.

Not responsible for what is kept (`known_parts`), nor for what is made of them (`planning`, `coverage`).
"""

from __future__ import annotations

from tensorhub import messages
from tensorhub.worker.member_context import MemberContext


class Gathering:
    """That of one call. `found`: what is here of what was wanted, by id."""

    def __init__(self, context: MemberContext) -> None:
        self.found: dict[str, bytes] = {}
        self._context = context
        self._asked: dict[int, str] = {}  # by request, what was asked for and has not come

    @property
    def is_done(self) -> bool:
        """Whether all that was wanted is here."""
        return not self._asked

    def waits_for(self, request: int) -> bool:
        return request in self._asked

    def want(self, *part_ids: str) -> None:
        """Have these, now or later."""
        for part_id in part_ids:
            if part_id in self.found or part_id in self._asked.values():
                continue
            part = self._context.parts.get(part_id)
            if part is None:
                self._ask(part_id)
            else:
                self.found[part_id] = part

    def came(self, reply: messages.ManifestReply) -> None:
        """ProtocolError: it is not what was asked for."""
        part_id = self._asked.pop(reply.request)
        self._context.parts.add(part_id, reply.manifest)
        self.found[part_id] = reply.manifest

    def ask_again(self) -> None:
        """After a lost connection, of a coordinator that knows what it is about."""
        missing = list(self._asked.values())
        self._asked.clear()
        for part_id in missing:
            self._ask(part_id)

    def _ask(self, part_id: str) -> None:
        request = self._context.new_request()
        self._asked[request] = part_id
        self._context.say(messages.GetPart(request, part_id))
