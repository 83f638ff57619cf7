"""Tests of what `tensorhub.integrations` does without a framework; tests/frameworks has the
others.
"""
