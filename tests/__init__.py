"""Tests, arranged like the sources."""
