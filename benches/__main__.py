"""`python -m benches [SUBJECT] [OPTIONS]`: run a benchmark; without a subject, all of them but
`gpu`.
"""

import sys

from benches import (
    archive,
    bottlenecks,
    busy,
    calls,
    capped,
    delta_reads,
    deltas,
    early_digests,
    failover,
    files,
    flips,
    gpu,
    imports,
    observing,
    one_sided,
    one_to_n,
    plan,
    resharded,
    strided,
    tiny,
    tls,
    wan,
    what_if,
)
from benches.scale import core

SUBJECTS = {
    "archive": archive.main,
    "busy": busy.main,
    "calls": calls.main,
    "bottlenecks": bottlenecks.main,
    "capped": capped.main,
    "delta_reads": delta_reads.main,
    "deltas": deltas.main,
    "early_digests": early_digests.main,
    "failover": failover.main,
    "files": files.main,
    "flips": flips.main,
    "gpu": gpu.main,
    "imports": imports.main,
    "observing": observing.main,
    "one_sided": one_sided.main,
    "one_to_n": one_to_n.main,
    "plan": plan.main,
    "resharded": resharded.main,
    "strided": strided.main,
    "scale": core.main,
    "tiny": tiny.main,
    "tls": tls.main,
    "wan": wan.main,
    "what_if": what_if.main,
}


def main(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        subject = SUBJECTS.get(arguments[0])
        if subject is None:
            print(
                f"no benchmark {arguments[0]!r}: choose from {', '.join(SUBJECTS)}", file=sys.stderr
            )
            return 2
        return subject(arguments[1:])
    return max(subject(arguments) for name, subject in SUBJECTS.items() if name != "gpu")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
