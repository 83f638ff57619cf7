"""The typer application: its options and the names of its commands.

A command's module is imported when the command is called: help and a usage error need none of them.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tensorhub
from tensorhub.cli.common import EXIT_CODES, HELP, INTERRUPTED, reporting


class _Commands(TyperGroup):
    """A group that knows the names and short helps of its commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # The command has no handlers yet. click would say "Aborted!" and exit with 1.
            raise typer.Exit(INTERRUPTED) from None


def _load(name: str | None) -> Any:
    """The command of this name."""
    command = getattr(import_module(f"tensorhub.cli.{name}"), str(name))
    if not isinstance(command, typer.Typer):
        from tensorhub.cli.tls_options import with_tls

        one = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        one.command(epilog=EXIT_CODES, context_settings=HELP)(reporting(with_tls(command)))
        command = one
    return typer.main.get_command(command)


app = typer.Typer(
    name="tensorhub",
    cls=_Commands,
    help="Fetch model weights from the memory of the workers that hold them.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    # plain help: paragraphs that wrap as a whole, at any width, in a pipe too
    rich_markup_mode=None,
    context_settings=HELP,
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
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fetch model weights from the memory of the workers that hold them."""


COMMANDS = {
    "serve": "Run a coordinator.",
    "demo": "Train a small model here, with rollouts that follow.",
    "status": "Show versions, replicas, running reads and workers.",
    "top": "Watch a cluster on a terminal.",
    "events": "List what has happened in a cluster.",
    "explain": "Say where the seconds of an update went.",
    "report": "Save a run as one page that opens without a cluster.",
    "publish": "Publish safetensors files, and serve them.",
    "fetch": "Fetch a version into safetensors files.",
    "mount": "Mount versions as a directory, for any loader.",
    "plan": "Show what a reader would read from whom.",
    "versions": "List versions: what exists where, with sizes.",
    "archive": "Keep versions in object storage, and serve them.",
    "republish": "Publish a model a second time, quantized.",
    "seed": "Hold the newest version in memory, for a site.",
    "simulate": "Search for broken guarantees in a simulated cluster.",
    "doctor": "Say which transports work on this machine.",
    "bench": "Compare with this machine's ceilings and with peers.",
    "token": "Make tokens, also read-only ones.",
}
for _name, _short in COMMANDS.items():
    app.command(_name, short_help=_short)(lambda: None)  # `_load` has the command itself
