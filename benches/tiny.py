"""What packing tiny tensors into one region saves a reader, and costs a publisher: real models'
profiles of sizes, over TCP.

One publisher, one receiver, the same tensors under two models: one is published with
`Options.pack_bytes`, one without. They take turns, and a ratio compares neighbours of one round.
See README.md.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from benches import catalogue
from benches.comparison.facts import facts
from benches.one_to_n import spread
from benches.remotes import Remote
from benches.size_profiles import SizeProfile
from benches.workers import coordinator_main, publisher_main, receiver_main
from tensorhub.compaction.layout import pack_tiny
from tensorhub.types import Options

WAYS = ("each by itself", "packed")
MODELS = (
    ("Qwen2.5-0.5B", 1),
    ("Qwen2.5-7B", 1),
    ("Qwen3-30B-A3B", 8),
    ("DeepSeek-V3", 64),
    ("Kimi-K2", 64),
)
SIZES = (1024, 4096, 16 * 1024, 64 * 1024)
Row = dict[str, object]


def measure(profile: SizeProfile, pack_bytes: int, rounds: int) -> Row:
    """Seconds of publish and of replicate, both ways, in turns; the first round does not count."""
    ways = {WAYS[0]: Options(), WAYS[1]: Options(pack_bytes=pack_bytes)}
    coordinator = Remote("coordinator", coordinator_main)
    started = [coordinator]
    try:
        address = coordinator.hear()
        publisher = Remote("publisher", publisher_main, address, profile, ways)
        receiver = Remote("receiver", receiver_main, address, profile, "receiver", ways)
        started += [publisher, receiver]
        tensors, _ = publisher.hear(), receiver.hear()
        numbers, seconds = (
            count(1),
            {(way, what): list[float]() for way in WAYS for what in ("publish", "replicate")},
        )
        for round_ in range(rounds + 1):
            for way in WAYS if round_ % 2 else WAYS[::-1]:
                publish_s, replicate_s = _copy(publisher, receiver, way, next(numbers))
                if round_:
                    seconds[way, "publish"].append(publish_s)
                    seconds[way, "replicate"].append(replicate_s)
    finally:
        for remote in reversed(started):
            remote.end()
    row: Row = {"profile": str(profile), "tensors": tensors}
    for what in ("publish", "replicate"):
        pairs = zip(seconds[WAYS[1], what], seconds[WAYS[0], what], strict=True)
        row |= {
            f"{what} ms, {way}": spread([1000 * value for value in seconds[way, what]])
            for way in WAYS
        }
        row[f"{what}, packed : each"] = spread([packed / each for packed, each in pairs])
    return row


def _copy(publisher: Remote, receiver: Remote, way: str, version: int) -> tuple[float, float]:
    publisher.ask("change")
    publish_s = publisher.ask("publish", way, version)
    start, end = receiver.ask("fetch", way, version)
    if receiver.ask("sample") != publisher.ask("sample"):
        raise RuntimeError(f"{way}: the receiver holds other bytes than the publisher")
    for remote in publisher, receiver:
        remote.ask("unpublish", way)
    return float(publish_s), float(end - start)


def of_real_size(pack_bytes: int) -> list[Row]:
    """What packing does to the manifests of whole models, by arithmetic."""
    rows: list[Row] = []
    for model, ranks in MODELS:
        plain = catalogue.manifest(model, ranks=ranks)
        packed = pack_tiny(plain, pack_bytes)
        tiny = len(plain.regions) - len(packed.regions) + 1
        row: Row = {
            "model": model,
            "ranks": ranks,
            "GiB": round(plain.nbytes / 2**30, 1),
            "tiny": tiny if tiny > 1 else 0,
        }
        for name, made in zip(WAYS, (plain, packed), strict=True):
            row |= {f"regions, {name}": len(made.regions), f"reads, {name}": made.chunk_count}
        row["MiB more"] = round(packed.regions[0].nbytes / 2**20, 2) if tiny > 1 else 0
        rows.append(row)
    return rows


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        print("  ".join(f"{name}: {_text(value)}" for name, value in row.items()))


def _text(value: object) -> str:
    return (
        f"{value[0]:.2f} [{value[1]:.2f}-{value[2]:.2f}]" if isinstance(value, list) else str(value)
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches tiny", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--mib", type=int, default=256, help="bytes of a model's part, scaled down, in MiB"
    )
    parser.add_argument(
        "--pack", type=int, default=16 * 1024, help="Options.pack_bytes of the real models"
    )
    parser.add_argument(
        "--tensors", type=int, default=2000, help="of each size, where all are of one size"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.mib, options.pack, options.tensors) < 1:
        parser.error("give at least 1 of each")
    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    sizes = of_real_size(options.pack)
    show(sizes)
    rows = []
    for profile in (
        *(SizeProfile(options.mib * 2**20, model, ranks) for model, ranks in MODELS),
        *(SizeProfile(options.tensors * size, each=size) for size in SIZES),
    ):
        rows.append(measure(profile, max(options.pack, profile.each or 0), options.rounds))
        show(rows[-1:])
    print(
        "\nMedian [least-largest] of the rounds. A ratio is taken within each round; below 1, "
        "packing is faster."
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": known, "real sizes": sizes, "rows": rows}))
    return 0
