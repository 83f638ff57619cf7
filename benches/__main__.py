"""`python -m benches [SUBJECT] [OPTIONS]`: run a benchmark; without a subject, all of them."""

import sys

from benches import busy, calls, capped, files, one_sided, one_to_n, tiny

SUBJECTS = {
    "busy": busy.main,
    "calls": calls.main,
    "capped": capped.main,
    "files": files.main,
    "one_sided": one_sided.main,
    "one_to_n": one_to_n.main,
    "tiny": tiny.main,
}


def main(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        subject = SUBJECTS.get(arguments[0])
        if subject is None:
            print(f"no benchmark {arguments[0]!r}: choose from {', '.join(SUBJECTS)}", file=sys.stderr)
            return 2
        return subject(arguments[1:])
    return max(subject(arguments) for subject in SUBJECTS.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
