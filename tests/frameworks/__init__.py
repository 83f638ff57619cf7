"""Tests of `tensorhub.integrations` against the frameworks themselves, each in an environment of
its own.
"""
