"""Votes by hand with the read-only token, over real sockets: what they make a publisher digest is
bounded (R8).

Covers `runtime.data.vote_budget`.
"""

from __future__ import annotations

from typing import Any

import anyio.to_thread
import pytest

from tensorhub.layouts.reading import Selection
from tensorhub.messages import (
    AddSource,
    CheckCoverage,
    Compare,
    Covered,
    Fill,
    Join,
    Need,
    Outcome,
    Prepared,
    ReadyToWrite,
    Register,
    Registered,
    Select,
    Selected,
    SelectionRoot,
    Start,
    Write,
)
from tensorhub.model.digests import ROOT_BYTES
from tensorhub.model.strips import straight
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_COORDINATOR, FROM_OWNER
from tensorhub.protocol.secret import read_only_token
from tensorhub.runtime.data import vote_budget
from tensorhub.types import READ_ONLY, Endpoint, Location, Medium, OpKey, OpKind, Purpose
from tests.rig import CHUNK_BYTES, WAIT_S, cluster, handle_of, published, worker_of
from tests.test_floods import PATIENT, data_address, proved

TOKEN = "secret"
CHUNKS = 9


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def heard(peer: BlockingConnection, *kinds: Any) -> Any:
    """The next message of one of these kinds."""
    while not isinstance(message := peer.receive(FROM_COORDINATOR), kinds):
        assert message is not None
    return message


def vote(address: str, owner: str, registration: str, generation: int) -> tuple[str, Any]:
    """The vote of a fetch that has read nothing of a selection, and names some root for it. Returns
    the selection, and what the coordinator says.
    """
    secret, name, group = read_only_token(TOKEN).encode(), f"{READ_ONLY}f", f"{READ_ONLY}g"
    selection = Selection(tuple([(straight(0, 0, CHUNK_BYTES),)] * CHUNKS))
    blob, ident = selection.encode(), selection.selection_id
    with proved(owner, "reader", secret=secret) as lane, proved(address, secret=secret) as peer:
        lane.send(Select(1, registration, generation, ident, len(blob), 0, blob))
        selected = lane.receive(FROM_OWNER)
        assert isinstance(selected, Selected)
        peer.send(Join("by hand", Location(), (Endpoint("tcp", "127.0.0.1:1"),), 1, 0))
        use = (False, False, Medium.DEVICE, Purpose.USE, "own/x", 1, 1, b"", None)
        peer.send(Register(1, name, "m", group, 0, 0, 1, *use))
        registered = heard(peer, Registered)
        key = OpKey("m", group, registered.epoch, registered.sequence)
        call = (OpKind.FETCH, "latest", None, 7, False, False, WAIT_S)
        peer.send(Fill(key, 0, name, *call))
        heard(peer, Start)
        peer.send(ReadyToWrite(key, 0, (Need(0, ident, CHUNKS, selection.nbytes),)))
        said = heard(peer, CheckCoverage, Write, AddSource)
        if isinstance(said, CheckCoverage):
            peer.send(Covered(said.key, said.rank, said.readers))
        peer.send(Prepared(key, 0, b"", (SelectionRoot(ident, b"x" * ROOT_BYTES, 0),)))
        return ident, heard(peer, Outcome, Compare)


@pytest.mark.parametrize("has_budget", [True, False])
async def test_once_the_budget_is_used_up_a_publisher_digests_nothing_for_a_vote(
    has_budget: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the digests of the sources count."""
    monkeypatch.setattr(vote_budget, "READ_ONLY_SHARE", 1e9 if has_budget else 0.0)
    async with cluster("trainer", options=PATIENT, token=TOKEN) as c:
        content = handle_of(await published(c.hubs[0])).member.content
        assert content is not None
        owner = worker_of(c.hubs[0])._owner
        (registration,) = owner._memory
        of = registration, content.generation
        ident, answer = await anyio.to_thread.run_sync(
            vote, c.address, data_address(c.hubs[0]), *of
        )
        digests = owner.digests(*of, ident)
        assert digests is not None
    if has_budget:
        assert isinstance(answer, Compare)
        assert None not in digests
    else:
        assert isinstance(answer, Outcome)
        assert (answer.committed, answer.by_source) == (True, True)
        assert digests == (None,) * CHUNKS
