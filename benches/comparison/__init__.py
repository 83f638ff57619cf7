"""`tensorhub bench`: what is compared, in which processes, and how it is told. See
docs/benchmarks.md.
"""
