"""TensorHub as a system of the flow model: groups of thin ranks that publish and update by the real
coordinator's word.

Options: seeds, which prefetch each version into the host memory of their site, so that its rollouts
update when it is there; and prefetch, in which each rollout's own host memory takes the version
while it generates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub.testing.flow.coordinated import Coordinated, Peer, ThinRank
from tensorhub.testing.flow.thin import COLUMNS, ROWS
from tensorhub.testing.flow.topology import worker_name
from tensorhub.testing.flow.workload import AGAIN_S, Rollout, System, World
from tensorhub.types import Medium, OpKind, Purpose, VersionInfo, host_group


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the time of one update has gone, of that rank which had its bytes last."""

    asked_s: float  # until it may write: the coordinator, and the old version's fence
    waited_s: float  # until its first byte came
    read_s: float
    voted_s: float  # until all ranks were committed


@dataclass(eq=False)
class _Group:
    """One life of a group of ranks."""

    peers: list[Peer]
    ranks: list[ThinRank]
    copies: list[ThinRank] = field(default_factory=list)  # in host memory
    held: int = 0
    is_ready: bool = False  # every rank is registered
    waiting: Callable[[], None] | None = None  # for that
    prefetching: bool = False  # its copies fill
    runs: bool = False  # a call of the group


