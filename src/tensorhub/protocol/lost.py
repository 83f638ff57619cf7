"""The one exception by which the drivers say that a connection is gone. Its cause is the socket's
own error.
"""

from __future__ import annotations


class ConnectionLost(Exception):
    """The connection broke, was shut down, or was left in the middle of a message; it is of no more
    use.

    Never reaches a user of the library: the connection's driver decides the consequence of the
    loss.
    """
