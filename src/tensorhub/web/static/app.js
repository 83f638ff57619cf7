// The page: asks once a second for what it shows, and draws that. What is not shown is not asked.
"use strict";

const ASK_EVERY_S = 1;
const LARGE_EVERY_S = 3; // descriptions of more workers than are drawn one by one
const AWAY_MOST_S = 5; // between two attempts
const EVENTS_AGAIN_S = 2;
const THROUGHPUT_KEPT = 120;
const SOURCES_ASKED = 4; // each time

/** All that is known; the views read it. */
const known = {
  source: openSource(),
  summary: null,
  models: new Map(),
  updates: new Map(), // rows by model
  explanation: null, // of the update that is shown
  events: [],
  publishedAt: new Map(), // by model and version, seconds since 1970
  throughput: [], // bytes/s
  asked: false, // the place that is shown has been asked for
  width: 960, // of a card's inside
  unfolded: new Set(), // tables of which all rows are shown
  chosen: new Map(), // the version whose tree is shown, by model
  span: null, // seconds that the timeline shows
  clockAhead: 0, // the coordinator's clock less this page's

  /** Now, by the coordinator's clock; of a saved run the time of saving. */
  now() {
    return known.source.saved
      ? known.source.run.summary.coordinator.now
      : performance.now() / 1000 + known.clockAhead;
  },
  /** What the summary has of a model: of a large one counts only. */
  told(model) {
    return known.summary.models.find((each) => each.model === model);
  },
  unfold(key) {
    known.unfolded.add(key);
    draw();
  },
  choose(model, version) {
    known.chosen.set(model, version);
    draw();
  },
  setSpan(seconds) {
    known.span = seconds;
    draw();
  },
  pastOf(model, version) {
    return seen.sources.get(`${version} ${model}`) ?? new Map();
  },
  ratesOf(model, version) {
    return seen.rates.get(`${version} ${model}`) ?? new Map();
  },
  slices() {
    return known.source.leftOut.length
      ? card(
          "What this report leaves out",
          h(
            "ul",
            {},
            known.source.leftOut.map((each) => h("li", {}, each)),
          ),
        )
      : null;
  },
};

/** What earlier answers showed, and the present one does not. */
const seen = {
  sources: new Map(), // by version and model: a reader's last source
  chunks: new Map(), // by version and model: [time, verified chunks by worker]
  rates: new Map(), // by version and model: bytes/s by worker
  bytes: null, // [time, bytes in all]
};

const page = {
  heardAt: null,
  failures: 0,
  refused: false,
  wrongToken: false,
  place: null,
  due: 0,
  timer: 0,
  turn: 0,
  late: false,
};

// -------------------------------------------------------------------------------------------------
// asking

async function ask() {
  clearTimeout(page.timer);
  const turn = ++page.turn; // of two that run at once, the later goes on
  const { place } = page;
  try {
    const summary = await known.source.summary();
    if (!summary) throw new Error("no summary");
    known.summary = summary;
    known.clockAhead = summary.coordinator.now - performance.now() / 1000;
    // of small models it has all rows
    for (const info of summary.models) if (isWhole(info)) heardModel(info.model, info);
    if (place.view !== "overview" && !known.asked) draw(); // what is known so far
    await askFor(place);
    page.heardAt = performance.now();
    page.failures = 0;
    page.refused = false;
    if (!page.events && !known.source.saved) page.events = follow();
  } catch (error) {
    page.failures += 1;
    page.late = error instanceof Late;
    if (error instanceof Refused) {
      page.refused = true;
      page.wrongToken = Boolean(sessionStorage.getItem(TOKEN));
    }
  }
  if (turn !== page.turn) return;
  draw();
  if (!known.source.saved && !page.refused && !document.hidden) {
    const wait = page.failures ? Math.min(AWAY_MOST_S, page.failures) : ASK_EVERY_S;
    page.timer = setTimeout(ask, wait * 1000);
  }
}

async function askFor(place) {
  if (place.view === "overview") {
    const total = samples(await known.source.metrics(), "tensorhub_bytes_total");
    if (total.length) heardBytes(total.reduce((sum, each) => sum + each.value, 0));
    return;
  }
  const asks = [];
  if (place.view === "update") {
    asks.push(askForExplanation(place, place.version, place.group));
  } else {
    asks.push(askForUpdates(place));
    const told = known.told(place.model);
    if (!(told && isWhole(told)) && performance.now() >= page.due) {
      page.due = performance.now() + LARGE_EVERY_S * 1000 - 100;
      asks.push(known.source.model(place.model).then((info) => heardModel(place.model, info)));
    }
  }
  await Promise.all(asks);
  if (page.place === place) known.asked = true;
  if (place.view === "model") await askForSources(place.model);
}

/** Whether a description has its rows, and not only counts. */
function isWhole({ workers, summary }) {
  return Boolean(summary) && workers.length >= summary.workers;
}

async function askForExplanation(place, version, group) {
  const found = await known.source.explain(place.model, version, group);
  if (page.place === place) known.explanation = found;
}

