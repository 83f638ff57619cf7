"""Drivers decide what happens when in a simulated world: a test, a seed, or a caller's own
tasks.
"""
