"""What a worker says of its chunks' digests, and what it finds out about them."""

from __future__ import annotations

from tensorhub.messages import Origin
from tensorhub.model.digests import pack, root_of
from tensorhub.testing import MANIFEST
from tensorhub.worker.calls import CompareDigests
from tensorhub.worker.chunk_reports import compare, root_of_all, tell


def test_the_root_is_of_all_digests_or_there_is_none() -> None:
    assert root_of_all(8, [1, 2]) == root_of(pack([1, 2], 8))
    assert root_of_all(8, [1, None]) == b""
    assert root_of_all(0, []) == b""


def test_what_is_not_as_published_is_told_with_its_origin() -> None:
    origins = {chunk: Origin(f"r{chunk}", chunk) for chunk in range(5)}
    question = CompareDigests(MANIFEST, 7, False, 1, pack([11, 12, 13], 8))
    wrong, following = compare(question, 8, [99, 11, 99, None, 99], origins.get)
    assert wrong == [(2, 12, origins[2])]  # 0 and 4 were not asked about; 3 has no digest
    assert following == 4


def test_of_a_list_that_is_too_long_the_rest_says_nothing() -> None:
    assert compare(
        CompareDigests(MANIFEST, 7, False, 0, pack([1, 2, 3], 8)), 8, [1], lambda chunk: None
    ) == ([], 3)


def test_only_the_last_page_of_digests_says_that_nothing_follows() -> None:
    pages = list(tell("r", 1, 5, 8, [(n, n) for n in range(5)], last=True, page_bytes=16))
    assert [page.last for page in pages] == [False, False, True]
    unfinished = tell("r", 1, 5, 8, [(n, n) for n in range(5)], last=False, page_bytes=16)
    assert not any(page.last for page in unfinished)
