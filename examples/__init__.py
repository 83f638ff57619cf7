"""Runnable examples; the tests import them from here."""
