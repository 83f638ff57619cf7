"""Versioned MessagePack frames between worker and coordinator, and between workers; no I/O.

Responsible for the bounds on a frame, for the mutual proof of the cluster's secret, and for turning frames
into the typed messages of `tensorhub.messages` and back. A malformed frame is a `ProtocolError` and nothing
else.

Not responsible for sockets (`tensorhub.runtime`) or for what a message means (`coordinator` and `worker`).
"""
