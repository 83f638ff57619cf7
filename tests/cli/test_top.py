"""`tensorhub top`: what its screens show, on which terminals, and what it does while the coordinator
is away.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace

import anyio
import pytest
from rich.cells import cell_len

from tensorhub import sync
from tensorhub.cli import top, top_data
from tensorhub.cli.top_data import Seen, Watch
from tensorhub.cli.top_rows import HELP, View, ago, cut, screen
from tensorhub.observed import ClusterEvent, UpdateRow
from tensorhub.types import (
    CallsSummary,
    LeaseView,
    ModelInfo,
    ModelSummary,
    OpKey,
    ReplicaView,
    ShardView,
    SilentWorker,
    VersionSummary,
    VersionView,
)
from tests.cli.processes import WAIT_S, line_with, run_here, started
from tests.cli.terminals import on_terminal
from tests.cli.test_status import HOSTILE
from tests.rig import OPTIONS, cluster, gated, tensors, until, worker_of

NOW = 1_790_000_000.0
SUMMARY = VersionSummary(4, 4, 3, 0, 1, 0, 0, 3)
VIEWS = tuple(
    VersionView(number, "c", "available", 90_000_000, 1, 0, True, summary=SUMMARY)
    for number in (6, 7)
)


def reader(name: str, verified: int) -> ReplicaView:
    shard = ShardView(0, name, "filling", verified, 100, 0)
    return ReplicaView(f"{name}-g", 7, "filling", "device", "use", "", False, (shard,), f"r-{name}")


HOLDER = ReplicaView(
    "trainer-g",
    7,
    "ready",
    "device",
    "use",
    "",
    True,
    (ShardView(0, "trainer", "complete", 100, 100, 3),),
    "r-trainer",
)
COUNTS = ModelSummary(
    workers=5,
    suspect=1,
    groups=5,
    shards=5,
    reads=4,
    versions_known=2,
    calls=(CallsSummary("update", "chunks", 3, 12.3, "rollout-3-g"),),
    silent=(SilentWorker("rollout-9", "i9", 7.25),),
)
ACTOR = ModelInfo("actor", 0, 7, 2, VIEWS, (), (), (), COUNTS)
CRITIC = replace(ACTOR, model="critic", mark=None, versions=(), summary=replace(COUNTS, calls=()))
ROWS = replace(
    ACTOR,
    summary=None,
    replicas=(HOLDER, reader("rollout-1", 45), reader("rollout-2", 50), reader("rollout-3", 2)),
    leases=tuple(
        LeaseView(f"l{number}", name, "trainer", 7, 0, "active")
        for number, name in enumerate(("rollout-1", "rollout-2", "rollout-3", "evaluation"))
    ),
)
UPDATE = UpdateRow(
    OpKey("actor", "rollout-1-g", 0, 3),
    6,
    "update",
    "committed",
    NOW - 30,
    1.9,
    sentence="1.4 of 1.9 s: rollout-1's link",
)
SEEN = Seen(
    NOW,
    "tcp://h:1",
    NOW - 60,
    NOW,
    (ACTOR, CRITIC),
    "actor",
    ROWS,
    (UPDATE,),
    (
        ClusterEvent(1, NOW - 9, "published", "actor", 7),
        ClusterEvent(2, NOW - 1, "lost", "", None, "w"),
    ),
    {("actor", 7): NOW - 9},
    {("r-rollout-1", 0): 120e6, ("r-rollout-2", 0): 100e6, ("r-rollout-3", 0): 1e6},
)


def lines(seen: Seen, view: View | None = None, width: int = 80, height: int = 24) -> list[str]:
    shown = screen(seen, view or View(), width, height)
    assert len(shown) == height
    assert all(cell_len(line.text) <= width for line in shown)
    return [" ".join(line.text.split()) for line in shown]


# --------------------------------------------------------------------------------------------------
# what is shown


def test_a_screen_of_80_by_24_has_models_and_what_is_wrong() -> None:
    shown = lines(SEEN)
    assert "tcp://h:1 models 2" in shown[0]
    assert shown[1] == "model newest age ready filling workers suspect waits for"
    assert shown[2] == "> actor 7 9.0 s 4 3 5 1 chunks 12 s"
    assert shown[3] == "critic - - - - 5 1 -"
    assert shown[4] == "actor: newest 7, lineage 0, 4 reads at 221.0 MB/s"
    assert "suspect rollout-9 silent for 7.2 s" in shown
    assert "stalled rollout-3-g update: no bytes for 12 s" in shown
    assert "slow rollout-3 1.0 MB/s, the median is 100.0 MB/s" in shown
    assert not any(line.startswith("slow rollout-1") for line in shown)
    assert shown[-2].endswith("lost w")
    assert shown[-1].startswith("q quit")


def test_a_models_page_has_everything() -> None:
    shown = lines(SEEN, View("model"), 100, 60)
    assert "rollout-1 7 45 % 120.0 MB/s trainer" in shown
    assert "evaluation 7 - - trainer" in shown  # it serves no readers: how far it is is not known
    assert "30 s ago rollout-1-g update 6 1.9 s 1.4 of 1.9 s: rollout-1's link" in shown
    assert "7 available 9.0 s 90.0 MB yes 4 3 3 1" in shown
    assert "6 available > 60 s 90.0 MB yes 4 3 3 1" in shown  # it was there before
    assert "7 ready 0 3 spot trainer trainer-g" in shown
    scrolled = lines(SEEN, View("model", 5), 100, 20)
    assert scrolled[1:-1] == shown[6:24]
    assert lines(SEEN, View("model", 10_000), 100, 20)[-2] == next(
        line for line in reversed(shown[:-1]) if line
    )


def test_a_large_model_is_counted() -> None:
    large = replace(
        SEEN, models=(replace(ACTOR, summary=replace(COUNTS, workers=1024)),), rows=None
    )
    shown = lines(large, View("model"), 80, 60)
    assert "rows are left out: it has more than 64 workers" in shown
    assert "update chunks 3 12 s rollout-3-g" in shown
    assert not any("trainer" in line for line in shown)
    assert any(" 1,024 1 chunks 12 s" in line for line in lines(large))


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (7, 3), (20, 5), (40, 10), (80, 24), (300, 90)]
)
@pytest.mark.parametrize("page", ["all", "model", "help"])
def test_no_screen_is_exceeded(width: int, height: int, page: str) -> None:
    for seen in (SEEN, hostile(), replace(SEEN, models=(), chosen="", rows=None)):
        view = View("model" if page == "model" else "help" if page == "help" else "all")
        lines(seen, view, width, height)


def test_many_models_are_shown_around_the_chosen_one() -> None:
    models = tuple(replace(CRITIC, model=f"m{number:03}") for number in range(300))
    for chosen in ("m000", "m150", "m299"):
        shown = lines(replace(SEEN, models=models, chosen=chosen, rows=None))
        assert sum(line.startswith(f"> {chosen} ") for line in shown) == 1
        assert any(line.startswith(f"{chosen}: nothing published yet") for line in shown)


def hostile() -> Seen:
    """Names with escapes, markup, right-to-left marks and wide characters."""
    name = f"[red]{HOSTILE}漢字[/red]" + "x" * 400
    shard = ShardView(0, name, "filling", 1, 3, 0)
    rows = replace(
        ROWS,
        model=name,
        replicas=(ReplicaView(name, 7, "filling", name, name, "", True, (shard,), name),),
        leases=(LeaseView("l", name, name, 7, 0, name),),
    )
    counts = replace(
        COUNTS,
        calls=(CallsSummary(name, "chunks", 1, 9.0, name),),
        silent=(SilentWorker(name, name, 1.0),),
    )
    return replace(
        SEEN,
        address=name,
        models=(replace(ACTOR, model=name, summary=counts),),
        chosen=name,
        rows=rows,
        updates=(replace(UPDATE, key=OpKey(name, name, 0, 1), sentence=name + "\n"),),
        events=(ClusterEvent(1, NOW, name, name, 1, name, name + "\n\x1b]0;x\x07"),),
        fault="",
    )


@pytest.mark.parametrize("page", ["all", "model"])
def test_no_name_is_a_command_to_the_terminal_or_markup(page: str) -> None:
    view = View("model") if page == "model" else View()
    for line in screen(hostile(), view, 200, 60):
        assert line.text.isprintable()
    assert any("[red]a\\x1b[2J" in line for line in lines(hostile(), view, 200, 60))
    with redirect_stdout(io.StringIO()) as plain:
        top._print(hostile())
    assert plain.getvalue().replace("\n", "").isprintable()
    assert "[red]a\\x1b[2J" in plain.getvalue()


def test_the_time_since_an_answer_is_said_and_all_else_stays() -> None:
    gone = replace(SEEN, at=NOW + 7, fault="the coordinator could not be reached")
    shown = screen(gone, View(), 100, 24)
    assert shown[0].text.startswith("the coordinator is away for 7.0 s, and asked again: the coord")
    assert shown[0].style == "reverse"
    assert lines(gone)[2].startswith("> actor 7 16 s")
    assert gone.gone_s == 7
    assert replace(gone, fault="").gone_s == 0


def test_in_a_pipe_an_answer_that_is_missing_is_said_on_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    top._print(replace(SEEN, at=NOW + 7, fault="it is\x1b[2J gone"))
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "the coordinator is away for 7.0 s, and asked again: it is\\x1b[2J gone\n"


def test_a_clock_that_differs_is_said() -> None:
    assert "its clock is +3600 s" in lines(replace(SEEN, ahead_s=3600.0))[0]


def test_the_help_fits() -> None:
    assert len(HELP.strip().splitlines()) <= 22
    assert max(map(len, HELP.splitlines())) <= 80


def test_cells_are_cut_in_the_middle_and_sentences_at_the_end() -> None:
    assert cut("node-0017-rollout-4711", 12) == "node-…t-4711"
    assert cut("1.4 of 1.9 s: the link", 12, prose=True) == "1.4 of 1.9…"
    assert cell_len(cut("漢" * 40, 11)) <= 11
    assert [ago(each) for each in (-1, 9.94, 59, 600, 8000)] == [
        *("0.0 s", "9.9 s", "59 s", "10 min", "2 h")
    ]


# --------------------------------------------------------------------------------------------------
# what is asked


class Clock:
    def __init__(self, behind_s: float = 0.0) -> None:
        self.behind_s = behind_s

    def __call__(self) -> float:
        return time.time() - self.behind_s


async def test_it_chooses_the_newest_model_and_says_who_reads_from_whom_and_how_fast() -> None:
    async with cluster("trainer", "reader", "watcher", transports=["tcp"]) as c:
        await c.hubs[0].register("first", tensors(1))
        weights = await c.hubs[0].register("m", tensors(1))
        await weights.publish(3)
        clock = Clock()
        watch = Watch(c.hubs[2], "here", clock)
        seen = await watch.look(None, 10.0)
        assert (seen.chosen, seen.fault, seen.ahead_s) == ("m", "", 0.0)
        assert [each.model for each in seen.models] == ["first", "m"]
        assert 0 <= seen.at - seen.published["m", 3] < 60
        assert [event.kind for event in seen.events][:2] == ["serving", "joined"]
        mine = await c.hubs[1].register("m", tensors())
        await mine.replicate()
        seen = await watch.look("m", 10.0)
        assert seen.rows is not None
        assert {replica.state for replica in seen.rows.replicas} == {"ready"}
        assert [update.outcome for update in seen.updates] == ["committed"]
        seen = await watch.look("first", 10.0)
        assert (seen.chosen, seen.updates) == ("first", ())
        assert (await watch.look("none", 10.0)).model is None
        assert worker_of(c.hubs[2]).name == "watcher"


async def test_a_running_read_is_shown_with_its_source_and_a_large_model_in_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader", "watcher") as c:
            weights = await c.hubs[0].register("m", tensors(1))
            await weights.publish(3)
            mine = await c.hubs[1].register("m", tensors())
            watch = Watch(c.hubs[2], "here")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mine.replicate)
                await until(lambda: gate.holds)
                seen = await watch.look("m", 10.0)
                monkeypatch.setattr(top_data, "WORKERS_MAX", 1)
                counted = await watch.look("m", 10.0)
                gate.open()
    shown = lines(seen, View("model"), 100, 60)
    assert any(re.fullmatch(r"reader 3 \d+ % - trainer", line) for line in shown), shown
    assert counted.rows is None
    assert "rows are left out: it has more than 64 workers" in lines(counted, View("model"))


async def test_a_rate_is_that_of_the_last_seconds() -> None:
    async with cluster("watcher") as c:
        watch = Watch(c.hubs[0], "here")
        rates = []
        for second, verified in enumerate((10, 30, 50, 70, 70, 70, 70, 70, 0)):
            rows = replace(ROWS, replicas=(reader("w", verified),))
            rates.append(watch._rates(rows, NOW + second).get(("r-w", 0)))
    per_chunk = 90_000_000 / 100
    shown = [None if rate is None else round(rate / per_chunk) for rate in rates]
    assert shown == [None, 20, 20, 20, 13, 7, 0, 0, None]


@pytest.mark.parametrize("behind_s", [3600.0, -3600.0])
async def test_ages_are_right_although_the_clocks_differ(behind_s: float) -> None:
    async with cluster("trainer", "watcher") as c:
        watch = Watch(c.hubs[1], "here", Clock(behind_s))
        await watch.look(None, 10.0)
        weights = await c.hubs[0].register("m", tensors(1))
        await weights.publish(1)
        seen = await watch.look(None, 10.0)
        assert abs(seen.ahead_s - behind_s) < 60
        assert 0 <= seen.at - seen.published["m", 1] < 60


# --------------------------------------------------------------------------------------------------
# on a terminal


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # textual's
async def test_keys_choose_models_and_pages() -> None:
    from tensorhub.cli.top_app import TopApp

    asked = []

    async def look(model: str | None) -> Seen:
        asked.append(model)
        return replace(SEEN, chosen=model or "actor", at=time.time())

    app = TopApp(look, SEEN, interval_s=3600.0)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "> actor" in app.drawn[2].text
        await pilot.press("down")
        await pilot.pause()
        assert "> critic" in app.drawn[3].text
        assert asked[-1] == "critic"
        await pilot.press("down", "up", "up", "up", "enter")
        await pilot.pause()
        assert app.view.page == "model"
        assert app.drawn[1].text.startswith("actor: newest 7")
        await pilot.press("down", "down", "up")
        assert app.view.offset == 1
        await pilot.press("escape", "question_mark")
        await pilot.pause()
        assert app.drawn[1].text.startswith("q        quit")
        await pilot.press("escape")
        await pilot.resize_terminal(40, 10)
        await pilot.pause()
        assert len(app.drawn) == 10
        await pilot.press("q")
    assert app.return_value == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # textual's
async def test_a_fault_that_asking_again_does_not_help_with_ends_it() -> None:
    from tensorhub.cli.top_app import TopApp
    from tensorhub.errors import AuthenticationFailed

    async def look(model: str | None) -> Seen:
        raise AuthenticationFailed("another token")

    app = TopApp(look, SEEN)
    async with app.run_test() as pilot:
        await pilot.pause()
    assert isinstance(app.error, AuthenticationFailed)


def test_a_real_terminal_is_drawn_resized_and_left_as_it_was(address: str) -> None:
    with sync.connect(address, token="", name="trainer", options=OPTIONS) as hub:
        hub.register("actor", tensors(1)).publish(7)
        with on_terminal("top", "--address", address, NO_COLOR="1") as terminal:
            before = terminal.modes()
            at = terminal.until("q quit")
            assert "> " in terminal.text
            assert "actor: newest 7" in terminal.text
            assert not any(b"\x1b[%dm" % code in terminal.written for code in range(30, 48))
            terminal.resize(60, 12)
            terminal.press("?")
            at = terminal.until("choose a model", at)
            terminal.press("q")
            assert terminal.wait() == 0
            assert terminal.written.count(b"\x1b[?1049h") == terminal.written.count(b"\x1b[?1049l")
            assert terminal.modes() == before or terminal.modes()[3] == before[3]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 130)]
)
def test_signals_leave_the_terminal_as_it_was(
    address: str, number: signal.Signals | None, code: int
) -> None:
    with on_terminal("top", "--address", address) as terminal:
        terminal.until("q quit")
        if number is None:
            terminal.press("\x03")
        else:
            os.kill(terminal.process.pid, number)
        assert terminal.wait() == code
        assert terminal.written.count(b"\x1b[?1049l") == 1
        assert "Traceback" not in terminal.text


def test_a_coordinator_that_goes_away_is_said_to_and_comes_back() -> None:
    with started("serve", "--quiet") as coordinator:
        address = line_with("tcp://", coordinator.stdout).strip()
        with on_terminal("top", "--address", address) as terminal:
            at = terminal.until("no model is registered")
            coordinator.kill()
            coordinator.wait(WAIT_S)
            at = terminal.until("the coordinator is away for", at)
            with started("serve", "--quiet", "--port", address.rpartition(":")[2]) as again:
                assert line_with(address, again.stdout)
                with sync.connect(address, options=OPTIONS) as hub:
                    hub.register("actor", tensors(1)).publish(7)
                    terminal.until("actor: newest 7", at)
            terminal.press("q")
            assert terminal.wait() == 0


def test_without_textual_a_terminal_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top, "_is_terminal", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run_here("top", "--address", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'tensorhub-ros[top]'; --once prints plain lines" in done.stderr


# --------------------------------------------------------------------------------------------------
# elsewhere


def test_once_and_in_a_pipe_it_prints_plain_lines(address: str) -> None:
    with sync.connect(address, token="", name="trainer", options=OPTIONS) as hub:
        hub.register("actor", tensors(1)).publish(7)
        done = run_here("top", "--once", "--address", address)
        assert (done.returncode, done.stderr) == (0, "")
        rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert "model newest age ready filling workers waits for" in rows
        assert any(row.startswith("> actor 7 ") for row in rows)
        assert any(row.startswith("7 ready 0 0 - trainer trainer-") for row in rows)
        assert any(row.endswith("published actor 7") for row in rows)
        unknown = run_here("top", "actr", "--once", "--address", address)
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "no model 'actr' is known here; known models: actor" in unknown.stderr
        assert "\x1b" not in done.stdout
        with started("top", "actor", "--interval-s", "0.2", "--address", address) as piped:
            for _ in range(2):
                assert line_with("actor: newest 7", piped.stdout)
        with on_terminal("top", "--address", address, TERM="dumb") as terminal:
            terminal.until("actor: newest 7")
            assert b"\x1b" not in terminal.written
        hub.register("\u6a21\u578b" * 60, tensors(2)).publish(1)
        with on_terminal("top", "actor", "--once", "--address", address) as terminal:
            terminal.until("published")
            assert max(map(cell_len, terminal.written.decode("utf-8", "ignore").splitlines())) <= 80


def document(stream: Iterator[str] | None, *, is_gone: bool) -> dict[str, object]:
    """The first one that says so."""
    for _ in range(200):
        said: dict[str, object] = json.loads(line_with("{", stream))
        if bool(said["gone_s"]) == is_gone:
            return said
    raise AssertionError("no document says so")


def test_json_is_a_document_a_line_and_goes_on_across_a_restart() -> None:
    with started("serve", "--quiet") as coordinator:
        address = line_with("tcp://", coordinator.stdout).strip()
        arguments = ("top", "--json", "--interval-s", "0.2", "--address", address)
        with started(*arguments) as process:
            first = json.loads(line_with("{", process.stdout))
            assert (first["models"], first["gone_s"]) == ([], 0)
            assert first["events"][0]["kind"] == "serving"
            assert json.loads(line_with("{", process.stdout))["events"] == []
            coordinator.kill()
            coordinator.wait(WAIT_S)
            assert document(process.stdout, is_gone=True)["models"] == []
            with started("serve", "--quiet", "--port", address.rpartition(":")[2]) as again:
                assert line_with(address, again.stdout)
                assert document(process.stdout, is_gone=False)["fault"] == ""
    done = run_here("top", "--json", "--once", "--address", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: CoordinatorUnavailable: ")
