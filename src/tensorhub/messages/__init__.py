"""The vocabulary: the messages between workers and the coordinator, and between readers and owners.

The coordinator and the worker's machines take and emit these values directly. `tensorhub.protocol`
turns them into frames and back, and checks every bound. A message is a frozen dataclass whose
annotations are its validation. There is a module for each speaker, and everything is imported from
here. The messages of a single transport are in its directory. Not responsible for bytes, sockets or
order.

Ids: the asking worker mints a `request`, which comes back on the answer. An `OpKey` names a group
operation. A message about an operation that is decided is answered with its outcome, so that a
retry is not a second call.
"""

from __future__ import annotations

from tensorhub.messages.from_coordinator import *
from tensorhub.messages.from_coordinator import FromCoordinator
from tensorhub.messages.from_worker import *
from tensorhub.messages.from_worker import FromWorker
from tensorhub.messages.handshake import *
from tensorhub.messages.handshake import Handshake
from tensorhub.messages.reading import *
from tensorhub.messages.reading import FromOwner, FromReader, Request as Request
from tensorhub.messages.values import *

Message = Handshake | FromWorker | FromCoordinator | FromReader | FromOwner
