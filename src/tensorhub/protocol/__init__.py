"""Versioned MessagePack frames between worker and coordinator, and between workers.

    tags       which number stands for which message on the wire
    forms      how an annotated type is written, read and checked
    codec      a message of `tensorhub.messages` to a frame's body and back; checks every bound
    frames     the connection's preface, and bodies to length-prefixed frames and back
    handshake  mutual proof of the cluster's secret
    secret     where the secret comes from, and when there need not be one
    blocking   driver for a thread with a blocking socket (the data plane), payloads included
    stream     driver for an anyio byte stream (the control plane)
    lost       the drivers' one exception for a connection that is gone

The first five do no I/O and know no clock: a driver feeds them bytes and sends the bytes that they
make. Whatever a peer sends can cause no other errors than `ProtocolError` and
`AuthenticationFailed`. A length is checked before anything is allocated for it.

Not responsible for listening, connecting or retrying (`tensorhub.runtime`), nor for what a message
means (`coordinator` and `worker`).
"""