async function askForUpdates(place) {
  const rows = (await known.source.updates(place.model)).map(timed);
  known.updates.set(place.model, rows);
  if (place.view !== "worker") return;
  // what its call has waited for until now
  const replicas = known.models.get(place.model)?.replicas ?? [];
  const groups = replicas.filter((each) =>
    each.shards.some((shard) => shard.worker === place.worker),
  );
  const names = new Set(groups.map((each) => each.group));
  const running = rows.find(
    (row) => row.outcome === "running" && (names.has(row.group) || row.worker === place.worker),
  );
  if (running) await askForExplanation(place, running.version ?? undefined, running.group);
  else known.explanation = null;
}

/** Whom a few more workers read the newest version from, if that was before this page looked. */
async function askForSources(model) {
  const mark = known.models.get(model)?.mark ?? null;
  if (mark === null) return;
  const past = known.pastOf(model, mark);
  const unknown = (known.updates.get(model) ?? []).filter(
    (each) =>
      each.version === mark &&
      each.outcome === "committed" &&
      each.worker &&
      !past.has(each.worker),
  );
  for (const row of unknown.slice(0, SOURCES_ASKED)) {
    const found = await known.source.explain(model, mark, row.group);
    const links = [...(found?.links ?? [])].sort((some, other) => other.nbytes - some.nbytes);
    heardSource(model, mark, row.worker, links[0]?.source ?? null);
  }
}

function heardSource(model, version, reader, source) {
  const key = `${version} ${model}`;
  if (!seen.sources.has(key)) seen.sources.set(key, new Map());
  seen.sources.get(key).set(reader, source);
}

function heardModel(model, info) {
  if (!info) {
    known.models.delete(model);
    return;
  }
  // a page of a model has no counts
  const counts = known.told(model);
  if (counts && !info.summary) {
    const summaries = new Map(
      counts.versions.map((each) => [`${each.lineage}/${each.version}`, each.summary]),
    );
    info.summary = counts.summary;
    for (const each of info.versions)
      each.summary ??= summaries.get(`${each.lineage}/${each.version}`);
  }
  known.models.set(model, info);
  const now = performance.now() / 1000;
  const kept = new Set(info.versions.map((each) => `${each.version} ${model}`));
  for (const map of [seen.sources, seen.chunks, seen.rates])
    for (const key of map.keys()) if (key.endsWith(` ${model}`) && !kept.has(key)) map.delete(key);
  for (const lease of info.leases) heardSource(model, lease.version, lease.reader, lease.source);
  for (const version of info.versions) heardProgress(model, info, version, now);
}

/** What each worker's verified chunks grow by, as bytes/s over the last few answers. */
function heardProgress(model, info, version, now) {
  const replicas = info.replicas.filter(
    (each) => each.version === version.version && each.state === "filling",
  );
  const key = `${version.version} ${model}`;
  const before = seen.chunks.get(key);
  if (replicas.length === 0) {
    seen.chunks.delete(key);
    seen.rates.delete(key);
    return;
  }
  const verified = new Map();
  const rates = new Map();
  for (const { shards } of replicas) {
    const chunks = shards.reduce((sum, shard) => sum + shard.chunks, 0);
    const chunkBytes = (version.nbytes * shards.length) / version.world_size / (chunks || 1);
    for (const shard of shards) {
      verified.set(shard.worker, shard.chunks_verified);
      const had = before?.[1].get(shard.worker);
      if (had === undefined) continue;
      const rate = (Math.max(0, shard.chunks_verified - had) * chunkBytes) / (now - before[0]);
      const last = seen.rates.get(key)?.get(shard.worker) ?? rate;
      rates.set(shard.worker, last + (rate - last) / 3);
    }
  }
  seen.chunks.set(key, [now, verified]);
  seen.rates.set(key, rates);
}

function heardBytes(total) {
  const now = performance.now() / 1000;
  if (seen.bytes && total >= seen.bytes[1]) {
    known.throughput.push((total - seen.bytes[1]) / Math.max(0.1, now - seen.bytes[0]));
    known.throughput.splice(0, known.throughput.length - THROUGHPUT_KEPT);
  }
  seen.bytes = [now, total];
}

function heardEvents(events) {
  for (const event of events) {
    // numbers begin anew with each life of the coordinator
    if (event.number <= (known.events.at(-1)?.number ?? 0)) known.events.length = 0;
    known.events.push(event);
    if (event.kind !== "published" || event.version === null) continue;
    if (!known.publishedAt.has(event.model)) known.publishedAt.set(event.model, new Map());
    known.publishedAt.get(event.model).set(String(event.version), event.at);
  }
  known.events.splice(0, known.events.length - EVENTS_KEPT);
  if (known.summary && !page.refused) soon();
}

/** Follow the events, again and again. */
async function follow() {
  for (;;) {
    try {
      await known.source.events(heardEvents);
    } catch (error) {
      if (error instanceof Refused) {
        page.events = null;
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, EVENTS_AGAIN_S * 1000));
  }
}

