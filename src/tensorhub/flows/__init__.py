"""Bytes that flow over links: shares (`network`), and what would make an update faster (`what_if`).

Pure. The flow model (`tensorhub.testing.flow`) is made of the same network.
"""
