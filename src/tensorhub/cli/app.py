"""The typer application: its options and the registration of its commands."""

from typing import Annotated

import typer

import tensorhub

app = typer.Typer(
    name="tensorhub",
    help="Fetch model weights from the memory of the workers that hold them.",
    no_args_is_help=True,
    add_completion=False,
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
