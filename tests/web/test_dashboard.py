"""The dashboard in a real browser, over answers that were recorded."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tensorhub.observed import EVENT_KINDS, PART_NAMES, PHASE_NAMES, ClusterEvent
from tensorhub.types import CallsSummary
from tests.web.browser import Browser
from tests.web.recorded import MODEL, NOW, Server, cluster, explanation, served

STATIC = Path(str(resources.files("tensorhub.web"))) / "static"
HOSTILE = "<img src=x onerror=alert(1)>\u202e</script>\x1b[31m&amp;"
# as it is shown: unprintable characters as escapes
SEEN = "<img src=x onerror=alert(1)>\\u202e</script>\\u001b[31m&amp;"
PLACES = (
    "#/",
    f"#/model/{MODEL}",
    f"#/model/{MODEL}/update/7/rollout-1",
    f"#/model/{MODEL}/worker/rollout-6",
)


@pytest.fixture
def server() -> Iterator[Server]:
    with served(cluster()) as running:
        yield running


def test_the_overview_shows_models_workers_throughput_and_events(
    tab: Browser, server: Server
) -> None:
    tab.open(server.url)
    tab.see(
        MODEL, "version 7", "12 s", "16.1 GB", "3 at the newest, 5 filling, 2 at older versions"
    )
    tab.see(
        "1 not heard", "5 updates: chunks", "trainer · actor version 7 · 16.1 GB in 1 shard", "MB/s"
    )
    assert tab.run("return document.querySelectorAll('.tile').length") == 4


def test_a_model_shows_who_reads_from_whom(tab: Browser, server: Server) -> None:
    tab.open(f"{server.url}#/model/{MODEL}")
    tab.see("site paris", "8 workers; 2 others without it")
    nodes = "[...document.querySelectorAll('.node')].map(node => node.title)"
    for title in (
        "rollout-5: filling, 85 of 120 chunks, reads from rollout-1",
        "trainer: ready, 120 of 120 chunks",
    ):
        tab.until(lambda: title in "\n".join(tab.run(f"return {nodes}")), title)  # noqa: B023
    # a reader stands right of its source; what has ended is drawn as past
    left = "document.querySelector(`.node[title^='${arguments[0]}:']`).getBoundingClientRect().left"
    tab.until(
        lambda: tab.run(f"return {left}", "rollout-2") > tab.run(f"return {left}", "rollout-0")
    )
    edges = "['past', 'live'].map(kind => document.querySelectorAll(`.edge.${kind}`).length)"
    tab.until(lambda: tab.run(f"return {edges}") == [2, 5])
    assert tab.run("return document.querySelectorAll('.site').length") == 2


def test_of_a_node_that_is_pointed_at_only_its_reads_are_shown(
    tab: Browser, server: Server
) -> None:
    tab.open(f"{server.url}#/model/{MODEL}")
    tab.see("site paris")
    lit = "return document.querySelectorAll('.tree[data-lit] .edge[data-lit]').length"
    for worker, reads in (("rollout-5", 1), ("rollout-1", 2)):
        tab.until(lambda: tab.run("return document.querySelectorAll('.edge').length == 7"))
        tab.run(f"document.querySelector(`.node[title^='{worker}:']`).focus()")
        assert tab.run(lit) == reads
    tab.run("document.activeElement.blur()")
    assert tab.run(lit) == 0


def test_a_tree_is_drawn_again_when_reads_go_on(tab: Browser, server: Server) -> None:
    tab.open(f"{server.url}#/model/{MODEL}")
    tab.see("71 %")
    info = server.recording.models[MODEL]
    done = tuple(
        replace(
            each,
            shards=tuple(
                replace(shard, chunks_verified=min(120, shard.chunks_verified + 12))
                for shard in each.shards
            ),
        )
        for each in info.replicas
    )
    server.recording.models[MODEL] = replace(info, replicas=done, leases=info.leases[1:])
    tab.see("81 % · ")


def test_a_model_shows_timelines_versions_updates_and_workers(tab: Browser, server: Server) -> None:
    tab.open(f"{server.url}#/model/{MODEL}")
    tab.see("What each group did", "node-rollout-3", "show all 57", "not over yet")
    said = tab.run("return [...document.querySelectorAll('.bar')].map(bar => bar.title).join()")
    assert "update of version 6, committed: 1.2 s (resolve 36 ms" in said
    assert "generate: " in said
    tab.run("document.querySelector('button.more').click()")
    tab.until(lambda: tab.run("return document.querySelectorAll('tbody tr').length > 57"))


def test_an_update_has_a_sentence_a_critical_path_and_what_would_help(
    tab: Browser, server: Server
) -> None:
    tab.open(f"{server.url}#/model/{MODEL}/update/7/rollout-1")
    found = explanation()
    tab.see(found.sentence, *found.help, *(PART_NAMES[part.name] for part in found.parts))
    tab.see("210 of 500 Mbit/s", "74 %", "rollout-0 in paris", "may be off by 12 ms")
    widths = tab.run("return [...document.querySelectorAll('.path li')].map(li => li.offsetWidth)")
    assert len(widths) == len(found.parts)
    assert 0.6 < max(widths) / sum(widths) < 0.8


def test_a_worker_says_why_it_waits(tab: Browser, server: Server) -> None:
    tab.open(f"{server.url}#/model/{MODEL}/worker/rollout-6")
    tab.see("Its update of version 7 has run for 3.1 s: now waiting for a worker to read from.")
    tab.see("2.7 of 3.1 s so far")
    tab.see("It reads version 7 from trainer.", "It has 102 of 120 chunks", "update 6")
    tab.open(f"{server.url}#/model/{MODEL}/worker/rollout-8")
    tab.see("The coordinator has not heard it for 4.2 s")
    tab.open(f"{server.url}#/model/{MODEL}/worker/rollout-3")
    tab.see("No call of it is under way")


def test_a_worker_that_holds_nothing_yet_says_why_it_waits(tab: Browser, server: Server) -> None:
    info = server.recording.models[MODEL]
    others = tuple(each for each in info.replicas if each.group != "rollout-6")
    server.recording.models[MODEL] = replace(info, replicas=others, leases=info.leases[:1])
    rows = server.recording.updates[MODEL]
    rows[0] = replace(rows[0], version=None, worker="rollout-6")
    tab.open(f"{server.url}#/model/{MODEL}/worker/rollout-6")
    tab.see("Its update has run for 3.1 s: now waiting for a worker to read from.")
    tab.see("It holds no version.", "It reads from no worker now.")


@pytest.mark.parametrize(
    "place", ["#/model/none", "#/model/actor/worker/none", "#/%E0%A4%A", "#/x"]
)
def test_a_place_that_there_is_not_says_so(place: str, tab: Browser, server: Server) -> None:
    tab.open(server.url + place)
    tab.see("There is no" if "none" in place else "Events")
    missing = [each for each in tab.complaints() if "404" not in each]
    assert missing == []


def test_hostile_names_are_text(tab: Browser) -> None:
    recording = cluster()
    info = recording.models.pop(MODEL)
    rename = {"rollout-6": HOSTILE, "paris": f"<b>{HOSTILE}"}
    workers = tuple(
        replace(
            each,
            name=rename.get(each.name, each.name),
            location=replace(
                each.location, site=rename.get(each.location.site, each.location.site)
            ),
        )
        for each in info.workers
    )
    replicas = tuple(
        replace(
            each, group=HOSTILE, shards=tuple(replace(one, worker=HOSTILE) for one in each.shards)
        )
        if each.group == "rollout-6"
        else each
        for each in info.replicas
    )
    leases = tuple(
        replace(each, reader=rename.get(each.reader, each.reader)) for each in info.leases
    )
    model = f"{HOSTILE}/../?&#"
    recording.models[model] = replace(
        info, model=model, workers=workers, replicas=replicas, leases=leases
    )
    recording.updates = {
        model: [
            replace(each, sentence=HOSTILE, key=replace(each.key, group=HOSTILE))
            for each in recording.updates[MODEL]
            if each.version == 7 and each.outcome == "committed"
        ]
    }
    hostile = explanation()
    recording.explanations = [
        replace(
            hostile,
            model=model,
            group=HOSTILE,
            sentence=HOSTILE,
            parts=(replace(hostile.parts[0], name="<i>", text=HOSTILE, peer=HOSTILE),),
            help=(HOSTILE,),
        )
    ]
    recording.events = [
        ClusterEvent(1, NOW, "published", model, 7, HOSTILE, HOSTILE),
        ClusterEvent(2, NOW, "constructor", model, 7, HOSTILE, ""),
    ]
    with served(recording) as server:
        tab.open(server.url)
        tab.see(f"{SEEN}/../?&#", SEEN)
        tab.run("document.querySelector('td a').click()")
        tab.see("Who reads from whom", f"site <b>{SEEN}", "What each group did")
        assert _strangers(tab) == 0
        tab.run("document.querySelector('a.update').click()")
        tab.see("What would help", "<i>")
        assert _strangers(tab) == 0
        tab.run("[...document.querySelectorAll('td a')].at(-1).click()")
        tab.run(
            f"location.hash = '#/model/' + {_encoded(model)} + '/worker/' + {_encoded(HOSTILE)}"
        )
        tab.see("Why is it waiting?", SEEN)
        assert _strangers(tab) == 0
        isolated = "[...document.querySelectorAll('bdi')].map(e => getComputedStyle(e).unicodeBidi)"
        assert set(tab.run(f"return {isolated}")) == {"isolate"}


def _encoded(text: str) -> str:
    return f"encodeURIComponent({json.dumps(text)})"


def _strangers(tab: Browser) -> int:
    """Elements that only markup in a name could have made."""
    return int(
        tab.run("return document.querySelectorAll('#app img, #app i:not(.pulse i), #app b').length")
    )


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_asked_of_another_origin(place: str, tab: Browser, server: Server) -> None:
    tab.open(server.url + place)
    tab.see("trainer")
    asked = {urlsplit(each).netloc for each in tab.requested() if not each.startswith("about:")}
    assert asked == {urlsplit(server.url).netloc}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("width", [360, 700, 970, 1280])
def test_no_screen_scrolls_sideways(width: int, place: str, tab: Browser) -> None:
    """Nor is anything cut: names of 512 characters neither."""
    long = "a-name-of-a-rollout-" * 25
    with served(cluster(prefix=long)) as server:
        tab.look(width=width, height=760)
        tab.open(server.url + place.replace("rollout-", long))
        tab.see("trainer")
        assert tab.overflow() <= 0
        outside = """
            return [...document.querySelectorAll("main td, main th, main p, main li, main h1")]
              .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
              .map((each) => each.textContent.slice(0, 60));
        """
        assert tab.run(outside) == []


def test_texts_have_contrast_in_light_and_dark(tab: Browser, server: Server) -> None:
    """Of each text at least 4.5, as WCAG's level AA asks."""
    for place in PLACES:
        for dark in (False, True):
            tab.look(dark=dark)
            tab.open(server.url + place)
            tab.see("trainer")
            assert tab.run(CONTRASTS) == [], (place, dark)


