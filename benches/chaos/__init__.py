"""Chaos: real processes that are killed, stopped, cut off and slowed at a seeded rate while
versions advance.

`plan` says which fault comes when, from the seed alone. `network` (by `relay`) and `namespaces`
stand between the processes. `bench_process` runs in each of them; `cast` starts, kills and restarts
them; `drivers` make them work. `results` judges what their calls returned, and what `archived`
finds in the archive in the end. `run` is the whole, and `plot` draws it.
"""
