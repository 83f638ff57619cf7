"""`python -m tensorhub` is the command line."""

from tensorhub.cli import main

main()
