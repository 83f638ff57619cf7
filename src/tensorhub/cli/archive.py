"""`tensorhub archive`: a model's versions in object storage, kept there and served from there."""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

import tensorhub
from tensorhub.api.archiving import show_archiving
from tensorhub.api.tools import show_seeding
from tensorhub.archives.store_faults import checked_url
from tensorhub.cli import common, progress
from tensorhub.transport.segments import available_bytes
from tensorhub.types import Location, Options, check_name


def archive(
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="The model to archive.")],
    url: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="URL",
            help="s3://BUCKET/PREFIX, gs://, az:// or file:///DIRECTORY.",
        ),
    ],
    every: Annotated[
        int, common.whole_option(1, help="Archive versions with numbers that this divides.")
    ] = 1,
    keep: Annotated[
        str | None, typer.Option(metavar="N", help="Keep the newest N versions. Default: all.")
    ] = None,
    keep_every: Annotated[
        int, common.whole_option(0, help="With --keep: keep the multiples of this, too.")
    ] = 0,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Make the versions of another, former cluster this cluster's, so that it starts "
            "again from the bucket.",
        ),
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Write there although another archiver does.")
    ] = False,
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=common.size,
            metavar="SIZE",
            help="Memory for versions, as in 15GB: two of them or more. Default: half of what is "
            "free.",
        ),
    ] = None,
    site: common.SiteOption = None,
    http: common.HttpOption = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Keep a model's versions in object storage, and serve all that are there, until Ctrl-C or
    SIGTERM.

    One line goes to stdout for each archived version ({"model", "version", "base", "bytes",
    "stored_bytes"} with --json; "base" is the version that it is stored as a difference to, null
    for a whole checkpoint). Credentials come from the environment, as AWS_ACCESS_KEY_ID. A bucket
    that cannot be used at the start ends it with exit code 1, and so does another archiver that
    takes over. SIGTERM is the ordinary way to stop it: exit code 0.
    """
    with common.checking():
        check_name("model", model)
        checked_url(url)
        here = common.location(site)
        options = Options(host_memory_bytes=host_memory or available_bytes() // 2, http=http)
    archiving = Archiving(
        model,
        url,
        every,
        None if keep is None else common.whole(1)(keep),
        keep_every,
        serve,
        take_over,
        options,
        here,
        common.connecting(address, token_file),
        as_json,
        quiet,
    )
    logs = logging.ERROR if quiet else logging.WARNING
    common.run(archiving.run, logs=logs, sigterm_is_ordinary=lambda: archiving.has_begun)


@dataclass
class Archiving:
    model: str
    url: str
    every: int
    keep: int | None
    keep_every: int
    serve: bool
    take_over: bool
    options: Options
    location: Location
    connect: common.Connect
    as_json: bool
    quiet: bool
    has_begun: bool = False

    async def run(self) -> int:
        with progress.BytesBar(shown=not (self.quiet or self.as_json)) as bar:
            return await self._follow(bar)

    async def _follow(self, bar: progress.BytesBar) -> int:
        async with self.connect(location=self.location, options=self.options) as hub:
            show_seeding(hub, progress.seeding(bar))
            async with tensorhub.archive(
                hub,
                self.model,
                self.url,
                every=self.every,
                keep=self.keep,
                keep_every=self.keep_every,
                serve=self.serve,
                take_over=self.take_over,
            ) as there:
                show_archiving(
                    there,
                    lambda version, done, nbytes: bar.tell(
                        f"archiving {self.model} version {version}", done, nbytes
                    ),
                )
                return await self._tell_of_each(hub, there, bar)

    async def _tell_of_each(
        self, hub: tensorhub.Hub, there: tensorhub.Archive, bar: progress.BytesBar
    ) -> int:
        self.has_begun = True
        last = there.versions[-1].version if there.versions else -1
        if not self.quiet:
            has = f"has {len(there.versions)} versions" if there.versions else "is empty"
            text = f"{self.url} {has} of {self.model!r}; following it, Ctrl-C stops"
            print(text, file=sys.stderr, flush=True)
            if not there.versions:
                await common.tell_if_unpublished(hub, self.model, "until it is")
        while True:
            await there.wait_for(at_least=last + 1, timeout=math.inf)
            bar.end()
            for each in there.versions:
                if each.version > last:
                    self._tell(each)
            last = there.versions[-1].version

    def _tell(self, archived: tensorhub.ArchivedVersion) -> None:
        if self.as_json:
            said: dict[str, object] = {
                "model": self.model,
                "version": archived.version,
                "base": archived.base,
                "bytes": archived.nbytes,
                "stored_bytes": archived.stored_bytes,
            }
            print(json.dumps(said), flush=True)
            return
        how = "whole" if archived.base is None else f"as a difference to {archived.base}"
        print(
            f"archived {self.model} version {archived.version} {how} "
            f"({archived.stored_bytes:,} of {archived.nbytes:,} bytes)",
            flush=True,
        )
