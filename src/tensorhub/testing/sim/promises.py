"""The sentence of each guarantee or rule whose name begins what a judge demands."""

from __future__ import annotations

# As docs/guarantees.md states them, in short.
PROMISES = {
    "content": "G1: a reader that commits a version has the bytes that were published",
    "mutability": "G2: when `unpublish` returns, no read of that memory can be committed any more",
    "visibility": "G3: after `publish` has returned, every `latest` gives that or a newer version",
    "group atomicity": "G4: all ranks of a group operation act on one version, with one outcome",
    "retention": "G5: a retained version stays fetchable while a reliable holder is alive",
    "partial replicas": "G6: a partial replica serves only the chunks that it has verified",
    "liveness": "G7: when faults stop, every waiting call ends, and nothing is left over",
    "resume": "G8: when a source is lost, no verified chunk is read again",
    "incarnations": "G9: nothing of an older incarnation, epoch or generation changes anything",
    "bounds": "G10: every queue and frame has a bound, and every wait a deadline",
    "seconds": "G12: the parts of an explanation add up to the time of the longest call",
    "publication numbers": "R1: a number is published once, and exceeds all before it",
    "durable mark": "R2: what a caller was told of is durable",
    "leaving": "R4: of two last holders only one can leave, and it hands over before",
    "host copies": "R5: a copy in host memory stands in for what `unpublish` takes back",
    "two phases": "R6: after its vote a rank waits for the outcome, which is recorded before",
    "update destroys last": "R7: an update is sure of version and source before it writes",
    "digests": "R8: every chunk is verified by the publisher's digests",
    "partial fills": "R9: no chunk waits for itself",
    "lost workers": "R11: a lost worker counts no more, and comes back as a new incarnation",
    "selectors": "R12: a selector names the version that it stands for at some moment of the call",
}
INVARIANT = "a state machine of the coordinator or of a worker keeps its invariants"


def promise_of(text: str) -> str:
    """What is broken, by the beginning of what a judge says; "": that is no guarantee."""
    if text.startswith(("InvariantBroken", "Illegal")):
        return INVARIANT
    return PROMISES.get(text.partition(":")[0], "")
