"""`tensorhub fetch`: a version as safetensors files."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import anyio.to_thread
import typer

from tensorhub.api.tools import fetch_into
from tensorhub.cli import common
from tensorhub.memory.file_target import FileTarget
from tensorhub.types import FetchReport, Options, VersionInfo, check_name, check_selector, printable


def fetch(
    model: Annotated[str, typer.Argument(help="The model to fetch.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A name that ends in .safetensors is one file, else a directory.")
    ],
    names: Annotated[
        list[str] | None, typer.Option("--names", metavar="GLOB", help="Only these tensors ('layers.0.*'); may be repeated.")
    ] = None,
    version: Annotated[
        str,
        typer.Option(
            metavar="SELECTOR", help="A number, latest, latest-1, or available (the newest that can be fetched now)."
        ),
    ] = "latest",
    rank: Annotated[
        int | None,
        common.whole_option(0, 2**20 - 1, help="Only this rank's shard; default: the whole model."),
    ] = None,
    timeout: Annotated[
        float | None,
        common.seconds_option(0, math.inf, help="Give up after so many seconds; default 60, inf: never."),
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Fetch a version into safetensors files, byte-equal to the published ones if it was published from files.

    The output appears when all of it is on the disk. Until then, and after an error, there is nothing at --out. After
    Ctrl-C, a kill or an error, repeat the command to go on: bytes that have arrived are verified, and not read again. One
    fetch at a time writes to an --out. The command waits, --timeout long, for a coordinator that does not run yet. A
    directory gets the publisher's files and index, else model.safetensors. An output that exists is refused with exit
    code 2 before anything is fetched; --force replaces it, file by file. The result is one line on stdout ({"model",
    "version", "content_id", "files", "bytes", "seconds", "phases"} with --json).
    """
    with common.checking():
        check_name("model", model)
    with common.checking("--version"):
        selector = check_selector(int(version) if version.isdecimal() else version)  # int() refuses thousands of digits
    connect = common.connecting(address, token_file)

    async def body() -> int:
        with common.checking():
            target = FileTarget(out, names or None, force=force)
        with target, _telling_what_is_kept(target):
            async with common.connected(connect, min(_seconds(timeout), 1e8), _until(timeout), quiet=quiet) as hub:
                if not quiet and not isinstance(selector, int):
                    await common.tell_if_unpublished(hub, model, _until(timeout))
                with common.bytes_bar(f"fetching {model}", quiet) as bar:
                    info, report = await fetch_into(hub, model, selector, target, rank=rank, timeout=timeout, progress=bar)
            started = time.perf_counter()
            await anyio.to_thread.run_sync(target.commit)
            fetched = Fetched(info, report, target.files, time.perf_counter() - started)
        print(json.dumps(fetched.as_json()) if as_json else str(fetched), flush=True)
        return 0

    common.run(body)


@contextlib.contextmanager
def _telling_what_is_kept(target: FileTarget) -> Iterator[None]:
    """Where it ends early: what has arrived is not lost, and takes room."""
    try:
        yield
    except BaseException:
        if (kept := target.close()) is not None:
            text = f"what has arrived is kept in {kept}: the same command goes on from there, or remove it"
            print(printable(text), file=sys.stderr, flush=True)
        raise


def _seconds(timeout: float | None) -> float:
    return Options().op_timeout_s if timeout is None else timeout


def _until(timeout: float | None) -> str:
    """How long a fetch waits, in words."""
    seconds_ = _seconds(timeout)
    return "until it is" if math.isinf(seconds_) else f"{seconds_:g} s at most"


@dataclass(frozen=True)
class Fetched:
    """What a fetch has written."""

    info: VersionInfo
    report: FetchReport
    files: tuple[Path, ...]
    write_s: float

    @property
    def seconds(self) -> float:
        return self.report.seconds + self.write_s

    @property
    def nbytes(self) -> int:
        """That were read."""
        return self.report.bytes_read

    def __str__(self) -> str:
        where = f"{self.files[0]}" if len(self.files) == 1 else f"{len(self.files)} files in {self.files[0].parent}"
        what = f"{self.info.model} version {self.info.version}: {self.nbytes:,} bytes"
        return f"fetched {what} in {self.seconds:.3f} s into {where}"

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.info.model,
            "version": self.info.version,
            "content_id": self.info.content_id,
            "files": list(map(str, self.files)),
            "bytes": self.nbytes,
            "verified_by": self.report.verified_by,
            "seconds": round(self.seconds, 3),
            "phases": {name: round(seconds, 3) for name, seconds in {**self.report.phases, "write": self.write_s}.items()},
        }