class TensorHub(System):
    """See `workload.System`."""

    def __init__(
        self, world: World, *, seeds: bool = False, prefetch: bool = False, resharded: bool = False
    ) -> None:
        self.name = (
            "tensorhub" + "+seeds" * seeds + "+prefetch" * prefetch + "+resharded" * resharded
        )
        # the trainer's, and rollouts'
        self._layouts = (ROWS, COLUMNS) if resharded else (None, None)
        self.coordinated = Coordinated(world)
        self._world, self._prefetches = world, prefetch
        self._trainer = self._group("trainer-0", "trainer")
        self._groups: dict[Rollout, _Group] = {}
        self._seeds: dict[str, _Group] = {}  # by site
        self.phases: list[Phases] = []
        self._site_has: dict[str, int] = {}  # the newest version that a site's seed holds
        if seeds:
            number = 0
            for hosts in world.scenario.hosts:
                for _ in range(hosts.count if hosts.role == "seed" else 0):
                    self._seeds[hosts.site] = self._seed(f"seed-{number}", hosts.site)
                    number += 1

    # -- groups

    def _group(self, name: str, group: str, *, spot: bool = False) -> _Group:
        scenario, topology = self._world.scenario, self._world.topology
        names = [worker_name(name, rank, scenario.ranks) for rank in range(scenario.ranks)]
        host_bytes = scenario.rank_bytes if self._prefetches else 0
        peers = [self.coordinated.peer(topology.places[each], host_bytes) for each in names]
        layout = self._layouts[group != "trainer"]
        made = _Group(
            peers,
            [
                peer.register(group, rank, spot=spot, layout=layout)
                for rank, peer in enumerate(peers)
            ],
        )
        _when_all(made.ranks, "registered", lambda: self._ready(made))
        return made

    def _ready(self, group: _Group) -> None:
        group.is_ready = True
        if group.waiting is not None:
            waiting, group.waiting = group.waiting, None
            waiting()

    def _seed(self, name: str, site: str) -> _Group:
        """Each rank's copy is a group of its own, as `tensorhub seed` has them."""
        scenario, topology = self._world.scenario, self._world.topology
        names = [worker_name(name, rank, scenario.ranks) for rank in range(scenario.ranks)]
        peers = [
            self.coordinated.peer(topology.places[each], scenario.rank_bytes) for each in names
        ]
        made = _Group(peers, [])
        for rank, peer in enumerate(peers):
            copy = peer.register(
                f"seed/{name}/{rank}", rank, medium=Medium.HOST, purpose=Purpose.SEED
            )
            made.copies.append(copy)
        _when_all(made.copies, "registered", lambda: self._ready(made))
        for peer in peers:
            peer.announced = lambda: self._follow(made, lambda: self._seeded(made, site))
        return made

    def _seeded(self, seed: _Group, site: str) -> None:
        self._site_has[site] = seed.held
        for rollout in self._groups:
            if rollout.hosts.site == site:
                self._tell(rollout)

    def _follow(self, group: _Group, held: Callable[[], None]) -> None:
        """Its host copies take the newest version, if they do not already."""
        newest = min(peer.newest.version if peer.newest else 0 for peer in group.peers)
        if (
            not group.is_ready
            or group.prefetching
            or group.runs
            or newest <= max(group.held, _copied(group))
        ):
            return
        group.prefetching = True

        def ended(infos: list[VersionInfo | None]) -> None:
            group.prefetching = False
            if not group.ranks:
                group.held = _copied(group)
            held()
            self._world.timeline.after(
                AGAIN_S if None in infos else 0.0, lambda: self._follow(group, held)
            )

        _all(group.copies, lambda copy, each: copy.begin_fill(OpKind.PREFETCH, each), ended)

    # -- what the workload wants

    def put(self, version: int, done: Callable[[], None]) -> None:
        trainer = self._trainer
        ranks = trainer.ranks

        def publish() -> None:
            _all(ranks, lambda rank, ended: rank.begin_publish(version, ended), lambda _: done())

        def take_back() -> None:
            left = dict.fromkeys(ranks)

            def has_left(rank: ThinRank) -> None:
                left.pop(rank, None)
                if not left:
                    publish()

            for rank in ranks:
                rank.begin_leave(lambda rank=rank: has_left(rank))  # type: ignore[misc]

        begin = take_back if version > 1 else publish
        if trainer.is_ready:
            begin()
        else:
            trainer.waiting = begin

    def come(self, rollout: Rollout) -> None:
        group = self._groups[rollout] = self._group(
            rollout.name, f"{rollout.name}.{rollout.life}", spot=rollout.hosts.spot
        )
        if self._prefetches:
            for rank in group.ranks:
                copy = group.peers[rank.rank].register(
                    host_group(rank.group),
                    rank.rank,
                    spot=rank.spot,
                    medium=Medium.HOST,
                    purpose=Purpose.PREFETCH,
                )
                group.copies.append(copy)
                rank.beside = copy
        for peer in group.peers:
            peer.announced = lambda: self._announced(rollout)

    def _announced(self, rollout: Rollout) -> None:
        group = self._groups.get(rollout)
        if group is not None and self._prefetches and group.held:
            self._follow(group, lambda: self._tell(rollout))
        self._tell(rollout)

    def _tell(self, rollout: Rollout) -> None:
        if self.workload is not None:
            self.workload.announced(rollout)

    def notice(self, rollout: Rollout) -> None:
        """It leaves gracefully: takes its memory back, so that its readers are moved first."""
        group = self._groups.get(rollout)
        if group is not None and group.held and not group.runs:
            for rank in group.ranks:
                rank.begin_leave(lambda: None)

    def go(self, rollout: Rollout) -> None:
        group = self._groups.pop(rollout)
        for peer in group.peers:
            peer.end()

    def newest(self, rollout: Rollout) -> int:
        """Where there are seeds or a prefetch, it updates to the newest version near it."""
        group = self._groups[rollout]
        if self._prefetches and group.held:
            return _copied(group)
        site = rollout.hosts.site
        if site in self._seeds:
            return self._site_has.get(site, 0)
        return min(peer.newest.version if peer.newest is not None else 0 for peer in group.peers)

    def get(
        self, rollout: Rollout, done: Callable[[int], None], failed: Callable[[], None]
    ) -> None:
        group = self._groups[rollout]
        kind = OpKind.UPDATE if group.held else OpKind.REPLICATE

        def ended(infos: list[VersionInfo | None]) -> None:
            group.runs = False
            info = infos[0]
            if info is None:
                failed()
            else:
                if group.held:
                    self._note(group)
                group.held = info.version
                done(info.version)
                self._announced(rollout)

        def begin() -> None:
            group.runs = True
            _all(group.ranks, lambda rank, each: rank.begin_fill(kind, each), ended)

        if group.is_ready:
            begin()
        else:
            group.waiting = begin

    def _note(self, group: _Group) -> None:
        times = max(
            (rank.times for rank in group.ranks if len(rank.times) == 4),
            key=lambda t: t[3],
            default=None,
        )
        if times is not None:
            called, wrote, first, full = times
            self.phases.append(
                Phases(wrote - called, first - wrote, full - first, self._world.timeline.now - full)
            )


def _copied(group: _Group) -> int:
    return min((copy.held.version if copy.held else 0 for copy in group.copies), default=0)


def _when_all(ranks: list[ThinRank], event: str, call: Callable[[], None]) -> None:
    left = dict.fromkeys(ranks)

    def one(rank: ThinRank) -> None:
        left.pop(rank, None)
        if not left:
            call()

    for rank in ranks:
        setattr(rank, event, lambda rank=rank: one(rank))


def _all(
    ranks: list[ThinRank],
    begin: Callable[[ThinRank, Callable[[VersionInfo | None], None]], None],
    ended: Callable[[list[VersionInfo | None]], None],
) -> None:
    """Begin a call on all ranks; `ended` gets what came of each."""
    results: list[VersionInfo | None] = []

    def one(info: VersionInfo | None) -> None:
        results.append(info)
        if len(results) == len(ranks):
            ended(results)

    for rank in ranks:
        begin(rank, one)
