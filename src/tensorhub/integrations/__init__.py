"""Adapters for RL frameworks and inference engines, one module each.

Responsible for mapping a framework's hooks to the public API. Importing this package imports no
framework.

Not responsible for anything that other users of the public API could not do themselves.
"""
