"""`tensorhub publish`: a model's files as a version, served until told to stop: where they are, or
from memory if they are in object storage.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import anyio.to_thread
import typer

import tensorhub
from tensorhub.api.tools import register_memory
from tensorhub.archives.checkpoints import CheckpointMemory
from tensorhub.cli import common, progress
from tensorhub.errors import MutabilityViolation, VersionConflict, VersionUnavailable
from tensorhub.memory.files import FileMemory
from tensorhub.transport.segments import Segment
from tensorhub.types import VERSION_MAX, Options, VersionInfo, check_name

POLL_S = 0.25  # how often the files are looked at

Published: TypeAlias = "FileMemory | CheckpointMemory"


def publish(
    path: Annotated[
        str,
        typer.Argument(
            help="A .safetensors file, a directory of them, or a sharded model's .index.json; here "
            "or at a URL (s3://BUCKET/PATH, gs://, az://, file://)."
        ),
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="The name to publish under.")],
    version: Annotated[
        int | None,
        common.whole_option(
            0, VERSION_MAX, help="Default: the newest number plus 1; 0 for a new model."
        ),
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Publish safetensors files, and serve them until Ctrl-C or SIGTERM.

    Files on this machine are served where they are. Nothing is copied, so they must not change
    while it runs. If one is written, the command ends with exit code 1; its readers fail, and never
    get other bytes. Files at a URL are read into memory, and to no disk; credentials come from the
    environment, as AWS_ACCESS_KEY_ID. When the version is visible, one line goes to stdout
    ({"model", "version", "content_id", "bytes", "tensors", "files"} with --json). From then on
    SIGTERM is the ordinary way to stop it: exit code 0. Files that cannot be published are exit
    code 2.
    """
    with common.checking():
        check_name("model", model)
    publisher = Publisher(
        path, model, version, common.connecting(address, token_file, Options()), as_json, quiet
    )
    logs = logging.ERROR if quiet else logging.WARNING
    common.run(publisher.run, logs=logs, sigterm_is_ordinary=lambda: publisher.is_visible)


@dataclass
class Publisher:
    path: str
    model: str
    version: int | None
    connect: common.Connect
    as_json: bool
    quiet: bool
    is_visible: bool = False

    async def run(self) -> int:
        with await self._open() as memory:
            async with self.connect() as hub:
                weights = await register_memory(hub, self.model, memory)
                number = self._number((await hub.describe(self.model, limit=0)).mark)
                name = self.path.rstrip("/").rpartition("/")[2]
                shown = not (self.quiet or self.as_json)
                with progress.bytes_bar(f"reading {name}", shown=shown) as memory.progress:
                    info = await weights.publish(number)
                self._tell(info, memory)
                await self._watch(memory, weights)
        return 0

    async def _open(self) -> Published:
        if "://" not in self.path:
            with common.checking(instead="a safetensors file or a directory of them"):
                return FileMemory(Path(self.path))
        with common.checking():
            memory = await anyio.to_thread.run_sync(CheckpointMemory, self.path)
        if not self.quiet:
            nbytes = common.format_bytes(memory.memory_bytes)
            print(f"reading {nbytes} of {self.path} into memory", file=sys.stderr, flush=True)
        if memory.memory_bytes:
            segment = await anyio.to_thread.run_sync(Segment, memory.memory_bytes)
            memory.take(segment.bytes_at(0, memory.memory_bytes))
        return memory

    def _number(self, mark: int | None) -> int:
        """The number to publish; a used one is refused before gigabytes are read."""
        if self.version is None:
            return 0 if mark is None else mark + 1
        if mark is not None and self.version <= mark:
            raise VersionConflict(
                f"{self.version} is not above {mark}, the newest version of {self.model!r} ever "
                f"published; leave --version out, or give {mark + 1} or more. No command goes "
                f"back: a Python program does, with hub.rollback({self.model!r}, to=N), N less "
                f"than {self.version}"
            )
        return self.version

    def _tell(self, info: VersionInfo, memory: Published) -> None:
        self.is_visible = True
        tensors, files = len(memory.descriptions), len(memory.names)
        if self.as_json:
            said = {
                "model": info.model,
                "version": info.version,
                "content_id": info.content_id,
                "bytes": info.nbytes,
            }
            print(
                json.dumps({**said, "tensors": tensors, "files": memory.names}),
                flush=True,
            )
            return
        what = f"{info.nbytes:,} bytes, {tensors} tensors, {files} file{'s' * (files > 1)}"
        print(f"published {info.model} version {info.version} ({what})", flush=True)
        if not self.quiet:
            place = "the files, which must stay as they are"
            if isinstance(memory, CheckpointMemory):
                place = "memory"
            print(f"serving it from {place}; Ctrl-C stops it", file=sys.stderr, flush=True)

    async def _watch(self, memory: Published, weights: tensorhub.Weights) -> None:
        while True:
            if (change := memory.changed()) is not None:
                raise MutabilityViolation(
                    f"{change}. The version is taken back: publish it again, under another number"
                )
            if weights.version is None:
                text = (
                    f"the coordinator knows this version of {self.model!r} no more (it lost its "
                    f"state, or retired it)"
                )
                raise VersionUnavailable(f"{text}: publish it again")
            await anyio.sleep(POLL_S)
