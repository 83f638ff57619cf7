"""`tensorhub fetch`: a version as safetensors files."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import anyio.to_thread
import typer

from tensorhub.api.tools import fetch_into
from tensorhub.cli import common, progress
from tensorhub.memory.file_target import FileTarget
from tensorhub.types import FetchReport, Options, VersionInfo, check_name, check_selector, printable


def fetch(
    model: Annotated[str, typer.Argument(help="The model to fetch.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="A name that ends in .safetensors is one file, else a directory."
        ),
    ],
    names: common.NamesOption = None,
    version: common.SelectorOption = "latest",
    rank: Annotated[
        int | None,
        common.whole_option(0, 2**20 - 1, help="Only this rank's shard; default: the whole model."),
    ] = None,
    timeout: Annotated[
        float | None,
        common.seconds_option(
            0, math.inf, help="Give up after so many seconds; default 60, inf: never."
        ),
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Fetch a version into safetensors files, byte-equal to the published ones if it was published
    from files.

    The output appears when all of it is on the disk. Until then, and after an error, there is
    nothing at --out. After Ctrl-C, a kill or an error, repeat the command to go on: bytes that have
    arrived are verified, and not read again. One fetch at a time writes to an --out. The command
    waits, --timeout long, for a coordinator that does not run yet. A directory gets the publisher's
    files and index, else model.safetensors. An output that exists is refused with exit code 2
    before anything is fetched; --force replaces it, file by file. The result is one line on stdout
    ({"model", "version", "content_id", "files", "bytes", "seconds", "phases",
    "bytes_saved", "changed_words", "codec_s", "bytes_by_kind", "sources"} with --json, as
    `FetchReport` has them).
    """
    with common.checking():
        check_name("model", model)
    with common.checking("--version"):
        # int() refuses thousands of digits
        selector = check_selector(int(version) if version.isdecimal() else version)
    connect = common.connecting(address, token_file)

    async def body() -> int:
        with common.checking():
            target = FileTarget(out, names or None, force=force)
        with target, _telling_what_is_kept(target):
            async with common.connected(
                connect, min(_seconds(timeout), 1e8), _until(timeout), quiet=quiet
            ) as hub:
                if not quiet and not isinstance(selector, int):
                    await common.tell_if_unpublished(hub, model, _until(timeout))
                shown = not (quiet or as_json)
                with progress.bytes_bar(f"fetching {model}", shown=shown) as bar:
                    info, report = await fetch_into(
                        hub, model, selector, target, rank=rank, timeout=timeout, progress=bar
                    )
            started = time.perf_counter()
            await anyio.to_thread.run_sync(target.commit)
        _tell(info, report, target.files, time.perf_counter() - started, as_json=as_json)
        return 0

    common.run(body)


@contextlib.contextmanager
def _telling_what_is_kept(target: FileTarget) -> Iterator[None]:
    """Where it ends early: what has arrived is not lost, and takes room."""
    try:
        yield
    except BaseException:
        if (kept := target.close()) is not None:
            text = (
                f"what has arrived is kept in {kept}: the same command goes on from there, or "
                f"remove it"
            )
            print(printable(text), file=sys.stderr, flush=True)
        raise


def _seconds(timeout: float | None) -> float:
    return Options().op_timeout_s if timeout is None else timeout


def _until(timeout: float | None) -> str:
    """How long a fetch waits, in words."""
    seconds_ = _seconds(timeout)
    return "until it is" if math.isinf(seconds_) else f"{seconds_:g} s at most"


def _tell(
    info: VersionInfo,
    report: FetchReport,
    files: tuple[Path, ...],
    write_s: float,
    *,
    as_json: bool,
) -> None:
    seconds = report.seconds + write_s
    if as_json:
        phases = {**report.phases, "write": write_s}
        said = {
            "model": info.model,
            "version": info.version,
            "content_id": info.content_id,
            "files": list(map(str, files)),
            "bytes": report.bytes_read,
            "verified_by": report.verified_by,
            "seconds": round(seconds, 3),
            "phases": {name: round(each, 3) for name, each in phases.items()},
            "bytes_saved": report.bytes_saved,
            "changed_words": report.changed_words,
            "codec_s": round(report.codec_s, 3),
            "bytes_by_kind": dict(report.bytes_by_kind),
            "sources": [asdict(each) for each in report.sources],
        }
        print(json.dumps(said), flush=True)
        return
    where = f"{files[0]}" if len(files) == 1 else f"{len(files)} files in {files[0].parent}"
    kinds = [f"{kind} {nbytes:,}" for kind, nbytes in report.bytes_by_kind.items() if nbytes]
    of_kinds = f" ({', '.join(kinds)})" if set(report.bytes_by_kind) - {"live"} else ""
    what = f"{info.model} version {info.version}: {report.bytes_read:,} bytes{of_kinds}"
    print(f"fetched {what} in {seconds:.3f} s into {where}", flush=True)
