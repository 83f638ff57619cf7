"""What all commands share: exit codes, error lines, signals, options and tables.

Exit codes: 0 it worked; 1 the operation failed; 2 the arguments or files cannot be used; 128 + n
signal n ended it (130 is Ctrl-C). An error is one line on stderr, `error: <kind>: <what happened,
and what to do>`. Only results go to stdout.

`tensorhub --help` imports this module, so the module imports little.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import logging
import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer

import tensorhub
from tensorhub.errors import (
    AuthenticationFailed,
    CoordinatorUnavailable,
    StateError,
    TensorHubError,
    VersionUnavailable,
)

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from rich.console import RenderableType

    from tensorhub.api.hub import Hub
    from tensorhub.api.opening import Opening
    from tensorhub.types import Location

FAILED = 1
USAGE = 2
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
WIDE = 100_000  # of a line that no terminal wraps
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # why a file takes no more
_PREFIXES = "kMGTP"
_SIZE = re.compile(
    r"(?P<number>[0-9]{1,20}(\.[0-9]{1,9})?) ?((?P<prefix>[kKMGTP])?(?P<binary>(?<=[kKMGTP])i)?B?)"
)

EXIT_CODES = (
    "Exit codes: 0 it worked, 1 the operation failed, 2 the arguments or files cannot be used, "
    "130 Ctrl-C, 143 SIGTERM."
)

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="TENSORHUB_ADDRESS",
        metavar="tcp://HOST:PORT",
        help="Where the coordinator is; of several candidates, all addresses with commas between "
        "them.",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file with the cluster's token, instead of TENSORHUB_TOKEN in the environment; read "
        "again when it changes.",
    ),
]
SiteOption = Annotated[
    str | None, typer.Option("--site", metavar="NAME", help="The site whose workers read from it.")
]
HttpOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Also serve HTTP there: a dashboard, /metrics for Prometheus, probes.",
    ),
]
NamesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--names", metavar="GLOB", help="Only these tensors ('layers.0.*'); may be repeated."
    ),
]
SelectorOption = Annotated[
    str,
    typer.Option(
        metavar="SELECTOR",
        help="A number, latest, latest-1, or available (the newest that can be fetched now).",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")
]
Connect: TypeAlias = "Callable[..., Opening[Hub]]"
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]


class CommandError(Exception):
    """A command cannot go on, for a reason that is not a TensorHubError: printed as one line,
    without a traceback.
    """

    def __init__(self, kind: str, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.kind = kind
        self.code = code


def usage(text: str) -> CommandError:
    """What the user gave cannot be used; `text` says what to give instead."""
    return CommandError("usage", text, USAGE)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """What reads an option's whole number; help does not repeat the range, which a wrong number's
    error says.
    """

    def read(given: str) -> int:
        text = str(given)  # a default comes as it is
        value = int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else -1
        if value < least or (most is not None and value > most):
            raise typer.BadParameter(
                f"{text[:40]!r}: give a whole number, {least} "
                f"{'or more' if most is None else f'to {most}'}"
            )
        return value

    return read


def seconds(least: float, most: float) -> Callable[[str], float]:
    """What reads an option's seconds."""

    def read(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise typer.BadParameter(
                f"{str(given)[:40]!r}: give seconds, {least:g} "
                f"{'or more' if math.isinf(most) else f'to {most:g}'}"
            )
        return value

    return read


def whole_option(least: int, most: int | None = None, *, help: str) -> Any:
    """An option that is a whole number."""
    return typer.Option(parser=whole(least, most), metavar="N", help=help)


def seconds_option(least: float, most: float, *, help: str) -> Any:
    """An option that is a number of seconds."""
    return typer.Option(parser=seconds(least, most), metavar="S", help=help)


def size(given: str) -> int:
    """What reads an option's bytes: "100MB", "1.5GiB" or a plain number."""
    match = _SIZE.fullmatch(str(given).strip())
    if match is not None:
        base = 1024 if match["binary"] else 1000
        nbytes = int(
            Decimal(match["number"]) * base ** (" KMGTP".index((match["prefix"] or " ").upper()))
        )
        if 0 < nbytes < 2**63:
            return nbytes
    raise typer.BadParameter(f"{str(given)[:40]!r}: give bytes, as 100MB, 1.5GiB or 1000000")


def location(site: str | None) -> Location:
    """Here, in that site. InvalidValue: it is no name."""
    from tensorhub.types import Location, check_name

    return Location() if site is None else replace(Location(), site=check_name("site", site))


def check_address(address: str | None) -> str:
    """The address that a command was given; a usage error if there is none or it is not one."""
    if address is None:
        raise usage(
            "no coordinator to talk to: give --address tcp://HOST:PORT or set TENSORHUB_ADDRESS"
        )
    from tensorhub.runtime.control.addresses import split_addresses

    with checking():
        split_addresses(address)
    return address


@contextlib.contextmanager
def checking(option: str = "", *, instead: str = "", kind: str = "usage") -> Iterator[None]:
    """Turn a refusal in this block into a usage error about `option`, which advises to give
    `instead`. `kind`: the error's name.
    """
    try:
        yield
    except (AuthenticationFailed, OSError, StateError, ValueError) as error:
        text = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        text = f"{option}: " * bool(option) + text + f"; give {instead}" * bool(instead)
        raise CommandError(kind, text, USAGE) from error


def connecting(
    address: str | None, token_file: Path | None, options: tensorhub.Options | None = None
) -> Connect:
    """What connects to the coordinator that a command was given; a usage error if it cannot be
    used. It fails at once if no coordinator is there, unless `options` say that it waits for one.
    """
    at_once = tensorhub.Options(coordinator_wait_s=0)
    return functools.partial(
        tensorhub.connect,
        check_address(address),
        token=check_token_file(token_file),
        options=options or at_once,
    )


def format_bytes(nbytes: int) -> str:
    """A number of bytes for people: "15.0 GB"."""
    power = min((len(str(nbytes)) - 1) // 3, len(_PREFIXES))
    return f"{nbytes / 1000**power:,.1f} {_PREFIXES[power - 1]}B" if power else f"{nbytes} B"


def check_token_file(path: Path | None) -> Path | None:
    """The token file that a command was given; a usage error if it cannot be used now."""
    if path is not None:
        from tensorhub.protocol.secret import read_token_file

        with checking():
            read_token_file(path)
    return path


@contextlib.asynccontextmanager
async def connected(
    connect: Connect, wait_s: float, until: str, *, quiet: bool
) -> AsyncIterator[Hub]:
    """A hub. If no coordinator is there, it is waited for, which a progress line says."""
    try:
        hub = await connect()
    except CoordinatorUnavailable as error:
        if not wait_s or not error.retryable:
            raise
        if not quiet:
            from tensorhub.types import printable

            print(f"waiting {until}: {printable(str(error))}", file=sys.stderr, flush=True)
        hub = await connect(options=tensorhub.Options(coordinator_wait_s=wait_s))
    async with hub:
        yield hub


async def tell_if_unpublished(hub: Hub, model: str, until: str) -> None:
    """A progress line, if nothing is published under this name: what the command does next is to
    wait for it.
    """
    try:
        mark = (await hub.describe(model, limit=0)).mark
    except VersionUnavailable:
        mark = None
    if mark is None:
        text = f"waiting {until}: nothing is published as {model!r} yet (is the name right?)"
        print(text, file=sys.stderr, flush=True)


def logs_to_stderr(level: int, form: str = "console") -> None:
    """The library's events of this level and above go to stderr, in that form of `LogOption`:
    stdout is for results.
    """
    from tensorhub.logs import JsonLines

    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with reports of its expected errors."""

    @functools.wraps(command)
    def reported(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except (CommandError, TensorHubError) as error:
            raise typer.Exit(report(error)) from None

    return reported


def run(
    body: Callable[[], Awaitable[int]],
    *,
    logs: int = logging.ERROR,
    log_form: str = "console",
    sigterm_is_ordinary: Callable[[], bool] = lambda: False,
) -> NoReturn:
    """Run `body` until it returns its exit code, fails, or gets SIGINT or SIGTERM; then leave the
    command.

    `logs`, `log_form`: see `logs_to_stderr`. `sigterm_is_ordinary`: asked when SIGTERM has come. If
    so, hubs leave as by `leave_on_sigterm` before `body` is cancelled, and the exit code is 0.
    """
    import anyio

    logs_to_stderr(logs, log_form)
    try:
        code = anyio.run(_until_signal, body, sigterm_is_ordinary)
    except KeyboardInterrupt:  # before the signal handlers were there
        code = INTERRUPTED
    except Exception as error:
        code = report(error)
    raise typer.Exit(0 if code == TERMINATED and sigterm_is_ordinary() else code)


@contextlib.contextmanager
def checking_output() -> Iterator[None]:
    """What a command prints has to arrive, however the command ends: else that is its error, in one
    line like any other.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        # the interpreter's end would try the rest again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):
            print(
                f"error: output: stdout cannot be written: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(FAILED) from None


def report(error: BaseException) -> int:
    """Print an expected error as one line and return its exit code; raise anything else, a bug,
    again.
    """
    from tensorhub.types import printable

    leaf = leaf_of(error)
    match leaf:
        case CommandError():
            kind, code = leaf.kind, leaf.code
        case TensorHubError():
            kind, code = type(leaf).__name__, FAILED
        case _:
            raise error
    # of all options, only this one fails after it was checked
    text = " ".join(str(leaf).split()).replace("Options.http", "--http")
    print(f"error: {kind}: {printable(text)}", file=sys.stderr, flush=True)
    return code


def leaf_of(error: BaseException) -> BaseException:
    """The error itself; of what came out of a task group, the first expected error, else the
    first.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [leaf_of(inner) for inner in error.exceptions]
    return next(
        (leaf for leaf in leaves if isinstance(leaf, CommandError | TensorHubError)), leaves[0]
    )


def print_table(table: RenderableType) -> None:
    """A table on stdout. In a file or a pipe: plain text, and each row whole, on one line."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    if isinstance(table, Table):
        table.box, table.pad_edge = None, False
    with (wide := Console(width=WIDE)).capture() as text:
        wide.print(table)
    print("\n".join(line.rstrip() for line in text.get().splitlines()), flush=True)


def import_shipped(name: str) -> Any:
    """A module of the source tree, as "examples.encoder", that an installed TensorHub has as
    `tensorhub._examples.encoder`.

    Raises FileNotFoundError if this installation has neither.
    """
    root = Path(__file__).parents[3]
    if root.joinpath(*name.split(".")).with_suffix(".py").is_file():
        sys.path.insert(0, str(root))
        return importlib.import_module(name)
    installed = Path(__file__).parents[1].joinpath(*f"_{name}".split(".")).with_suffix(".py")
    if not installed.is_file():
        raise FileNotFoundError(f"this installation of TensorHub lacks {installed}")
    return importlib.import_module(f"tensorhub._{name}")


async def _until_signal(
    body: Callable[[], Awaitable[int]], leaves_in_order: Callable[[], bool]
) -> int:
    """The code of `body`, or 128 + n if signal n cancelled it. A second signal ends the process
    without waiting.
    """
    import anyio
    import anyio.to_thread

    from tensorhub.runtime.sigterm import leave_now

    code = 0
    failure: Exception | None = None
    scope = anyio.CancelScope()

    async def end(number: int) -> None:
        if number == signal.SIGTERM and leaves_in_order():
            await anyio.to_thread.run_sync(leave_now)
        scope.cancel()

    async def watch(*, task_status: TaskStatus[None]) -> None:
        nonlocal code
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if code:
                    os._exit(128 + number)
                code = 128 + number
                tasks.start_soon(end, number)

    async with anyio.create_task_group() as tasks:
        await tasks.start(watch)
        with scope:
            try:
                returned = await body()
                code = code or returned
            except Exception as error:
                failure = error
        tasks.cancel_scope.cancel()
    if failure is not None and not code:
        raise failure
    return code
