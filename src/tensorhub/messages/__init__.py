"""What workers, the coordinator and one another's readers say: the one vocabulary of the control plane.

The coordinator and the worker machines take and emit these values directly; `tensorhub.protocol` turns them into
frames and back, and checks every bound on the way in. A message is a frozen dataclass; its fields' annotations are its
validation. Not responsible for bytes, sockets or order. All are imported from here; the modules are one for each speaker.

Ids: a `request` is minted by the asking worker and comes back on the answer; an `OpKey` names a group operation, and a
message about an operation that is decided is answered with its outcome (a retry is not a second call).
"""

from __future__ import annotations

from tensorhub.messages.from_coordinator import *
from tensorhub.messages.from_coordinator import FromCoordinator
from tensorhub.messages.from_worker import *
from tensorhub.messages.from_worker import FromWorker
from tensorhub.messages.handshake import *
from tensorhub.messages.handshake import Handshake
from tensorhub.messages.reading import *
from tensorhub.messages.reading import FromOwner, FromReader
from tensorhub.messages.values import *

Message = Handshake | FromWorker | FromCoordinator | FromReader | FromOwner
