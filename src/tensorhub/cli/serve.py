"""`tensorhub serve`: a coordinator in a process of its own."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

import tensorhub
from tensorhub.cli.common import JsonOption, QuietOption, TokenFileOption, check_token_file, checking, run, whole
from tensorhub.types import Options


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on; beyond loopback only with a secret.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(parser=whole(0, 65_535), metavar="N", help="The port; 0 picks a free one.")] = 0,
    state_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where marks and retention outlive a restart.")
    ] = None,
    token_file: TokenFileOption = None,
    lease_s: Annotated[float, typer.Option(help="A worker unheard of for this long is lost.")] = 10.0,
    drain_grace_s: Annotated[float, typer.Option(help="How long a leaving source waits for the readers that it has.")] = 5.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a coordinator until Ctrl-C or SIGTERM.

    Its address is the first line on stdout ({"address": ...} with --json). The secret comes from TENSORHUB_TOKEN or
    --token-file; without one, access is open, and only on loopback. SIGTERM is the ordinary way to stop it: exit
    code 0.
    """
    with checking():
        options = Options(lease_s=lease_s, drain_grace_s=drain_grace_s)
    body = partial(_serve, host, port, state_dir, check_token_file(token_file), options, as_json, quiet)
    run(body, logs=logging.WARNING if quiet else logging.INFO, sigterm_is_ordinary=lambda: True)


async def _serve(
    host: str,
    port: int,
    state_dir: Path | None,
    token: Path | None,
    options: Options,
    as_json: bool,
    quiet: bool,
) -> int:
    async with tensorhub.serve(host, port, token=token, state_dir=state_dir, options=options) as coordinator:
        print(json.dumps({"address": coordinator.address}) if as_json else coordinator.address, flush=True)
        if not quiet and not as_json:
            print("the coordinator is up; Ctrl-C stops it", file=sys.stderr, flush=True)
        await anyio.sleep_forever()
    return 0
