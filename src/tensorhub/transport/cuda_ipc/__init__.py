"""A reader on the same host opens a source's GPU memory, and has its own GPU copy out of it."""
