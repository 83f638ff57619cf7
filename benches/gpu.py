"""Everything that needs a GPU, in one command: a proof that CUDA IPC works, the tests marked `gpu`,
and the benchmarks.

    make gpu                                        # PYTHON=python3.12 make gpu, if that one has torch and cupy
    PYTHONPATH=src python3 -m benches.gpu --gib 32 --json gpu.json

It installs nothing: it runs with the Python that it is given, and says which packages that one
lacks. Each step is a process of its own with a deadline, so that none takes the others with it; all
of them together have less than ten minutes.

`digest`: XXH3-64 of 4 MiB chunks by the kernel, the table of chunks resident, against a copy within
the GPU. `packing`: the kernel of 10,000 tensors of 16 KiB, against a `copy_` for each. `deltas`: chunks of 8 MiB compared
and applied where they are, against copies to the host and the codec there (1.6 % of the words differ;
needs zstandard). `cuda_ipc`:
the transfer phase of a fetch between two processes, digests off, against a `copy_` of as many bytes
within one. `layouts`: readers of another layout by cuda_ipc and tcp, against readers of the same
one (see `benches.resharded`). `staging`: GPU to GPU over tcp, against CPU to CPU, in the same
rounds. `stall`: a trainer and two rollout processes on one GPU: cuda_ipc, staged copies over tcp,
and torch.distributed's broadcast by gloo (NCCL takes one rank for each GPU). A rollout's stall
begins where its engine is to pause; the trainer's is publish and unpublish.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGES = {  # each with the least version that will do
    **dict.fromkeys(("cupy", "hypothesis", "msgpack", "numpy", "rich", "structlog", "typer"), (0,)),
    "anyio": (4, 11),
    "pytest": (8, 4),
    "pytest_timeout": (0,),
    "torch": (2, 11),
    "xxhash": (3, 5),
}
TOTAL_S = 570.0
LIMITS_S = {
    "ipc": 90,
    "tests": 240,
    "digest": 90,
    "packing": 90,
    "deltas": 60,
    "cuda_ipc": 120,
    "layouts": 120,
    "staging": 120,
    "stall": 120,
}
# of a short kernel, one behind the other, so that the time between two launches does not count
LAUNCHES = 20
FIGURE = "FIGURE "
ROOT = Path(__file__).resolve().parent.parent


# --------------------------------------------------------------------------------------------------
# the command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benches.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(LIMITS_S), default=tuple(LIMITS_S), metavar="STEP"
    )
    parser.add_argument(
        "--gib", type=float, default=32, help="of the cuda_ipc step; the others take less"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    # this process is one of them
    parser.add_argument("--step", choices=tuple(LIMITS_S), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (fault := _fault()) is not None:
        print(f"nothing was run: {fault}", file=sys.stderr)
        return 2
    if options.step is not None:
        STEPS[options.step](options)
        return 0
    until, outcomes, figures = time.monotonic() + TOTAL_S, dict[str, str](), list[dict[str, Any]]()
    for step in options.only:
        left_s = min(LIMITS_S[step], until - time.monotonic())
        outcomes[step] = (
            _run(step, options, left_s, figures) if left_s > 5 else "not begun: no time is left"
        )
        if step == "ipc" and outcomes[step] != "passed":
            print("CUDA IPC does not work here: what follows from it fails, too")
    print("\n" + "\n".join(f"{step}: {outcome}" for step, outcome in outcomes.items()))
    for figure in figures:
        print(_line(figure))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": _machine(), "outcomes": outcomes, "figures": figures})
        )
    missed = [
        figure["name"]
        for figure in figures
        if figure["bar"] is not None and figure["value"] < figure["bar"]
    ]
    return 1 if missed or any(outcome != "passed" for outcome in outcomes.values()) else 0


def _fault() -> str | None:
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        return (
            f"{sys.executable} lacks {', '.join(lacking)} (cupy is the package cupy-cuda13x): "
            f"give another one by PYTHON="
        )
    old = [
        f"{name} {_version(name)}"
        for name, least in PACKAGES.items()
        if least > (0,) and _numbers(_version(name)) < least
    ]
    if old:
        return f"{sys.executable} has {', '.join(old)}, which is too old: see pyproject.toml"
    import torch

    from tensorhub.cuda.cupy_device import fault_here

    return fault_here() if torch.cuda.is_available() else "torch finds no CUDA device"


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _machine() -> dict[str, object]:
    import cupy
    import torch

    from benches.comparison.facts import facts

    gpu = torch.cuda.get_device_name(0)
    return {**facts(), "gpu": gpu, "cuda": torch.version.cuda, "cupy": cupy.__version__}


def _run(
    step: str, options: argparse.Namespace, limit_s: float, figures: list[dict[str, Any]]
) -> str:
    """Run one step in a process of its own, with all that it starts; collect its figures."""
    print(f"\n== {step}", flush=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    environment["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        _command(step, options),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(FIGURE):
                figures.append(json.loads(line.removeprefix(FIGURE)))
                line = _line(figures[-1])  # noqa: PLW2901
            print(line.rstrip(), flush=True)
        process.wait()
    finally:
        timer.cancel()
        end_is_late = is_late.is_set()
        end()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if end_is_late:
        return f"FAILED: not done after {limit_s:.0f} s"
    return "passed" if process.returncode == 0 else f"FAILED: exit status {process.returncode}"


def _command(step: str, options: argparse.Namespace) -> list[str]:
    settings = ["--gib", str(options.gib), "--rounds", str(options.rounds)]
    return [sys.executable, "-m", "benches.gpu", "--step", step, *settings]


def _line(figure: dict[str, Any]) -> str:
    bar, value = figure["bar"], figure["value"]
    verdict = "" if bar is None else f"  (bar {bar}: {'reached' if value >= bar else 'MISSED'})"
    return f"{figure['name']}: {value:.3g} {figure['unit']}{verdict}  {figure['note']}"


def tell(name: str, value: float, unit: str, bar: float | None = None, note: str = "") -> None:
    """A figure; `bar`: what it is to reach."""
    print(
        FIGURE + json.dumps({"name": name, "value": value, "unit": unit, "bar": bar, "note": note}),
        flush=True,
    )


def _spread(values: Sequence[float]) -> str:
    return f"[{min(values):.3g}-{max(values):.3g}] of {len(values)}"


# --------------------------------------------------------------------------------------------------
# the steps


def prove_ipc(options: argparse.Namespace) -> None:
    """One call: a process exports a tensor, another one reads it."""
    import numpy

    from benches.gpu_processes import exporter_main
    from benches.remotes import Remote
    from tensorhub.cuda.cupy_device import cuda_device
    from tensorhub.cuda.device import DeviceBytes
    from tensorhub.testing.strided_target import bytes_of

    exporter = Remote("exporter", exporter_main)
    try:
        handle, offset, count = exporter.hear()
        device = cuda_device(0)
        base = device.open(handle, offset + 4 * count)
        found = numpy.frombuffer(
            bytes_of(DeviceBytes(device, base + offset, 4 * count, None)), numpy.float32
        )
        device.close(base)
        if found.tolist() != list(range(count)):
            raise SystemExit("the memory was opened, and holds other bytes")
        print(
            f"CUDA IPC works: {count} numbers, {offset} bytes behind the "
            "start of an allocation of torch's"
        )
    finally:
        exporter.end()


def run_tests(options: argparse.Namespace) -> None:
    where = ["tests/cuda", "tests/test_fetch.py", "tests/test_every_tensor.py"]
    arguments = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-rs", *where]
    raise SystemExit(
        subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT).returncode
    )


def digest(options: argparse.Namespace) -> None:
    import cupy
    import torch
    import xxhash

    from tensorhub.cuda.cupy_device import cuda_device

    device = cuda_device(0)
    whole = torch.empty(16 * 2**30, dtype=torch.uint8, device="cuda")
    whole.random_(0, 256)
    other = torch.empty_like(whole)
    torch.cuda.synchronize()
    bare = _seconds(lambda: other.copy_(whole), options.rounds)
    tell(
        "a copy within the GPU",
        whole.nbytes / statistics.median(bare) / 1e12,
        "TB/s",
        note="bytes copied, 16 GiB",
    )
    for count, each, bar in (
        (4096, 4 * 2**20, 1.5),
        (256, 4 * 2**20, None),
        (65_536, 16 * 2**10, None),
    ):
        places = [(whole.data_ptr() + number * each, each) for number in range(count)]
        table, made = device.table(places), cupy.empty(count, cupy.uint64)
        seconds = _seconds(
            lambda: device.launch("digest_chunks", count, table, made),  # noqa: B023
            options.rounds,
        )
        for number in (0, count // 2, count - 1):
            expected = xxhash.xxh3_64_intdigest(
                whole[number * each : (number + 1) * each].cpu().numpy().data
            )
            if int(made[number]) != expected:
                raise SystemExit(
                    f"chunk {number} of {each} bytes has digest {int(made[number])}, and should "
                    f"have {expected}"
                )
        rates = [count * each / second / 1e12 for second in seconds]
        tell(
            f"digest of {count} x {each // 1024} KiB",
            statistics.median(rates),
            "TB/s",
            bar,
            _spread(rates),
        )
        started = time.perf_counter()
        device.digests(places)
        taken_s = time.perf_counter() - started
        tell(
            "  the same, with its table and its answer",
            count * each / taken_s / 1e12,
            "TB/s",
            note="one call",
        )


def _seconds(work: Callable[[], object], rounds: int, times: int = 1) -> list[float]:
    """Of the GPU, for each round, after one that does not count; on cupy's current stream."""
    import cupy

    found = []
    for _ in range(rounds + 1):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / times)
    return found[1:]


