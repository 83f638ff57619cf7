"""A reader's device reads a source's registered memory through a queue pair."""
