"""A source whose main thread runs pure Python without pause: how fast it serves, and what that
costs its loop.

The source's tensors are published once and read by one receiver, again and again, through the
public API; digests were made before. In turns: `alone`, the source's main thread counts, and
nothing is copied; `idle`, it waits while the source serves; `busy`, it counts meanwhile; `beside`,
it counts, the source serves nobody, and a process of its own has the same bytes copied to the same
receiver in the barest way. `busy / idle` is of the throughput; the loop's speed is what it counts
while bytes are copied, by what it counts in the same round alone.

    python -m benches busy --transports tcp cma shm --mib 256 --rounds 7
"""

import argparse
import json
import random
import threading
import time
from bisect import bisect
from multiprocessing.connection import Connection
from pathlib import Path

import anyio

from benches.comparison.facts import facts
from benches.one_to_n import BARE_COPIES, spread
from benches.remotes import Remote, obey
from benches.size_profiles import SizeProfile
from benches.workers import Memory, call_in_thread, coordinator_main, receiver_main, sender_main
from tensorhub import Options, sync

MODEL, VERSION = "digested", 1
STEPS = 1000  # of pure Python between two looks at the clock: less than 0.1 ms
ALONE_S = 0.3
WAYS = ("alone", "idle", "busy", "beside")
Span = tuple[float, float]


# --------------------------------------------------------------------------------------------------
# the source


class Loop:
    """What a trainer's main thread does: pure Python, without pause. Its clock is read every STEPS
    steps.
    """

    def __init__(self) -> None:
        self._runs = threading.Event()
        self._ended = False
        self._ticks: list[float] = []

    def run(self) -> None:
        """Until `end`, in the calling thread."""
        while True:
            self._runs.wait()
            if self._ended:
                return
            number = 0
            while self._runs.is_set() and not self._ended:
                for step in range(STEPS):
                    number = (number * 31 + step) % 65537
                self._ticks.append(time.monotonic())

    def start(self) -> None:
        self._ticks = []
        self._runs.set()

    def stop(self) -> None:
        self._runs.clear()

    def end(self) -> None:
        self._ended = True
        self._runs.set()

    def rate(self, span: Span) -> float:
        """Ticks per second in that time."""
        start, end = span
        return (bisect(self._ticks, end) - bisect(self._ticks, start)) / (end - start)


def source_main(pipe: Connection, address: str, profile: SizeProfile, transport: str) -> None:
    """Publishes; then the main thread belongs to the loop, and another one obeys the pipe."""
    import torch

    torch.set_num_threads(1)
    memory, loop = Memory(profile, random=True, shared=transport == "shm"), Loop()
    with sync.connect(address, name="source", transports=(transport,), options=Options()) as hub:
        hub.register(MODEL, memory.tensors).publish(VERSION)
        pipe.send((True, len(memory.tensors)))
        own = {
            method.__name__: call_in_thread(method) for method in (loop.start, loop.stop, loop.rate)
        }

        def listen() -> None:
            try:
                anyio.run(obey, pipe, own | memory.commands())
            finally:
                loop.end()

        threading.Thread(target=listen).start()
        loop.run()


# --------------------------------------------------------------------------------------------------
# rounds


