"""The `tensorhub` command.

Responsible for arguments, for output, and for exit codes. The command line starts without torch; a
command that handles tensors imports it when it runs.

Not responsible for any work of its own: each command is a thin layer over the public API.
"""


def main() -> None:
    """Run the command line with the arguments of this process (the entry point of the `tensorhub`
    script).
    """
    try:
        from tensorhub.cli.app import app
        from tensorhub.cli.common import checking_output

        with checking_output():
            app()
    except KeyboardInterrupt:  # during the imports
        raise SystemExit(130) from None
