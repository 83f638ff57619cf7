"""`tensorhub serve`: a coordinator in a process of its own."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import anyio
import typer

import tensorhub
from tensorhub.cli import common
from tensorhub.cli.descriptors import raise_descriptors
from tensorhub.types import Options

_DEFAULTS: Final = Options()


def serve(
    host: Annotated[
        str, typer.Option(help="The address to listen on; beyond loopback only with a token.")
    ] = "127.0.0.1",
    port: Annotated[int, common.whole_option(0, 65_535, help="The port; 0 picks a free one.")] = 0,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="A directory for what must outlive a restart: publications, retention, pins.",
        ),
    ] = None,
    ha: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Stand by until this coordinator leads, by etcd://HOST:PORT/PREFIX (several "
            "members with commas) or, with --state-dir, kubernetes://NAMESPACE/LEASE or lock.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where workers reach it, if not where it listens."),
    ] = None,
    token_file: common.TokenFileOption = None,
    lease_s: Annotated[
        float, typer.Option(help="A worker that is silent for so many seconds is taken for lost.")
    ] = _DEFAULTS.lease_s,
    drain_grace_s: Annotated[
        float, typer.Option(help="How long a leaving source waits for its readers.")
    ] = _DEFAULTS.drain_grace_s,
    http: common.HttpOption = None,
    log: Annotated[
        Literal["console", "json"],
        typer.Option(help="The form of the log: text, or a JSON object a line, with times in UTC."),
    ] = "console",
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Run a coordinator until Ctrl-C or SIGTERM.

    Its address is the first line on stdout ({"address": ...} with --json, with "http" if it serves
    HTTP). The token comes from TENSORHUB_TOKEN or --token-file; without one, access is open, and
    only on loopback. Its log is on stderr; docs/operating.md explains the log, and what many
    workers need. SIGTERM is the ordinary way to stop it: exit code 0.
    """
    with common.checking():
        options = Options(
            lease_s=lease_s, drain_grace_s=drain_grace_s, http=http, advertise=advertise
        )
    token = common.check_token_file(token_file)
    room = raise_descriptors()

    async def body() -> int:
        async with tensorhub.serve(
            host, port, token=token, state_dir=state_dir, ha=ha, options=options
        ) as coordinator:
            said = {"address": coordinator.address}
            if coordinator.http_url is not None:
                said["http"] = coordinator.http_url
            print(json.dumps(said) if as_json else coordinator.address, flush=True)
            if not (quiet or as_json) and log == "console":
                print(
                    f"the coordinator {'is up' if coordinator.leading else 'stands by'}, with "
                    f"room for {room.room}; Ctrl-C stops it",
                    file=sys.stderr,
                    flush=True,
                )
            await anyio.sleep_forever()
        return 0

    level = logging.WARNING if quiet else logging.INFO
    common.run(body, logs=level, log_form=log, sigterm_is_ordinary=lambda: True)
