"""The systems that are compared."""

from __future__ import annotations

import pytest

from benches.testbed.__main__ import DEFAULTS
from benches.testbed.ways import WAYS, chosen, count_lines


def test_lines_are_those_between_the_marks() -> None:
    source = """
        import this
        # lines
        # why
        def f():
            \"\"\"What.\"\"\"

            return 1
        # end of lines
        def g():
            return 2
    """
    assert count_lines(source) == 2


def test_each_system_says_how_many_lines_it_takes() -> None:
    counts = {name: way.lines() for name, way in WAYS.items()}
    assert all(5 <= count <= 200 for count in counts.values()), counts
    assert counts["nixl"] > counts["sockets"]


def test_an_unknown_system_is_named_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no system 'socket': did you mean 'sockets'\? Give tensorhub, .*sockets.*web"):
        chosen(["tensorhub", "socket"])


def test_the_default_systems_exist_and_ours_comes_first() -> None:
    for names in DEFAULTS.values():
        assert chosen(names)[0].is_ours
