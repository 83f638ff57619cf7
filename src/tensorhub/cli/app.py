"""The typer application: its options and the registration of its commands."""

from typing import Annotated

import typer

import tensorhub
from tensorhub.cli.bench.command import bench
from tensorhub.cli.common import EXIT_CODES
from tensorhub.cli.demo import demo
from tensorhub.cli.doctor import doctor
from tensorhub.cli.fetch import fetch
from tensorhub.cli.publish import publish
from tensorhub.cli.seed import seed
from tensorhub.cli.serve import serve
from tensorhub.cli.simulate import simulate
from tensorhub.cli.status import status
from tensorhub.cli.token import token

app = typer.Typer(
    name="tensorhub",
    help="Fetch model weights from the memory of the workers that hold them.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks print local variables, the secret among them
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tensorhub {tensorhub.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Fetch model weights from the memory of the workers that hold them."""


for _command in (serve, demo, status, publish, fetch, seed, simulate, doctor, bench):
    app.command(epilog=EXIT_CODES)(_command)
app.add_typer(token, name="token")