def packing(options: argparse.Namespace) -> None:
    import torch

    from tensorhub.cuda.cupy_device import cuda_device

    count, each = 10_000, 16 * 2**10
    device = cuda_device(0)
    tensors = [
        torch.full((each,), number % 251, dtype=torch.uint8, device="cuda")
        for number in range(count)
    ]
    torch.cuda.synchronize()
    region = device.allocate(count * each)
    kernels = device.packing(
        region, [(tensor.data_ptr(), number * each, each) for number, tensor in enumerate(tensors)]
    )
    apart = torch.empty(count * each, dtype=torch.uint8, device="cuda")
    parts = [apart[number * each : (number + 1) * each] for number in range(count)]
    loops: dict[str, Callable[[], object]] = {
        "pack": lambda: [part.copy_(tensor) for part, tensor in zip(parts, tensors, strict=True)],
        "unpack": lambda: [tensor.copy_(part) for part, tensor in zip(parts, tensors, strict=True)],
    }
    for name, loop in loops.items():
        ours, theirs = [], []
        for number in range(options.rounds + 1):
            with kernels.stream:
                (our_s,) = _seconds(lambda: kernels.queue(f"{name}_pieces"), 1, LAUNCHES)  # noqa: B023
            # both are on the null stream, which is torch's default one
            (their_s,) = _seconds(loop, 1)
            if number:
                ours.append(our_s)
                theirs.append(their_s)
        ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
        note = (
            f"{statistics.median(ours) * 1e6:.0f} us against "
            f"{statistics.median(theirs) * 1e3:.1f} ms; {_spread(ratios)}"
        )
        tell(
            f"{name} of {count} x 16 KiB, against a copy_ for each",
            statistics.median(ratios),
            "times",
            10,
            note,
        )
    if not torch.equal(torch.utils.dlpack.from_dlpack(region.storage), apart):
        raise SystemExit("the packed region holds other bytes than the tensors")


