"""`tensorhub report`: a page that opens from the disk, without a cluster."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tensorhub.cli import report
from tensorhub.cli.common import CommandError
from tensorhub.cli.report import Run, page_of
from tests.cli.processes import run_here
from tests.rig import cluster as running, published, tensors
from tests.web.browser import Browser
from tests.web.recorded import MODEL, NOW, cluster, explanation

HOSTILE = "</script><script>document.title='taken'</script>\u2028<!--<script>"


def _saved(run: Run, to: Path) -> str:
    to.write_text(page_of(run.document("tcp://10.0.0.1:17337")), encoding="utf-8")
    return to.as_uri()


def _run() -> Run:
    recording = cluster()
    return Run(
        NOW,
        list(recording.models.values()),
        {model: tuple(rows) for model, rows in recording.updates.items()},
        recording.explanations,
        recording.events,
    )


def test_a_page_opens_from_the_disk_and_asks_for_nothing(tab: Browser, tmp_path: Path) -> None:
    place = _saved(_run(), tmp_path / "run.html")
    tab.open(place)
    tab.see("saved", "version 7", "12 s", "trainer · actor version 7 · 16.1 GB in 1 shard")
    tab.open(f"{place}#/model/{MODEL}")
    tab.see("Who reads from whom", "What each group did", "site paris")
    assert tab.run("return document.querySelectorAll('.edge.past').length") == 2
    tab.open(f"{place}#/model/{MODEL}/update/7/rollout-1")
    tab.see(explanation().sentence)
    tab.open(f"{place}#/model/{MODEL}/worker/rollout-6")
    tab.see("now waiting for a worker to read from")
    tab.look(width=360, height=760)
    assert tab.overflow() <= 0
    asked = {each.partition("#")[0] for each in tab.requested()}
    assert {each for each in asked if not each.startswith(("data:", "about:"))} == {place}


def test_hostile_names_do_not_end_the_data(tab: Browser, tmp_path: Path) -> None:
    run = _run()
    run.models = [replace(run.models[0], model=HOSTILE), replace(run.models[0], model="__proto__")]
    run.events = [replace(run.events[-1], text=HOSTILE)]
    run.left_out = [f"of {HOSTILE}: 7 workers"]
    tab.open(_saved(run, tmp_path / "run.html"))
    tab.see(HOSTILE.replace("\u2028", "\\u2028"), "7 workers", "__proto__")
    assert tab.run("return document.title") == "TensorHub"
    tab.run("document.querySelectorAll('td a')[0].click()")
    tab.see("Who reads from whom")
    tab.open(f"{(tmp_path / 'run.html').as_uri()}#/model/constructor")
    tab.see("This report has no model constructor")


def test_a_page_is_what_was_collected() -> None:
    """Byte for byte: JSON within the element, and nothing else of the run in the page."""
    document = _run().document("tcp://10.0.0.1:17337")
    page = page_of(document)
    _, _, rest = page.partition('id="run">')
    data, _, _ = rest.partition("</script>")
    assert json.loads(data) == json.loads(json.dumps(document))
    assert page.count("</script>") == 2


async def test_times_are_by_the_coordinators_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's is an hour late."""
    async with running("trainer") as there:
        await published(there.hubs[0])
        started = time.time()
        late = lambda now=time.time: now() - 3600  # noqa: E731
        monkeypatch.setattr(time, "time", late)
        run = await report.collect(there.hubs[0], None)
        monkeypatch.undo()
    assert started - 60 < run.now < started + 600
    (age,) = [each["age_s"] for each in run.document("")["summary"]["models"]]
    assert 0 <= age < 600


async def test_of_a_large_cluster_a_part_is_saved_and_the_rest_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running("one", "two", "three") as there:
        await published(there.hubs[0])
        for hub in there.hubs[1:]:
            await (await hub.register("m", tensors())).update()
        monkeypatch.setattr(report, "EXPLANATIONS_MAX", 1)
        whole = await report.collect(there.hubs[0], "m")
        assert (len(whole.models[0].workers), len(whole.explanations)) == (3, 1)
        assert whole.left_out == ["1 explanations of updates"]
        monkeypatch.setattr(report, "ROWS_MAX", 2)
        monkeypatch.setattr(report, "WORKERS_MAX", 1)
        part = await report.collect(there.hubs[0], "m")
    assert [each.name for each in part.models[0].workers] == ["one"]
    assert part.models[0].summary is not None
    assert part.left_out[0] == "of m: 2 workers, with what they hold and read"


def test_an_output_that_cannot_be_had_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text("kept")
    for out, advice in (
        (tmp_path / "run.html", "--force"),
        (tmp_path, "directory"),
        (tmp_path / "none" / "run.html", "make it first"),
    ):
        done = run_here("report", "--address", "tcp://127.0.0.1:9", "--out", str(out))
        assert done.returncode == 2
        assert advice in done.stderr
    assert (tmp_path / "run.html").read_text() == "kept"


def test_an_output_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be written"):
        report._write(tmp_path / ("x" * 255), "page", force=True)  # its temporary name is too long
    assert not list(tmp_path.iterdir())
