"""`tensorhub seed`: the newest version of a model in this process' host memory, as a source for its
site.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import dataclass
from typing import Annotated

import anyio
import typer

import tensorhub
from tensorhub.api.tools import seed_shard, show_seeding
from tensorhub.cli import common, progress
from tensorhub.errors import LeaseLost, TensorHubError, VersionUnavailable
from tensorhub.types import FetchReport, Location, Options, VersionInfo, check_name, printable

RETRY_S = 1.0  # before a version that could not be read is asked for again


def seed(
    model: Annotated[str, typer.Argument(help="The model to hold.")],
    host_memory: Annotated[
        int,
        typer.Option(
            parser=common.size,
            metavar="SIZE",
            help="Memory for one version's shards, as in 15GB or 500MiB.",
        ),
    ],
    rank: Annotated[
        list[str] | None,
        typer.Option(
            "--rank", metavar="N", help="Which shard to hold; may be repeated. Default: all."
        ),
    ] = None,
    site: common.SiteOption = None,
    http: common.HttpOption = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Hold the newest version of a model in host memory, until Ctrl-C or SIGTERM: a source for the
    workers of its site.

    Each new version replaces the version before as soon as it is published. Workers read the part
    that has arrived while the rest is on its way. One line goes to stdout for each complete version
    ({"model", "version", "ranks", "bytes_read", "bytes_saved", "deltas", "seconds"} with --json;
    docs/deltas.md lists the words of "deltas"). After the first line, SIGTERM is the ordinary way
    to stop it: exit code 0. Too little --host-memory, or a rank that the model does not have, ends
    it with exit code 1.
    """
    with common.checking():
        check_name("model", model)
        here = common.location(site)
        options = Options(host_memory_bytes=host_memory, http=http)
    seeder = Seeder(
        model,
        _ranks(rank),
        options,
        here,
        common.connecting(address, token_file),
        as_json,
        quiet,
    )
    logs = logging.ERROR if quiet else logging.WARNING
    common.run(seeder.run, logs=logs, sigterm_is_ordinary=lambda: seeder.has_seeded)


def _ranks(given: list[str] | None) -> tuple[int, ...] | None:
    """Which shards; None: all."""
    if not given or given == ["all"]:
        return None
    if not all(text.isdecimal() and len(text) < 8 and int(text) < 2**20 for text in given):
        raise common.usage(f"--rank {' '.join(given)}: give numbers from 0, or all")
    return tuple(sorted({int(text) for text in given}))


@dataclass
class Seeder:
    model: str
    ranks: tuple[int, ...] | None
    options: Options
    location: Location
    connect: common.Connect
    as_json: bool
    quiet: bool
    has_seeded: bool = False
    refusal: str = ""  # that was printed last: each one is printed once

    async def run(self) -> int:
        with progress.BytesBar(shown=not (self.quiet or self.as_json)) as bar:
            return await self._follow(bar)

    async def _follow(self, bar: progress.BytesBar) -> int:
        async with self.connect(location=self.location, options=self.options) as hub:
            show_seeding(hub, progress.seeding(bar))
            if not self.quiet:
                await common.tell_if_unpublished(hub, self.model, "until it is")
            watcher = hub.watch(self.model)
            while True:
                try:
                    info = await anext(watcher)
                except LeaseLost as error:
                    # The coordinator has no state_dir. What the new cluster publishes is seeded.
                    print(f"begins anew: {printable(str(error))}", file=sys.stderr, flush=True)
                    continue
                while not await self._hold(hub, info, bar):
                    await anyio.sleep(RETRY_S)
                    info = self._newest(hub) or info

    def _newest(self, hub: tensorhub.Hub) -> VersionInfo | None:
        with contextlib.suppress(LeaseLost):  # the watcher says so
            return hub.newest(self.model)
        return hub.newest(self.model)

    async def _hold(self, hub: tensorhub.Hub, info: VersionInfo, bar: progress.BytesBar) -> bool:
        """Have every shard that is wanted of the newest version. False: not now; try again."""
        ranks = self.ranks if self.ranks is not None else tuple(range(info.world_size))
        if ranks[-1] >= info.world_size:
            text = (
                f"version {info.version} of {info.model!r} has no rank {ranks[-1]}: its "
                f"world_size is {info.world_size}"
            )
            raise VersionUnavailable(text)
        reports: list[FetchReport] = []
        refusals: list[TensorHubError] = []

        async def hold(rank: int) -> None:
            try:
                reports.append(await seed_shard(hub, info, rank))
            except TensorHubError as error:
                refusals.append(error)

        async with anyio.create_task_group() as tasks:
            for rank in ranks:
                tasks.start_soon(hold, rank)
        bar.end()
        for error in refusals:
            if not error.retryable:
                raise error
            if str(error) != self.refusal:
                self.refusal = str(error)
                print(f"not seeded yet: {printable(str(error))}", file=sys.stderr, flush=True)
        numbers = {report.version for report in reports}
        if refusals or len(numbers) != 1:
            return False  # or a newer one was published between two of them
        self._tell(info, ranks, reports)
        self.refusal = ""
        return True

    def _tell(self, info: VersionInfo, ranks: tuple[int, ...], reports: list[FetchReport]) -> None:
        first, self.has_seeded = not self.has_seeded, True
        bytes_read, seconds = sum(r.bytes_read for r in reports), max(r.seconds for r in reports)
        number, saved = reports[0].version, sum(r.bytes_saved for r in reports)
        uses = sorted({each.deltas for r in reports for each in r.sources if each.bytes_read})
        if self.as_json:
            said: dict[str, object] = {
                "model": info.model,
                "version": number,
                "ranks": ranks,
                "bytes_read": bytes_read,
                "bytes_saved": saved,
                "deltas": uses,
            }
            print(json.dumps({**said, "seconds": round(seconds, 3)}), flush=True)
            return
        shards = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        read = f"read {bytes_read:,} bytes in {seconds:.3f} s"
        read += f"; deltas: {', '.join(uses)}" if uses else ""
        print(f"seeding {info.model} version {number} ({shards}; {read})", flush=True)
        if first and not self.quiet:
            print("following its new versions; Ctrl-C stops it", file=sys.stderr, flush=True)
