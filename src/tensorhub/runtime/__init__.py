"""The only loops: they feed events, clocks and randomness to the pure packages, and carry out their
actions.

Responsible for the server that drives the coordinator and its durable state, for the worker's
shell, and for the clock. All of it is written on anyio, and runs on asyncio and on trio. Not
responsible for any decision that a pure package can make.
"""
