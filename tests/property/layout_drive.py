"""A random drive as in `wait_drive`, with groups of several layouts that read each other's versions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from tensorhub.coordinator import Connected, Event, Received, invariants, ways
from tensorhub.coordinator.entities import RankPart
from tensorhub.messages import (
    Compared,
    Covered,
    Digests,
    Fill,
    FromWorker,
    Held,
    Join,
    Need,
    Prepared,
    Progress,
    Publish,
    ReadFailed,
    ReadyToWrite,
    Register,
    SelectionRoot,
    TellDigests,
)
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS
from tensorhub.types import Endpoint, Location, Medium, OpKey, Purpose
from tests.property.wait_drive import DIGESTED, DIGESTS, HOSTS, ROOTS, TRANSPORTS, Peer, WaitDrive

SITES = ("s1", "s2")
LAYOUTS = {"a": "p", "b": "p", "x": "q", "y": "q", "z": "r"}  # of each group
GROUPS = "aaabxxyyz"


class LayoutDrive(WaitDrive):
    """One seed's drive. Ranks of one layout whose numbers are equal modulo `replicated` are one shard class."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world_sizes = {layout: self.random.choice((1, 1, 1, 2)) for layout in "pqr"}
        self.replicated = self.random.choice((1, 2, 8))
        self.is_healed = False
        self.due = set[RankPart]()  # whose calls must have ended when all is healed
        self.reached = Counter[str]()  # what ranks did when it was their turn
        self.manifest = self.random.choice((self.manifest, DIGESTED))

    def run(self, steps: int) -> None:
        """There is a version, and who may read it, when all begins."""
        for group in "axyz":
            for rank in range(self.world_sizes[LAYOUTS[group]]):
                self.peers.append(Peer(f"p{next(self.numbers)}", read_only=False))
                self.connect(self.peers[-1])
                self.register(self.peers[-1], f"r{next(self.numbers)}", group, rank, serves=True)
        members = self.core.cluster.models["m"].groups["a"].members.values()
        for member in list(members):
            peer = self.owner(member)
            assert peer is not None
            key = OpKey("m", "a", member.group.epoch, member.group.sequence)
            self.say(peer, Publish(key, member.rank, member.registration, 1, next(self.numbers), 1000.0))
        self.store_answers()
        super().run(steps)

    def step(self, event: Event) -> None:
        """A publisher checks at once what it was asked to: else few would have anything to read."""
        super().step(event)
        for peer, part in self.parts():
            waits = isinstance(part.call, Publish) and part.checks and not part.operation.covers
            if waits and peer.session is not None:
                super().step(Received(peer.session, Covered(part.operation.key, part.rank, part.checks)))
        invariants.check_counts(self.core.cluster)

    # -- peers

    def connect(self, peer: Peer) -> None:
        """From any site, with transports of which one is everybody's, mostly."""
        worker = self.core.cluster.workers.get(peer.incarnation)
        peer.session = next(self.numbers)
        peer.asked, peer.to_announce = [], list(worker.members.values()) if worker is not None else peer.former
        peer.former = []
        self.sessions[peer.session] = peer
        is_odd = self.often(0.05) and not self.is_healed
        transports = self.random.sample(TRANSPORTS[1:], 1) if is_odd else TRANSPORTS
        where = Location(site=self.random.choice(SITES), host=self.random.choice(HOSTS))
        self.step(Connected(peer.session, peer.incarnation, "worker", peer.read_only))
        endpoints = tuple(Endpoint(transport, "x") for transport in transports)
        self.say(peer, Join(peer.incarnation, where, endpoints, 1, 0 if self.often(0.5) else 2**40))

    def registers(self, peer: Peer) -> None:
        name = f"r{next(self.numbers)}"
        if peer.read_only or self.often(0.1):
            name = f"read-only-{name}"
            self.register(peer, name, name, 0, serves=False)
        else:
            group = self.random.choice(GROUPS)
            self.register(peer, name, group, self.random.randrange(self.world_sizes[LAYOUTS[group]]), serves=True)

    def register(self, peer: Peer, name: str, group: str, rank: int, *, serves: bool) -> None:
        self.say(peer, self._register(peer, name, group, rank, serves=serves, shard=rank, held=None))

    def _register(
        self, peer: Peer, name: str, group: str, rank: int, *, serves: bool, shard: int, held: Held | None
    ) -> Register:
        layout, size, layout_id = LAYOUTS.get(group, ""), 1, ""
        if layout:
            size, layout_id = self.world_sizes[layout], f"own/{layout}{rank}"
        elif not serves and self.often(0.5):
            layout_id = "own/f"  # a fetch of another layout
        parts = self._parts(layout, rank) if layout else ()
        use = (serves, False, Medium.DEVICE, Purpose.USE, layout_id, 1, CHUNKS, self.manifest if serves else b"", held)
        names = ("", tuple(map(id_of, parts)), parts)
        return Register(next(self.numbers), name, "m", group, rank, shard, size, *use, *names)

    def _parts(self, layout: str, rank: int) -> tuple[bytes, ...]:
        return b"catalogue", layout.encode(), b"%s %d" % (layout.encode(), rank % self.replicated)

    def _lies(self, layout_id: str, shard: int) -> tuple[bytes, ...]:
        """Where the ranks of a layout have what they read of another one."""
        return b"published", layout_id.encode(), b"%s %d" % (layout_id.encode(), shard)

    def announces(self, peer: Peer) -> None:
        member = peer.to_announce.pop()
        holding, held = member.holding, None
        if member.purpose is not Purpose.USE:
            peer.to_announce.append(member)
            super().announces(peer)
            return
        if holding is not None and holding.committed and self.often(0.8):
            info, bridges = holding.version.info, holding.bridges
            published = holding.version.publisher.group == member.group.name and not bridges
            what = (info.version, info.content_id, holding.generation, info.world_size, 1, self.manifest)
            if bridges:
                parts = self._lies(holding.layout.layout_id, member.shard)
            else:
                parts = self._parts(LAYOUTS[holding.version.publisher.group], member.shard)
            held = Held(*what, published=published, part_ids=tuple(map(id_of, parts)), publication=holding.layout.origin_id)
            ident, group = member.registration, member.group.name
            register = self._register(peer, ident, group, member.rank, serves=True, shard=member.shard, held=held)
            parts = tuple({*register.parts, *parts, holding.layout.origins} - {b""})
            self.say(peer, replace(register, parts=parts))
            return
        ident, group = member.registration, member.group.name
        self.say(peer, self._register(peer, ident, group, member.rank, serves=member.serves, shard=member.shard, held=None))

    # -- calls

    def needs(self, part: RankPart) -> tuple[Need, ...]:
        """The same for all of its layout and rank."""
        assert part.origin is not None
        classes, origin_id = list(part.origin.classes), part.layout.origin_id
        chance = Random(f"{origin_id} {part.layout.layout_id} {part.shard}")
        few = chance.sample(classes, chance.choice((len(classes), len(classes), chance.randint(0, len(classes)))))
        return tuple(Need(shard, chance.choice(("s", "t")), CHUNKS, CHUNKS) for shard in sorted(few))

    def words_of(self, part: RankPart) -> list[FromWorker]:
        """What this rank may say now; the first of them bring it on, if nothing is wrong."""
        key, rank = part.operation.key, part.rank
        digested = self.manifest == DIGESTED
        truth = root_of(DIGESTS) if digested else b""
        words: list[FromWorker] = []
        if part.operation.running and not part.ready:
            lies = self._lies(part.layout.layout_id, part.shard) if part.bridges and part.member.serves else ()
            needs = self.needs(part) if part.bridges else ()
            words.append(
                ReadyToWrite(key, rank, needs, tuple(map(id_of, lies)), lies if self.is_healed or self.often(0.8) else ())
            )
        if part.checks and not part.operation.covers:
            words.append(Covered(key, rank, part.checks))
        if part.reads and (part.leases or part.needs == ()):
            roots = tuple(SelectionRoot(need.selection, truth, need.shard) for need in part.needs or ())
            words.append(Prepared(key, rank, truth, roots))
        if part.claim is not None and part.page is not None:
            of = ("", 0) if part.compares is None else (part.compares.selection, part.compares.shard)
            words.append(Compared(key, rank, CHUNKS, (), False, *of))
            words.append(Compared(key, rank, CHUNKS, (), True, *of))
        return words

    def rank_goes_on(self) -> None:
        picked = self.pick(self.parts())
        if picked is None:
            return
        peer, part = picked
        key, rank = part.operation.key, part.rank
        if part.bridges:
            self.reached.update("follows" if lease.need is None else "bridges" for lease in part.leases.values())
            self.reached["holds"] += part.layout.have_sources()
        words = self.words_of(part)
        if part.reads:
            words.append(Progress(key, rank, 1, 1))
            root = self.random.choice(ROOTS) if self.manifest == DIGESTED else b""
            roots = tuple(SelectionRoot(need.selection, root, need.shard) for need in part.needs or ())
            words.append(Prepared(key, rank, root, roots))
        for lease in part.leases.values():
            reason = "dropped" if lease.dropping else self.random.choice(("lost", "dropped", "corrupt"))
            words.append(ReadFailed(key, rank, lease.id, reason, "", 0 if reason == "corrupt" else None))
        if (word := self.pick(words)) is not None:
            self.say(peer, word)

    # -- owners

    def answers(self, peer: Peer) -> None:
        asked = peer.asked[0]
        if isinstance(asked, TellDigests) and asked.selection:
            peer.asked.pop(0)
            told = (CHUNKS, ((0, CHUNKS),), DIGESTS, True) if self.often(0.7) else (CHUNKS, (), b"", True)
            chunks, runs, digests, last = told
            of = (asked.selection, asked.shard)
            self.say(peer, Digests(asked.registration, asked.generation, chunks, runs, digests, last, *of))
        else:
            super().answers(peer)

    # -- the end

    def heal(self) -> None:
        """From now on everybody is there, does what is its turn, and nothing is wrong. Then every call that can end ends.

        Copies are still ordered meanwhile: whoever has only just called is not due.
        """
        self.is_healed = True
        for peer in self.peers:
            if peer.incarnation not in self.core.cluster.lost:
                self.connect(peer)
        for _ in range(60):
            self.everybody_goes_on()
        self.due = {part for _, part in self.parts()}
        for _ in range(10):
            self.everybody_goes_on()

    def everybody_goes_on(self) -> None:
        """Everybody answers all that it was asked; each rank says one thing; and time passes."""
        for peer in self.online():
            while peer.to_announce:
                self.announces(peer)
            while peer.asked:
                self.answers(peer)
        while self.unstored:
            self.store_answers()
        for peer, part in self.parts():
            for lease in [lease for lease in part.leases.values() if lease.dropping]:
                self.say(peer, ReadFailed(part.operation.key, part.rank, lease.id, "dropped", ""))
            if part.operation.running and (words := self.words_of(part)):
                self.say(peer, words[0])
        self.owner_answers()
        self.time_passes()

    def asleep(self) -> list[RankPart]:
        """Those of the due who still wait, although what they read can be read."""
        return [
            part
            for _, part in self.parts()
            if part in self.due and isinstance(part.call, Fill) and part.operation.running and ways.serve(part.operation)
        ]
