"""`tensorhub token`: make a token, and the read-only token that belongs to one. No token is ever an
argument.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from tensorhub.cli import common
from tensorhub.protocol.secret import read_only_token, resolve_token
from tensorhub.runtime.control.keyring import open_keyring

TOKEN_BYTES = 32  # of randomness

token = typer.Typer(
    help="Make tokens: a cluster's secret, and the read-only one that belongs to it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=common.HELP,
)


@token.command(
    short_help="Make a fresh random token.", epilog=common.EXIT_CODES, context_settings=common.HELP
)
@common.reporting
def new(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The token file to make; it must not exist.")
    ],
) -> None:
    """Make a token file with a fresh random token, readable by this user only.

    To change a cluster's token, put the old and the new one into its token file, each on a line of
    its own: the first is presented, each is accepted, and the file is read again by itself.
    """
    _write(out, secrets.token_urlsafe(TOKEN_BYTES))


@token.command(
    "read-only",
    short_help="Print the read-only token of one.",
    epilog=common.EXIT_CODES,
    context_settings=common.HELP,
)
@common.reporting
def read_only(
    token_file: common.TokenFileOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A token file to make, which must not exist, instead of stdout."
        ),
    ] = None,
) -> None:
    """Print the read-only token that belongs to the cluster's token: it lets a process fetch and
    look, but not change.

    The cluster accepts it without being told, as long as it accepts the cluster token. The cluster
    token cannot be derived from it.
    """
    made = read_only_token(open_keyring(resolve_token(common.check_token_file(token_file)))[0])
    if out is None:
        print(made, flush=True)
    else:
        _write(out, made)


def _write(path: Path, text: str) -> None:
    """A new file that only this user may read; it is there whole, or not at all."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise common.usage(
            f"{path} exists, and may be in use: give another --out, or remove it"
        ) from None
    except OSError as error:
        raise common.usage(f"{path} cannot be made: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        path.unlink()
        raise common.CommandError(
            "OSError", f"{path} cannot be written: {error.strerror}"
        ) from error
    print(path, file=sys.stderr, flush=True)
