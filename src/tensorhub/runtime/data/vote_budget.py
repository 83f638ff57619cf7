"""What votes may cost the owner of a publication (R8).

At a vote of another layout the coordinator asks a publisher for the digests of a selection. The
publisher has the digests of the chunks that it has sent itself, and makes the missing ones. That
costs CPU, and readers choose their selections. So the votes on one publication have a budget, which
grows with its bytes. Once the budget is used up, the publisher tells no digests of selections, and
the digests of the sources count.

A selection that only readers with the read-only token have named may use a part of the budget. A
reader proves its token, and so cannot choose another budget by choosing another name.

Responsible for the budget. Not responsible for the digests (`serving`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

# seconds of one core: for each publication, and for each GB of it
PUBLICATION_S = 0.2
GB_S = 1.0
READ_ONLY_SHARE = 0.25


@dataclass(slots=True)
class VoteBudget:
    """The budget of one publication of `nbytes`. Callers hold the owner's lock."""

    nbytes: int
    spent_s: float = 0.0
    # selections that a reader with the full token has named
    of_workers: set[str] = field(default_factory=set)

    def allows(self, selection: str) -> bool:
        """Whether votes on that selection may cost more."""
        share = 1.0 if selection in self.of_workers else READ_ONLY_SHARE
        return self.spent_s < share * (PUBLICATION_S + GB_S * self.nbytes / 1e9)