def compared(options: argparse.Namespace) -> None:
    import numpy

    from tensorhub import deltas
    from tensorhub.cuda.cupy_device import cuda_device
    from tensorhub.errors import StateError
    from tensorhub.memory.addresses import copy_bytes
    from tensorhub.memory.chunks import ChunkMemory
    from tensorhub.model.manifest import TensorDescription, build_manifest

    if (fault := deltas.fault_here()) is not None:
        raise SystemExit(fault)
    each, count = 8 * 2**20, 16
    nbytes, chance, device = each * count, numpy.random.default_rng(1), cuda_device(0)
    old = chance.integers(0, 2**16, nbytes // 2, numpy.uint16)
    new = old.copy()
    new[chance.random(old.size) < 0.016] += 1
    tensor = TensorDescription("w", "bfloat16", (old.size,), 1 << 40, nbytes)
    manifest = build_manifest([tensor], each, "xxh3-64")
    regions = [device.allocate(nbytes) for _ in range(3)]
    for content, region in zip((new, old, old), regions, strict=True):
        copy_bytes(content.view(numpy.uint8).data, region)
    *versions, reader = (ChunkMemory(manifest, [region]) for region in regions)
    shadow = memoryview(bytearray(old.tobytes()))

    def no_room(*_: object) -> None:
        raise StateError("the host's turn", retryable=True)

    def turn() -> tuple[float, float, list[bytes | None]]:
        """To the new bytes, and back: the rates of comparing and of applying, and the deltas."""
        compare_s, apply_s, made = 0.0, 0.0, list[bytes | None]()
        for version in versions:
            for chunk in range(count):
                started = time.perf_counter()
                frame = version.advance(chunk, shadow[chunk * each : (chunk + 1) * each], 2)
                between = time.perf_counter()
                reader.apply(chunk, [frame or b""])
                compare_s += between - started
                apply_s += time.perf_counter() - between
                made.append(frame)
        return 2 * nbytes / compare_s / 2**30, 2 * nbytes / apply_s / 2**30, made

    rates, frames = dict[str, list[tuple[float, float]]](), dict[str, list[bytes | None]]()
    for number in range(options.rounds + 1):
        for where in "GPU", "host":
            with contextlib.ExitStack() as stack:
                if where == "host":
                    for name in "changes", "add":
                        stack.enter_context(mock.patch.object(device, name, no_room))
                *found, frames[where] = turn()
            if number:
                rates.setdefault(where, []).append((found[0], found[1]))
    if frames["GPU"] != frames["host"]:
        raise SystemExit("the GPU's deltas are not the codec's")
    for what, column in ("comparing", 0), ("applying", 1):
        by = {where: [pair[column] for pair in rates[where]] for where in rates}
        ratios = [gpu / host for gpu, host in zip(by["GPU"], by["host"], strict=True)]
        medians = [f"{where} {statistics.median(by[where]):.2f} GiB/s" for where in by]
        note = f"{_spread(ratios)}; {', '.join(medians)}, one thread"
        tell(f"{what} on the GPU, of on the host", statistics.median(ratios), "times", note=note)


def cuda_ipc(options: argparse.Namespace) -> None:
    from benches.gpu_processes import publisher_main, reader_main
    from benches.remotes import Remote

    nbytes, each = int(options.gib * 2**30), 2**30
    publisher = Remote("publisher", publisher_main, nbytes, each, "cuda", 2**30)
    started = [publisher]
    try:
        address, sizes = publisher.hear()
        total = sum(sizes.values())
        reader = Remote("reader", reader_main, address, nbytes, each, "cuda", ("cuda_ipc",))
        started.append(reader)
        reader.hear()
        ratios, rates = [], []
        for version in range(1, options.rounds + 2):
            publisher.ask("publish", version)
            report = reader.ask("fetch", "plain", version)
            if version in (1, options.rounds + 1) and reader.ask("sum") != publisher.ask("sum"):
                raise SystemExit("the reader holds other bytes than the publisher")
            reader.ask("unpublish", "plain")
            bare_s = reader.ask("bare")
            publisher.ask("unpublish")
            if version > 1:
                ratios.append(bare_s / report["phases"]["transfer"])
                rates.append(total / report["seconds"] / 1e9)
        note = (
            f"{_spread(ratios)}; whole calls {statistics.median(rates):.0f} GB/s; "
            f"{report['transports']}"
        )
        gib = total / 2**30
        tell(
            f"cuda_ipc's transfer of {gib:.0f} GiB, of a copy within",
            statistics.median(ratios),
            "",
            0.9,
            note,
        )
    finally:
        for remote in reversed(started):
            remote.end()


def layouts(options: argparse.Namespace) -> None:
    from benches.resharded import CASES, compare

    for transport in ("cuda_ipc", "tcp"):
        rounds = compare(2048, transport, "cuda", options.rounds)
        for case in CASES:
            ratios = [each["same"][0] / each[case.name][0] for each in rounds]
            rate = statistics.median([2 / each[case.name][0] for each in rounds])
            note = f"{_spread(ratios)}; {rate:.3g} GiB/s"
            tell(
                f"{transport}, {case.name}: speed of the same layout",
                statistics.median(ratios),
                "",
                note=note,
            )


def staging(options: argparse.Namespace) -> None:
    from benches.gpu_processes import publisher_main, reader_main
    from benches.remotes import Remote

    nbytes, each, started = 2 * 2**30, 256 * 2**20, list[Remote]()
    devices = ("cpu", "cuda")
    try:
        for device in devices:  # side by side: importing torch takes some seconds
            started.append(Remote(f"publisher on {device}", publisher_main, nbytes, each, device))
        addresses = [publisher.hear()[0] for publisher in started]
        for device, address in zip(devices, addresses, strict=True):
            started.append(
                Remote(f"reader on {device}", reader_main, address, nbytes, each, device, ("tcp",))
            )
        for reader in started[2:]:
            reader.hear()
        pairs = dict(zip(devices, zip(started[:2], started[2:], strict=True), strict=True))
        seconds: dict[tuple[str, str], list[float]] = {}
        for version in range(1, options.rounds + 2):
            for device in pairs if version % 2 else reversed(pairs):
                publisher, reader = pairs[device]
                publisher.ask("publish", version)
                for model in ("digested", "plain"):
                    report = reader.ask("fetch", model, version)
                    if version == 1 and reader.ask("sum") != publisher.ask("sum"):
                        raise SystemExit(
                            f"{device}: the reader holds other bytes than the publisher"
                        )
                    reader.ask("unpublish", model)
                    if version > 1:
                        seconds.setdefault((model, device), []).append(report["seconds"])
                publisher.ask("unpublish")
        for model, bar in (("digested", 0.85), ("plain", None)):
            both = zip(seconds[model, "cpu"], seconds[model, "cuda"], strict=True)
            ratios = [cpu_s / gpu_s for cpu_s, gpu_s in both]
            rates = {
                device: nbytes / statistics.median(seconds[model, device]) / 1e9 for device in pairs
            }
            note = f"{_spread(ratios)}; GPU {rates['cuda']:.2f} GB/s, CPU {rates['cpu']:.2f} GB/s"
            tell(
                f"GPU to GPU over tcp, of CPU to CPU ({model})",
                statistics.median(ratios),
                "",
                bar,
                note,
            )
    finally:
        for remote in reversed(started):
            remote.end()


def stall(options: argparse.Namespace) -> None:
    from benches.gpu_processes import gloo_main, publisher_main, reader_main
    from benches.remotes import Remote

    # Less of it than of the others: gloo moves some GB/s at the best, and starting its eight
    # processes takes a while.
    nbytes, each, started = 4 * 2**30, 64 * 2**20, list[Remote]()
    try:
        publisher = Remote("trainer", publisher_main, nbytes, each, "cuda")
        started.append(publisher)
        meeting = f"tcp://127.0.0.1:{_free_port()}"
        ranks = [
            Remote(f"gloo {rank}", gloo_main, rank, 3, meeting, nbytes, each) for rank in range(3)
        ]
        started += ranks
        address, _ = publisher.hear()
        rollouts: dict[str, list[Remote]] = {}
        for transport in ("cuda_ipc", "tcp"):
            rollouts[transport] = [
                Remote(
                    f"{transport} {number}",
                    reader_main,
                    address,
                    nbytes,
                    each,
                    "cuda",
                    (transport,),
                    len(started) + number,
                )
                for number in range(2)
            ]
            started += rollouts[transport]
        for remote in started[1:]:
            remote.hear()
        stalls: dict[str, list[float]] = {}
        trainers: dict[str, list[float]] = {}
        phases: dict[str, list[dict[str, float]]] = {}
        version = 0
        for number in range(min(options.rounds, 3) + 1):
            for transport, readers in rollouts.items():
                version += 1
                trainer_s = publisher.ask("publish", version)
                for reader in readers:
                    reader.tell("fetch", "digested", version)
                reports = [reader.hear() for reader in readers]
                trainer_s += publisher.ask("unpublish")
                for reader in readers:
                    reader.ask("unpublish", "digested")
                if number:
                    stalls.setdefault(transport, []).append(
                        max(report["stall"] for report in reports)
                    )
                    phases.setdefault(transport, []).append(
                        max(reports, key=lambda report: report["stall"])["phases"]
                    )
                    trainers.setdefault(transport, []).append(trainer_s)
            for rank in ranks:
                rank.tell("broadcast")
            taken = [rank.hear() for rank in ranks]
            if number:
                stalls.setdefault("gloo", []).append(max(taken[1:]))
                trainers.setdefault("gloo", []).append(taken[0])
        for way, found in stalls.items():
            last = (
                ", ".join(
                    f"{name} {taken_s * 1e3:.1f}" for name, taken_s in phases[way][-1].items()
                )
                if way in phases
                else ""
            )
            note = (
                f"{_spread(found)}; the trainer {statistics.median(trainers[way]):.3g} s; "
                f"phases in ms: {last or 'none'}"
            )
            tell(
                f"stall of two rollouts, {nbytes // 2**30} GiB, {way}",
                statistics.median(found),
                "s",
                note=note,
            )
    finally:
        for remote in reversed(started):
            remote.end()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "ipc": prove_ipc,
    "tests": run_tests,
    "digest": digest,
    "packing": packing,
    "deltas": compared,
    "cuda_ipc": cuda_ipc,
    "layouts": layouts,
    "staging": staging,
    "stall": stall,
}


if __name__ == "__main__":
    sys.exit(main())