def test_a_token_is_asked_for_and_kept_in_this_tab_only(tab: Browser) -> None:
    recording = cluster()
    recording.token = "right"
    with served(recording) as server:
        tab.open(server.url)
        tab.see("asks for a token")
        for wrong in ("\u05e9\u05dc\u05d5\u05dd", "wrong"):
            tab.run("document.querySelector('input').value = ''")
            tab.type_into("input", f"{wrong}\ue007")
            tab.see("It did not accept that one.")
        tab.run("document.querySelector('input').value = ''")
        tab.type_into("input", "right\ue007")
        tab.see("trainer · actor version 7 · 16.1 GB in 1 shard")
        kept = (
            "return [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        )
        assert tab.run(kept) == ['{"tensorhub-token":"right"}', "{}", ""]
        recording.token = "another"  # as after a rotation
        tab.see("asks for a token")
        refused = [each for each in tab.complaints() if "401" not in each]
        assert refused == []


def test_a_coordinator_that_goes_away_is_missed_and_comes_back(tab: Browser) -> None:
    with served(cluster()) as server:
        port = server.server_address[1]
        tab.open(server.url)
        tab.see("version 7")
    tab.see("The coordinator has not been heard for", "trying again", "away")
    tab.see("version 7")  # what was known stays
    recording = cluster()
    recording.events.append(replace(recording.events[-1], number=99, text="it is back"))
    with served(recording, port) as server:
        tab.see("it is back")
        tab.until(lambda: "not been heard" not in tab.text())
    tab.until(lambda: "not been heard" in tab.text())
    gone = ("ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "ERR_SOCKET")
    assert [each for each in tab.complaints() if not any(one in each for one in gone)] == []
    tab.open("about:blank")


def test_the_keyboard_is_enough(tab: Browser, server: Server) -> None:
    """Each link and button is reached by Tab, and stays focused while the page is drawn again."""
    tab.open(f"{server.url}#/model/{MODEL}")
    tab.see("rollout-6")
    tab.run("document.querySelector('.node').focus()")
    before = tab.run("return document.activeElement.title")
    drawn = "window.draws = 0; new MutationObserver(() => window.draws++).observe(document.querySelector('#app'), {subtree: true, childList: true, attributes: true, characterData: true})"
    tab.run(drawn)
    tab.until(lambda: tab.run("return window.draws > 0"))
    assert tab.run("return document.activeElement.title") == before
    tab.press("\ue004")
    assert tab.run("return document.activeElement.className").startswith("node")
    tab.press("\ue007")
    tab.see("Why is it waiting?")


def test_integers_that_javascript_lacks_are_shown_whole(tab: Browser) -> None:
    recording = cluster()
    info = recording.models[MODEL]
    large = 2**63 - 1
    versions = (*info.versions[:-1], replace(info.versions[-1], version=large))
    recording.models[MODEL] = replace(info, mark=large, versions=versions)
    with served(recording) as server:
        tab.open(server.url)
        tab.see(f"version {large}")


@pytest.mark.parametrize("ranks", [1, 8])
def test_256_workers_are_gathered(
    ranks: int, tab: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of groups, or, where there are too many of them, of sites."""
    with served(cluster(256 // ranks - 1, ranks=ranks)) as server:
        tab.open("about:blank")
        began = time.monotonic()
        tab.open(f"{server.url}#/model/{MODEL}")
        tab.see("Who reads from whom")
        rows_s = time.monotonic() - began
        tab.see("Workers (256)", "workers, gathered")
        nodes = int(tab.run("return document.querySelectorAll('.node').length"))
        assert nodes <= 64
        tab.see("paris: readers" if ranks == 1 else "8 workers")
        drawing = "const began = performance.now(); draw(); return performance.now() - began"
        with capsys.disabled():
            said = f"rows after {rows_s:.2f} s, drawn again in {tab.run(drawing):.1f} ms"
            sys.stdout.write(f"\n256 workers: {said}\n")
        tab.look(width=360, height=760)
        tab.until(lambda: tab.overflow() <= 0)


def test_files_are_small_and_hold_no_way_to_markup_or_to_another_origin() -> None:
    files = [each for each in STATIC.iterdir() if each.is_file()]
    assert sum(each.stat().st_size for each in files) <= 300_000
    code = {each.name: each.read_text(encoding="utf-8") for each in files}
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser"
    for name, text in code.items():
        assert not re.search(ways, text), name
        links = re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*",
            re.sub(r"^\s*// .*", "", text, flags=re.MULTILINE),
        )
        assert set(links) <= {"http://www.w3.org/2000/svg"}, name


def test_words_are_the_librarys() -> None:
    """Without a browser, so that a new word is missed on every machine."""
    text = (STATIC / "words.js").read_text(encoding="utf-8")
    tables = {
        name: re.findall(r'^  "?([\w ]+?)"?: (.+),$', body, re.MULTILINE)
        for name, body in re.findall(r"^const (\w+) = {\n(.*?)^};", text, re.MULTILINE | re.DOTALL)
    }
    assert {name: json.loads(value)[1] for name, value in tables["PARTS"]} == PART_NAMES
    assert dict(tables["EVENTS"]).keys() == EVENT_KINDS.keys()
    assert [name for name, _ in tables["PHASES"]] == list(PHASE_NAMES)
    assert CallsSummary.__doc__ is not None
    told = re.findall(r'- "(\w+)"', CallsSummary.__doc__)
    assert [name for name, _ in tables["WAITS"]] == told


# each text whose colour is too close to what is behind it: [text, contrast]
CONTRASTS = """
const light = (rgb) => {
  const [r, g, b] = rgb.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour.slice(0, 3);
  }
  return [255, 255, 255];
};
const poor = [];
const walker = document.createTreeWalker(document.querySelector("#app"), NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
  const pair = [light(parse(getComputedStyle(element).color).slice(0, 3)), light(behind(element))];
  const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  if (contrast < 4.5) poor.push([walker.currentNode.data, Math.round(contrast * 100) / 100]);
}
return poor;
"""