class BenchProcesses:
    """The processes of one transport."""

    def __init__(self, profile: SizeProfile, transport: str) -> None:
        self._transport = transport
        self._all = [Remote("coordinator", coordinator_main)]
        address, models = self._all[0].hear(), {MODEL: Options()}
        self.source = Remote("source", source_main, address, profile, transport)
        self._receiver = Remote(
            "receiver", receiver_main, address, profile, "receiver", models, transport
        )
        self._sender = Remote("sender", sender_main, profile, transport)
        self._all += [self.source, self._receiver, self._sender]
        (self.tensors,) = {remote.hear() for remote in self._all[1:]}
        self._expected = self.source.ask("sample")

    def end(self) -> None:
        for remote in reversed(self._all):
            remote.end()

    def fetch(self) -> Span:
        """The receiver reads the version, which it does not have."""
        self._receiver.ask("change")
        span: Span = self._receiver.ask("fetch", MODEL, VERSION)
        self._receiver.ask("unpublish", MODEL)
        if self._receiver.ask("sample") != self._expected:
            raise RuntimeError("the receiver holds other bytes than the source")
        return span

    def copy_beside(self) -> Span:
        """The receiver gets as many bytes from the sender."""
        if self._transport != "tcp":
            span: Span = self._receiver.ask(
                "read", self._transport, self._sender.ask("lie"), 1, None
            )
            return span
        port = self._sender.ask("listen")
        self._sender.tell("send", 1, False)
        span = self._receiver.ask("receive", port, False)
        self._sender.hear()
        return span

    def turn(self, way: str) -> tuple[float, float]:
        """Seconds of one copy, and what the loop counted per second meanwhile."""
        if way == "idle":
            start, end = self.fetch()
            return end - start, 0.0
        self.source.ask("start")
        match way:
            case "alone":
                time.sleep(ALONE_S)
                end = time.monotonic()
                start = end - ALONE_S
            case "beside":
                start, end = self.copy_beside()
            case _:
                start, end = self.fetch()
        self.source.ask("stop")
        return end - start, self.source.ask("rate", (start, end))


def measure(
    profile: SizeProfile, transport: str, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """What `BenchProcesses.turn` gave of each way, round by round; the first round does not
    count.
    """
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    bench_processes, order = BenchProcesses(profile, transport), list(WAYS)
    try:
        for number in range(rounds + 1):
            random.shuffle(order)
            for way in order:
                turn = bench_processes.turn(way)
                if number:
                    found[way].append(turn)
    finally:
        bench_processes.end()
    return found


def row_of(found: dict[str, list[tuple[float, float]]], nbytes: int) -> dict[str, list[float]]:
    """Medians, and the least and the largest of the rounds; each ratio is of one round."""
    gib = nbytes / 2**30
    seconds = {way: [turn[0] for turn in turns] for way, turns in found.items()}
    alone = [rate for _, rate in found["alone"]]
    speed = {
        way: [rate / whole for (_, rate), whole in zip(found[way], alone, strict=True)]
        for way in ("busy", "beside")
    }
    row = {
        f"GiB/s {way}": spread([gib / value for value in seconds[way]])
        for way in ("idle", "busy", "beside")
    }
    row["busy / idle"] = spread(
        [idle / busy for idle, busy in zip(seconds["idle"], seconds["busy"], strict=True)]
    )
    for way, speeds in speed.items():
        row[f"loop's speed, {way}"] = spread(speeds)
    row["loop, busy / beside"] = spread(
        [a / b for a, b in zip(speed["busy"], speed["beside"], strict=True)]
    )
    for way, speeds in speed.items():
        lost = [(1 - part) * value / gib for part, value in zip(speeds, seconds[way], strict=True)]
        row[f"loop s lost per GiB, {way}"] = spread(lost)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benches busy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--transports", nargs="+", choices=tuple(BARE_COPIES), default=list(BARE_COPIES)
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--mib",
        type=int,
        default=256,
        help="bytes of the model, in MiB (three processes hold them)",
    )
    SizeProfile.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.mib) < 1:
        parser.error("give at least 1 round and 1 MiB")
    random.seed(1)
    profile, known = SizeProfile.of(options), facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    nbytes, rows = sum(profile.sizes()), {}
    for transport in options.transports:
        rows[transport] = row = row_of(measure(profile, transport, options.rounds), nbytes)
        print(
            f"\n{transport}: {nbytes / 2**20:.0f} MiB ({profile}); median [least-largest] of "
            f"{options.rounds} rounds"
        )
        for title, (mid, low, high) in row.items():
            print(f"  {title:32}{mid:7.3f} [{low:.3f}-{high:.3f}]")
    if options.json is not None:
        kept = {"machine": known, "mib": options.mib, "profile": str(profile), "transports": rows}
        options.json.write_text(json.dumps(kept))
    return 0