// -------------------------------------------------------------------------------------------------
// drawing

let drawSoon = 0;

function soon() {
  drawSoon ||= requestAnimationFrame(() => {
    drawSoon = 0;
    draw();
  });
}

const VIEWS = { overview, model: modelView, update: updateView, worker: workerView };

function draw() {
  show();
  const inside = document.querySelector(".card"); // less its padding: see style.css
  const width = inside
    ? Math.max(240, inside.clientWidth - (innerWidth <= 640 ? 24 : 40))
    : known.width;
  if (width !== known.width) {
    known.width = width;
    show();
  }
  document.title =
    page.place.view === "overview"
      ? "TensorHub"
      : `${shown(page.place.worker ?? page.place.model)} · TensorHub`;
}

function show() {
  const main = h("main", { id: "main", tabindex: "-1" }, content());
  patch(document.getElementById("app"), [header(), banner(), main]);
}

function content() {
  if (page.refused) return tokenForm();
  if (!known.summary) return [h("p", { class: "none", key: "none" }, "Asking the coordinator …")];
  return VIEWS[page.place.view](known, page.place);
}

function header() {
  const coordinator = known.summary?.coordinator;
  const away = isAway();
  const state = known.source.saved
    ? "saved"
    : page.refused
      ? "locked"
      : away
        ? "away"
        : coordinator
          ? "live"
          : "…";
  return h(
    "header",
    { key: "header" },
    h("a", { href: "#main", class: "skip", onclick: skip }, "to the content"),
    h(
      "a",
      { href: "#/", class: "home", "aria-label": "overview" },
      mark(),
      h("span", {}, "TensorHub"),
    ),
    h("span", { class: "where" }, coordinator ? name(coordinator.address) : ""),
    h(
      "span",
      { class: `pulse ${state}` },
      h("i"),
      known.source.saved ? `saved ${new Date(known.now() * 1000).toLocaleString("en-GB")}` : state,
    ),
  );
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function mark() {
  return h(
    "svg",
    { viewBox: "0 0 32 32", width: 28, height: 28, "aria-hidden": "true" },
    h("rect", { width: 32, height: 32, rx: 7, class: "mark-ground" }),
    h("path", { d: "M9 16C15 16 15 8 22 8M9 16h13M9 16c6 0 6 8 13 8", class: "mark-line" }),
    h("circle", { cx: 9, cy: 16, r: 4, class: "mark-source" }),
    [8, 16, 24].map((y) => h("circle", { cx: 23, cy: y, r: 3, class: "mark-reader" })),
  );
}

function isAway() {
  return page.failures > 0 && !page.refused;
}

function banner() {
  if (!isAway()) return h("div", { key: "banner", class: "banner", role: "status" });
  const silent =
    page.heardAt === null ? "" : ` for ${inSeconds((performance.now() - page.heardAt) / 1000)}`;
  return h(
    "div",
    { key: "banner", class: "banner away", role: "status" },
    page.late
      ? `The coordinator is behind: it has not answered${silent}; trying again.`
      : `The coordinator has not been heard${silent}; trying again.`,
  );
}

function tokenForm() {
  const enter = (event) => {
    event.preventDefault();
    const token = new FormData(event.target).get("token").trim();
    page.wrongToken = !/^[\x21-\x7e]+$/.test(token); // no header could carry it
    if (page.wrongToken) return draw();
    sessionStorage.setItem(TOKEN, token);
    ask();
  };
  return h(
    "form",
    { class: "card token", key: "token", onsubmit: enter },
    h("h2", {}, "This coordinator asks for a token"),
    page.wrongToken
      ? h("p", { class: "wrong", role: "alert" }, "It did not accept that one.")
      : null,
    h(
      "label",
      {},
      "The cluster's token; the read-only one is enough",
      h("input", {
        name: "token",
        type: "password",
        required: true,
        autocomplete: "off",
        spellcheck: "false",
      }),
    ),
    h("button", { type: "submit" }, "Show the cluster"),
    h("p", { class: "faint" }, "This tab keeps it until it is closed, and nothing else does."),
  );
}

// -------------------------------------------------------------------------------------------------
// beginning

async function begin() {
  moved();
  if (!known.source.saved) return;
  const { run } = known.source;
  for (const [model, rows] of Object.entries(run.updates))
    for (const { key, version, worker } of rows) {
      const found = await known.source.explain(model, version, key.group);
      if (found?.links.length) heardSource(model, version, worker, found.links[0].source);
    }
  await known.source.events(heardEvents);
  draw();
}

function moved() {
  page.place = placeOf(location.hash);
  page.due = 0;
  known.asked = false;
  known.explanation = null;
  window.scrollTo(0, 0);
  draw();
  ask();
}

window.addEventListener("hashchange", moved);
window.addEventListener("resize", soon);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) ask();
});
// the banner's seconds go on while no answer comes
setInterval(() => {
  if (isAway() && !document.hidden) draw();
}, 1000);
begin();
