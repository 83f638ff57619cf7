"""Benchmarks, arranged by subject like the code; each figure is a ratio, taken in one run."""
