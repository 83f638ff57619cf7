"""How queue pairs are made, connected and asked, with a stand-in for pyverbs. Whether a device
understands: tests/rdma.
"""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.transport.rdma import queues, verbs
from tensorhub.transport.rdma.messages import QueueCard
from tensorhub.transport.rdma.ports import Move, Port
from tensorhub.transport.rdma.queues import Fabric, Queue, ReaderQueue
from tests.transport.fabric import GID, PORT

ACTIVE, DOWN, REMOTE_READ, RC, ERR, STATE, READ, SIGNALED, FENCE = 4, 1, 4, 2, 6, 1, 4, 2, 1
DEPTH, READS_MADE, READS_ANSWERED = 30, 5, 9


class VerbsFault(Exception):
    """pyverbs' PyverbsError."""

    def __init__(self, code: object) -> None:
        super().__init__("it fails")
        self.error_code = code


class Thing(SimpleNamespace):
    """Something of pyverbs: its arguments, and what is done with it."""

    def __init__(self, kind: str, opened: list[str], **arguments: Any) -> None:
        super().__init__(kind=kind, **arguments)
        self._opened = opened
        opened.append(kind)

    def close(self) -> None:
        self._opened.remove(self.kind)


class Pyverbs:
    """Things are open until they are closed. `fault`: of the next thing of that kind."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.fault: dict[str, VerbsFault] = {}
        self.state = ACTIVE
        self.descriptors: set[int] = set()
        self.begun_beside = 0  # channels that other threads make meanwhile
        self.pairs: list[Any] = []
        self.enums = SimpleNamespace(
            IBV_PORT_ACTIVE=ACTIVE,
            IBV_QPT_RC=RC,
            IBV_ACCESS_REMOTE_READ=REMOTE_READ,
            IBV_QPS_ERR=ERR,
            IBV_QP_STATE=STATE,
            IBV_WR_RDMA_READ=READ,
            IBV_SEND_SIGNALED=SIGNALED,
            IBV_SEND_FENCE=FENCE,
        )
        self.errors = SimpleNamespace(PyverbsError=VerbsFault)
        self.device = SimpleNamespace(Context=self._context)
        self.pd = SimpleNamespace(PD=lambda context: self._thing("domain"))
        self.cq = SimpleNamespace(CQ=self._completions, CompChannel=self._channel)
        self.qp = SimpleNamespace(
            QPCap=SimpleNamespace, QPInitAttr=SimpleNamespace, QPAttr=SimpleNamespace, QP=self._pair
        )
        self.addr = SimpleNamespace(GID=str, GlobalRoute=SimpleNamespace, AHAttr=SimpleNamespace)
        self.wr = SimpleNamespace(SGE=self._part, SendWR=self._work)

    def _thing(self, kind: str, **arguments: Any) -> Thing:
        if kind in self.fault:
            raise self.fault.pop(kind)
        return Thing(kind, self.opened, **arguments)

    def _context(self, name: str) -> Thing:
        limits = SimpleNamespace(
            max_qp_init_rd_atom=READS_MADE, max_qp_rd_atom=READS_ANSWERED, max_qp_wr=DEPTH
        )
        port = lambda number: SimpleNamespace(state=self.state, lid=77, active_mtu=4)  # noqa: E731
        return self._thing("device", query_device=lambda: limits, query_port=port)

    def _completions(self, context: Any, count: int, *more: Any) -> Thing:
        return self._thing("completions", count=count)

    def _channel(self, context: Any) -> Thing:
        beside = 1 if self.begun_beside else 0
        self.begun_beside -= beside
        for _ in range(1 + beside):
            self.descriptors.add(100 + len(self.descriptors))
        return self._thing("channel")

    def _pair(self, domain: Any, init: Any, attributes: Any) -> Thing:
        made = self._thing("pair", init=init, attributes=attributes, qp_num=1234)
        made.to_rts = lambda attributes: setattr(made, "connected", attributes)
        made.modify = lambda attributes, mask: setattr(made, "modified", (attributes, mask))
        made.post_send = self._post
        self.pairs.append(made)
        return made

    def _part(self, address: int, nbytes: int, key: int) -> Thing:
        return self._thing("part", place=(address, nbytes, key))

    def _work(
        self, number: int, opcode: int, num_sge: int, sg: list[Any], send_flags: int
    ) -> Thing:
        made = self._thing("work", number=number, flags=send_flags, here=sg[0].place, next_wr=None)
        made.set_wr_rdma = lambda key, address: setattr(made, "there", (address, key))
        return made

    def _post(self, first: Any) -> None:
        if "post" in self.fault:
            raise self.fault.pop("post")
        self.posted: list[tuple[Any, ...]] = []
        while first is not None:
            self.posted.append((first.number, first.here, first.there, first.flags))
            first = first.next_wr


@pytest.fixture
def pyverbs(monkeypatch: pytest.MonkeyPatch) -> Pyverbs:
    made = Pyverbs()
    monkeypatch.setattr(verbs, "verbs", lambda: made)
    monkeypatch.setattr(queues, "verbs", lambda: made)
    monkeypatch.setattr(queues, "_event_descriptors", lambda: set(made.descriptors))
    return made


def card(**changes: Any) -> QueueCard:
    fields: dict[str, Any] = {
        "number": 7,
        "sequence": 8,
        "gid": GID,
        "lid": 9,
        "mtu": 3,
        "reads": 2,
    }
    return QueueCard(**(fields | changes))


def test_memory_is_read_through_the_source_s_end_only(pyverbs: Pyverbs) -> None:
    fabric = Fabric([PORT])
    reader, source = fabric.reader(PORT), fabric.source(PORT)
    of_reader, of_source = pyverbs.pairs
    assert of_reader.attributes.qp_access_flags == 0
    assert of_source.attributes.qp_access_flags == REMOTE_READ
    assert of_reader.init.cap.max_send_wr == DEPTH
    assert of_source.init.cap.max_send_wr == 1
    for pair, count in ((of_reader, DEPTH + 1), (of_source, 1)):
        assert pair.init.scq is pair.init.rcq
        assert (pair.init.scq.kind, pair.init.scq.count) == ("completions", count)
    assert (reader.card.reads, source.card.reads) == (READS_MADE, READS_ANSWERED)
    assert (source.card.gid, source.card.lid, source.card.mtu) == (GID, 77, 4)
    for queue in (reader, source):
        queue.connect(card())
    assert of_reader.connected.qp_access_flags == 0
    assert of_source.connected.qp_access_flags == REMOTE_READ
    for queue in (reader, source):
        queue.close()
        queue.close()
    fabric.close()
    assert pyverbs.opened == []


@pytest.mark.parametrize(
    ("mtu", "reads", "both"), [(3, 2, (3, 2)), (5, 20, (4, READS_MADE)), (4, 1, (4, 1))]
)
def test_two_ends_do_what_both_can(
    pyverbs: Pyverbs, mtu: int, reads: int, both: tuple[int, int]
) -> None:
    queue = Fabric([PORT]).reader(PORT)
    queue.connect(card(mtu=mtu, reads=reads))
    (pair,) = pyverbs.pairs
    made = pair.connected
    assert (made.path_mtu, made.max_rd_atomic) == both
    assert made.max_dest_rd_atomic == made.max_rd_atomic
    assert (made.dest_qp_num, made.rq_psn) == (7, 8)
    assert made.sq_psn == queue.card.sequence
    assert (made.ah_attr.dlid, made.ah_attr.gr.dgid) == (
        9,
        "0000:0000:0000:0000:0000:ffff:0a00:0001",
    )
    assert made.ah_attr.gr.sgid_index == PORT.gid_index
    queue.fail()
    assert (pair.modified[0].qp_state, pair.modified[1]) == (ERR, STATE)


def test_a_port_that_is_down_is_named(pyverbs: Pyverbs) -> None:
    pyverbs.state = DOWN
    with pytest.raises(OSError, match=r"port fake0:1:1 \(10.0.0.1\) is down: check") as caught:
        Fabric([PORT]).source(PORT)
    assert caught.value.errno == errno.ENETDOWN


@pytest.mark.parametrize("kind", [Queue, ReaderQueue])
@pytest.mark.parametrize(
    ("code", "told"),
    [(errno.ENOMEM, errno.ENOMEM), (0, errno.EIO), (-1, errno.EIO), ("", errno.EIO)],
)
def test_what_cannot_be_made_leaves_nothing_open(
    pyverbs: Pyverbs, kind: type[Queue], code: object, told: int
) -> None:
    device = Fabric([PORT]).device(PORT)
    pyverbs.fault["pair"] = VerbsFault(code)
    before = [*pyverbs.opened]
    with pytest.raises(OSError, match="a queue pair cannot be made on fake0") as caught:
        kind(device, PORT)
    assert caught.value.errno == told
    assert pyverbs.opened == before


def test_a_reader_s_descriptor_is_its_own_though_others_are_made_meanwhile(
    pyverbs: Pyverbs,
) -> None:
    fabric = Fabric([PORT])
    pyverbs.begun_beside = 2
    reader = fabric.reader(PORT)
    assert reader.descriptor == max(pyverbs.descriptors)
    assert pyverbs.opened.count("channel") == 1
    pyverbs.begun_beside = queues.CHANNELS_TRIED_MAX
    with pytest.raises(OSError, match="descriptor cannot be told"):
        fabric.reader(PORT)
    assert pyverbs.opened.count("channel") == 1


def test_reads_are_posted_together_in_their_order(pyverbs: Pyverbs) -> None:
    queue = Fabric([PORT]).reader(PORT)
    before = [*pyverbs.opened]
    moves = [Move(100 * n, 10 + n, 1000 * n, 20 + n, 50 + n) for n in range(1, 4)]
    queue.post(moves, 8, frozenset({9, 10}), frozenset({10}))
    assert pyverbs.posted == [
        (8, (100, 51, 11), (1000, 21), 0),
        (9, (200, 52, 12), (2000, 22), SIGNALED),
        (10, (300, 53, 13), (3000, 23), SIGNALED | FENCE),
    ]
    assert pyverbs.opened == before
    pyverbs.fault["post"] = VerbsFault(errno.ENOMEM)
    with pytest.raises(OSError, match="ibv_post_send") as caught:
        queue.post(moves, 8, frozenset(), frozenset())
    assert caught.value.errno == errno.ENOMEM
    assert pyverbs.opened == before
    queue.post([], 8, frozenset(), frozenset())


def test_ports_of_one_device_share_it(pyverbs: Pyverbs) -> None:
    fabric = Fabric([PORT])
    other = Port("fake0", 2, "ethernet", 1, GID, 100.0, "ACTIVE")
    assert fabric.device(PORT) is fabric.device(other)
    assert pyverbs.opened.count("device") == 1
