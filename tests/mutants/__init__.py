"""Mutants by machine: `python -m tests.mutants`."""
