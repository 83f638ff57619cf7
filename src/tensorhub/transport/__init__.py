"""Ways of moving a byte range from another worker's registered memory into one's own.

Responsible for the transport protocol and its semantics, the registry (with the entry-point group
`tensorhub.transports`), and the built-in transports. A transport that cannot work here says exactly why,
once.

Not responsible for which chunk is read from where, for retries, or for deciding that what arrived is
committed: a transport reports bytes and the generation under which it read them.
"""
