"""The typer application: its options and the registration of its commands."""

from collections.abc import Callable
from typing import Annotated

import typer

import tensorhub
from tensorhub.cli.bench import bench
from tensorhub.cli.common import EXIT_CODES, HELP, reporting
from tensorhub.cli.demo import demo
from tensorhub.cli.doctor import doctor
from tensorhub.cli.fetch import fetch
from tensorhub.cli.plan import plan
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
    rich_markup_mode=None,  # plain help: paragraphs that wrap as a whole, at any width, in a pipe too
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
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Fetch model weights from the memory of the workers that hold them."""


_COMMANDS: dict[Callable[..., None], str] = {
    serve: "Run a coordinator.",
    demo: "Train a small model here, with rollouts that follow.",
    status: "Show versions, replicas, running reads and workers.",
    publish: "Publish safetensors files, and serve them.",
    fetch: "Fetch a version into safetensors files.",
    plan: "Show what a reader would read from whom.",
    seed: "Hold the newest version in memory, for a site.",
    simulate: "Search for broken guarantees in a simulated cluster.",
    doctor: "Say which transports work on this machine.",
    bench: "Compare with this machine's ceilings and with peers.",
}
for _command, _short in _COMMANDS.items():
    app.command(short_help=_short, epilog=EXIT_CODES, context_settings=HELP)(reporting(_command))
app.add_typer(token, name="token", short_help="Make tokens, also read-only ones.")
