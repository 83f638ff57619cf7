"""A coordinator's HTTP answers that were not made by one: small or large clusters, hostile names."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tensorhub.observed import ClusterEvent, Explanation, LinkTiming, Part, UpdateRow
from tensorhub.types import (
    CallsSummary,
    Endpoint,
    LeaseView,
    Location,
    ModelInfo,
    ModelSummary,
    OpKey,
    ReplicaView,
    ShardView,
    SilentWorker,
    VersionSummary,
    VersionView,
    WorkerView,
)

NOW = 1_790_000_000.0  # seconds since 1970, by the coordinator's clock: not by the browser's
CHUNKS = 120
MODEL = "actor"
POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"


@dataclass
class Recording:
    """What one coordinator answers. `token`: "" for none."""

    models: dict[str, ModelInfo]
    updates: dict[str, list[UpdateRow]] = field(default_factory=dict)
    explanations: list[Explanation] = field(default_factory=list)
    events: list[ClusterEvent] = field(default_factory=list)
    token: str = ""
    bytes_total: float = 0.0
    page_workers: int = 100

    def summary(self) -> dict[str, Any]:
        workers = {each.name: each.state for info in self.models.values() for each in info.workers}
        states = list(workers.values())
        about = {
            "address": "tcp://10.0.0.1:17337",
            "cluster": "c0ffee",
            "epoch": 1,
            "state": "serving",
            "behind_s": 0.004,
            "lease_s": 10.0,
            "sessions": len(workers),
            "workers": len(states),
            "suspect": states.count("suspect"),
            "models": len(self.models),
            "now": NOW,
            "release": "0.0",
        }
        shown = []
        for info in self.models.values():
            few = len(info.workers) <= 64
            some = info if few else replace(info, replicas=(), leases=(), workers=())  # counts only
            shown.append(asdict(some) | {"age_s": 12.4, "age_is_least": False})
        return {"coordinator": about, "models": shown, "events_last": len(self.events)}

    def page(self, model: str, after: str) -> dict[str, Any] | None:
        """A page of a large model has no counts."""
        info = self.models.get(model)
        if info is None:
            return None
        if len(info.workers) <= self.page_workers:
            return {"model": asdict(info), "next": None}
        rest = [each for each in info.workers if each.name > after]
        workers = rest[: self.page_workers]
        names = {each.name for each in workers}
        replicas = [
            replace(each, shards=tuple(shard for shard in each.shards if shard.worker in names))
            for each in info.replicas
        ]
        part = replace(
            info,
            workers=tuple(workers),
            replicas=tuple(each for each in replicas if each.shards),
            leases=tuple(each for each in info.leases if each.reader in names),
            versions=tuple(replace(each, summary=None) for each in info.versions),
            summary=None,
        )
        last = workers[-1]
        following = {"after": last.name, "incarnation": last.incarnation}
        return {"model": asdict(part), "next": following if len(rest) > len(workers) else None}

    def explained(self, query: dict[str, list[str]]) -> dict[str, Any] | None:
        wanted = {name: query.get(name, [""])[0] for name in ("model", "version", "group")}
        for each in self.explanations:
            have = {"model": each.model, "version": str(each.version), "group": each.group}
            if all(not value or have[name] == value for name, value in wanted.items()):
                return asdict(each)
        return None


def cluster(
    rollouts: int = 9,
    *,
    sites: Sequence[str] = ("default", "paris"),
    ranks: int = 1,
    prefix: str = "rollout-",
) -> Recording:
    """A trainer and rollouts, of `ranks` ranks each, in the middle of an update to version 7."""
    groups = [f"{prefix}{number}" for number in range(rollouts)]
    names = {
        group: [f"{group}-rank-{rank}" for rank in range(ranks)] if ranks > 1 else [group]
        for group in groups
    }
    site = {group: sites[number * len(sites) // rollouts] for number, group in enumerate(groups)}
    trainers = [f"trainer-rank-{rank}" for rank in range(ranks)] if ranks > 1 else ["trainer"]
    workers = [_worker(name, sites[0]) for name in trainers]
    workers += [_worker(name, site[group]) for group in groups for name in names[group]]
    if rollouts > 4:
        workers[-1] = replace(workers[-1], state="suspect")

    replicas = [_replica("trainer", 7, "ready", trainers, CHUNKS)]
    leases = []
    for number, group in enumerate(groups):
        if number % 4 == 3:
            replicas.append(_replica(group, 6, "ready", names[group], CHUNKS))
            continue
        done = CHUNKS if number < 2 else (17 * number) % CHUNKS
        state = "ready" if done == CHUNKS else "filling"
        replicas.append(_replica(group, 7, state, names[group], done))
        if state == "filling":
            above = names[groups[number % 2]] if number % 3 else trainers
            leases += [
                LeaseView(f"l-{number}-{rank}", reader, source, 7, rank, "active")
                for rank, (reader, source) in enumerate(zip(names[group], above, strict=True))
            ]

    def counted(version: int) -> VersionSummary:
        states = [each.state for each in replicas if each.version == version]
        reads = len(leases) if version == 7 else 0
        return VersionSummary(
            states.count("ready"), states.count("ready"), states.count("filling"), 0, 0, 0, 0, reads
        )

    versions = tuple(
        VersionView(
            number,
            f"{number}" * 32,
            "available",
            16_060_522_240,
            ranks,
            0,
            True,
            "",
            (),
            counted(number),
        )
        for number in (6, 7)
    )
    calls = (
        CallsSummary(
            "update", "chunks", states_filling(replicas), 0.4, groups[min(4, len(groups) - 1)]
        ),
        CallsSummary("update", "source", 1, 2.7, groups[min(6, len(groups) - 1)]),
    )
    silent = tuple(
        SilentWorker(each.name, each.incarnation, 4.2)
        for each in workers
        if each.state == "suspect"
    )
    summary = ModelSummary(
        len(workers), len(silent), len(groups) + 1, len(workers), len(leases), 2, calls, silent
    )
    info = ModelInfo(
        MODEL,
        0,
        7,
        2,
        versions,
        tuple(replicas),
        tuple(leases),
        tuple(sorted(workers, key=lambda each: each.name)),
        summary,
    )
    rows = [
        _row(group, version, NOW - 12 - 40 * (7 - version) + 0.3 * place, 1.2 + 0.1 * (place % 7))
        for place, group in enumerate(groups)
        for version in range(1, 8)
        if version < 7 or place < 2
    ]
    if rollouts > 6:
        key = OpKey(MODEL, groups[6], 1, 9)
        rows.append(UpdateRow(key, 7, "update", "running", NOW, 3.1, longest="source"))
    explained = [explanation(group) for group in groups[:2]]
    parts = (
        Part("link", 0.4, groups[6], "trainer"),
        Part("source", 2.7, groups[6], "", "its source was lost"),
    )
    explained.append(
        replace(
            explained[0], group=groups[6], parts=parts, links=(), sentence="2.7 of 3.1 s so far"
        )
    )
    return Recording({MODEL: info}, {MODEL: rows[::-1]}, explained, events(groups), bytes_total=1e9)


def states_filling(replicas: Sequence[ReplicaView]) -> int:
    return sum(each.state == "filling" for each in replicas)


def _worker(name: str, site: str) -> WorkerView:
    where = Location(site, "rack-1", f"node-{name}")
    return WorkerView(name, f"i-{name}", "live", where, (Endpoint("tcp", "10.0.0.7:40112"),))


def _replica(
    group: str, version: int, state: str, workers: Sequence[str], done: int
) -> ReplicaView:
    shards = tuple(
        ShardView(rank, worker, "complete" if done == CHUNKS else "filling", done, CHUNKS, 1)
        for rank, worker in enumerate(workers)
    )
    return ReplicaView(
        group, version, state, "device", "use", "", True, shards, f"r-{group}-{version}"
    )


def _row(group: str, version: int, ended_at: float, seconds: float) -> UpdateRow:
    shares = {"resolve": 0.03, "prepare": 0.03, "hook": 0.08, "fence": 0.02, "wait": 0.1}
    shares |= {"transfer": 0.56, "verify": 0.1, "unpack": 0.03, "commit": 0.05}
    return UpdateRow(
        OpKey(MODEL, group, 1, version),
        version,
        "update",
        "committed",
        ended_at,
        seconds,
        group,
        tuple((name, share * seconds) for name, share in shares.items()),
        16_060_522_240,
        "link",
        f"{0.62 * seconds:.1f} of {seconds:.1f} s: the link from trainer to {group}, 210 of 500 Mbit/s",
    )


def explanation(group: str = "rollout-1") -> Explanation:
    return Explanation(
        MODEL,
        7,
        group,
        "update",
        OpKey(MODEL, group, 1, 7),
        NOW - 11.7,
        1.9,
        f"1.4 of 1.9 s: {group}'s link, 210 of 500 Mbit/s",
        (
            Part("version", 0.02, group, "", "version 7 was there"),
            Part("source", 0.03, group, "trainer"),
            Part("before_write", 0.14, group, "", "the engine paused"),
            Part("link", 1.4, group, "trainer", "210 of 500 Mbit/s"),
            Part("source busy", 0.11, "trainer", "rollout-0", "2 readers"),
            Part("digest", 0.12, group),
            Part("others", 0.05, group, "rollout-0"),
            Part("control", 0.03, group),
        ),
        (
            LinkTiming(
                "l-1", "trainer", "tcp", "live", 36_750_000, 1.62, 1.4, 0.02, 0.05, 0.01, 0.0, 0.12
            ),
            LinkTiming(
                "l-2", "rollout-0", "tcp", "live", 4_200_000, 0.4, 0.3, 0.08, 0.01, site="paris"
            ),
        ),
        0.012,
        41_000_000,
        ("with a seed in paris: 0.3 s", "with prefetch: the pause would be 0.2 s"),
    )


def events(groups: Sequence[str]) -> list[ClusterEvent]:
    made = [ClusterEvent(1, NOW - 300, "serving", text="the coordinator has its state")]
    for group in groups[:40]:
        made.append(
            ClusterEvent(len(made) + 1, NOW - 290, "joined", worker=group, text="a spot worker")
        )
    for version in range(1, 8):
        made.append(
            ClusterEvent(
                len(made) + 1,
                NOW - 12.4 - 40 * (7 - version),
                "published",
                MODEL,
                version,
                "trainer",
                "16.1 GB in 1 shard",
            )
        )
    made.append(
        ClusterEvent(
            len(made) + 1, NOW - 4, "suspect", worker=groups[-1], text="not heard for 4.2 s"
        )
    )
    return made


# -------------------------------------------------------------------------------------------------
# the server


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        recording = self.server.recording
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        static = url.path == "/" or url.path.startswith("/static/")
        given = self.headers.get("Authorization", "")
        if not static and recording.token and given != f"Bearer {recording.token}":
            self._answer(401, "application/json", b"{}")
        elif static:
            self._static(url.path.rpartition("/")[2] or "index.html")
        elif url.path == "/summary":
            self._json(recording.summary())
        elif url.path == "/models":
            self._json(recording.page(query["name"][0], query.get("after", [""])[0]))
        elif url.path == "/updates":
            rows = recording.updates.get(query["model"][0], [])
            self._json({"updates": [asdict(each) for each in rows]})
        elif url.path == "/explain":
            self._json(recording.explained(query))
        elif url.path == "/metrics":
            recording.bytes_total += 4.2e8
            text = f'tensorhub_bytes_total{{transport="tcp",kind="live"}} {recording.bytes_total}\n'
            self._answer(200, "text/plain", text.encode())
        elif url.path == "/events":
            self._events()
        else:
            self._json(None)

    def _events(self) -> None:
        after = int(self.headers.get("Last-Event-ID", "c0ffee:0").rpartition(":")[2])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in self.server.recording.events[after:]:
            line = f"id: c0ffee:{event.number}\ndata: {json.dumps(asdict(event))}\n\n"
            self.wfile.write(line.encode())
        self.wfile.write(b": quiet\n\n")
        self.wfile.flush()
        self.server.ends.wait()
        self.close_connection = True

    def _static(self, name: str) -> None:
        kinds = {
            "html": "text/html",
            "js": "text/javascript",
            "css": "text/css",
            "svg": "image/svg+xml",
        }
        body = (resources.files("tensorhub.web") / "static" / name).read_bytes()
        self._answer(200, kinds[name.rpartition(".")[2]], body)

    def _json(self, value: object) -> None:
        self._answer(404 if value is None else 200, "application/json", json.dumps(value).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Answers what `recording` says at the moment."""

    daemon_threads = True

    def __init__(self, recording: Recording, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.recording = recording
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser goes when it likes."""


@contextlib.contextmanager
def served(recording: Recording, port: int = 0) -> Iterator[Server]:
    with Server(recording, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()
            thread.join()
