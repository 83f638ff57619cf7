"""Transports: ways to read chunks of another worker's registered memory into one's own.

Each built-in transport is a module or a package, with its reader, its owner's side and its
messages. `base` says what a reader keeps to, `owner` what an owner's side keeps to, and `registry`
knows the names, those of entry points included.

Not responsible for which chunk is read from where, for retries, nor for what counts as fetched. A
transport that cannot work here says exactly why.
"""
