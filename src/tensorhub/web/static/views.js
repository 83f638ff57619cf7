// What each page shows: pure functions from what is known (`known`, see app.js) to elements.
"use strict";

const ROWS_SHOWN = 12; // of a table, before "show all"

// -------------------------------------------------------------------------------------------------
// places: #/, #/model/M, #/model/M/worker/W, #/model/M/update/V/G

function to(...parts) {
  return "#/" + parts.map((part) => encodeURIComponent(part)).join("/");
}

function placeOf(hash) {
  try {
    const [kind, model, inner, ...rest] = hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
    if (kind !== "model" || !model) return { view: "overview" };
    if (inner === "worker" && rest.length === 1) return { view: "worker", model, worker: rest[0] };
    if (inner === "update" && rest.length === 2)
      return { view: "update", model, version: rest[0], group: rest[1] };
    return { view: "model", model };
  } catch {
    return { view: "overview" }; // no text that anybody encoded
  }
}

// -------------------------------------------------------------------------------------------------
// pieces of pages

function card(title, ...children) {
  return h("section", { class: "card", key: title }, h("h2", {}, title), children);
}

/** `columns`: [title, cell of a row, class]. On a phone each row is a block of named lines. */
function table(columns, rows, id, none = "None.") {
  if (rows.length === 0) return h("p", { class: "none" }, none);
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, columns.map(([title, , kind]) => h("th", { class: kind, scope: "col" }, title)))),
    h(
      "tbody",
      {},
      rows.map((row, index) =>
        h(
          "tr",
          { key: id ? id(row) : String(index) },
          columns.map(([title, cell, kind]) => cellOf(title, cell(row), kind)),
        ),
      ),
    ),
  );
}

function cellOf(title, content, kind) {
  const classes = [kind, content === "–" && "empty"].filter(Boolean).join(" ");
  return h("td", { class: classes || null, "data-title": title }, h("span", {}, content));
}

/** The first rows, and a button for the others. */
function longTable(known, key, columns, rows, id, none) {
  const all = known.unfolded.has(key);
  const shownRows = all ? rows : rows.slice(0, ROWS_SHOWN);
  return [
    table(columns, shownRows, id, none),
    shownRows.length < rows.length
      ? h("button", { type: "button", class: "more", onclick: () => known.unfold(key) }, `show all ${whole(rows.length)}`)
      : null,
  ];
}

function tag(kind, text) {
  return h("span", { class: `tag ${kind}` }, text);
}

const STATE_KIND = {
  live: "good", ready: "good", complete: "good", available: "good", committed: "good",
  filling: "info", running: "info", staged: "info", active: "info",
  draining: "warn", suspect: "warn", doubtful: "warn", fencing: "warn", unavailable: "warn",
}; // prettier-ignore

function stateTag(state) {
  const kind = Object.hasOwn(STATE_KIND, state) ? STATE_KIND[state] : "bad";
  return tag(kind, state === "suspect" ? "not heard" : state);
}

function workerLink(model, worker) {
  return h("a", { href: to("model", model, "worker", worker) }, name(worker));
}

function eventRows(known, events) {
  return h(
    "ol",
    { class: "events" },
    events.map((event) =>
      h(
        "li",
        { key: String(event.number) },
        h("time", {}, clock(event.at)),
        tag(Object.hasOwn(EVENTS, event.kind) ? EVENTS[event.kind] : "plain", event.kind.replace("_", " ")),
        h("span", { class: "event-text" }, aboutEvent(event)),
      ),
    ),
  );
}

/** Of whom, of which version, and what was said of it. */
function aboutEvent(event) {
  let version = event.version === null ? "" : ` version ${event.version}`;
  if (version && event.kind === "updated" && event.worker)
    version = [" ", h("a", { href: to("model", event.model, "update", event.version, event.worker) }, version.trim())];
  const model = event.model && [h("a", { href: to("model", event.model) }, name(event.model)), version];
  const said = [event.worker && name(event.worker), model, event.text && h("bdi", {}, event.text)];
  return said.filter(Boolean).map((each, index) => [index ? " · " : "", each]);
}

function newestOf(info) {
  const lineages = info.versions.filter((each) => each.lineage === info.lineage);
  return lineages.find((each) => each.version === info.mark) ?? lineages.at(-1) ?? null;
}

/** How many replicas have which state: at the newest version, and older ones. */
function sharesOf(info) {
  const newest = newestOf(info);
  const sum = { ready: 0, filling: 0, draining: 0, torn: 0, older: 0 };
  for (const version of info.versions) {
    if (!version.summary) continue;
    if (version !== newest) sum.older += version.summary.ready;
    else sum.ready += version.summary.ready;
    for (const state of STATES.slice(1)) sum[state] += version.summary[state];
  }
  return [
    ["ready", sum.ready, "at the newest"],
    ["filling", sum.filling, "filling"],
    ["older", sum.older, "at older versions"],
    ["draining", sum.draining, "draining"],
    ["torn", sum.torn, "torn"],
  ];
}

/** Seconds since a version of a model was published; null: not known. */
function ageOf(known, model, version) {
  const info = known.told(model);
  if (info && String(info.mark) === String(version) && typeof info.age_s === "number") return info.age_s;
  const at = known.publishedAt.get(model)?.get(String(version));
  return at === undefined ? null : Math.max(0, known.now() - at);
}

// -------------------------------------------------------------------------------------------------
// the overview

function overview(known) {
  const { summary } = known;
  const { coordinator } = summary;
  const models = summary.models;
  const calls = models.flatMap((info) => info.summary?.calls ?? []);
  const longest = Math.max(0, ...calls.map((each) => each.longest_s));
  const reads = models.reduce((sum, info) => sum + (info.summary?.reads ?? info.leases.length), 0);
  const { workers, suspect } = coordinator;
  const waiting = calls.reduce((sum, each) => sum + each.count, 0);
  const rate = known.throughput.at(-1);
  return [
    h(
      "div",
      { class: "tiles", key: "tiles" },
      tile("workers", whole(workers), suspect ? `${whole(suspect)} not heard` : "all heard", suspect > 0 && "warn"),
      tile("reads now", whole(reads), rate === undefined ? "" : `${inBytes(rate)}/s`, "", sparkPicture(known.throughput)),
      tile("calls under way", whole(waiting), longest ? `longest without progress: ${inSeconds(longest)}` : "nothing waits", longest > 10 && "warn"),
      tile(
        "coordinator",
        coordinator.state,
        coordinator.behind_s >= 0.1 ? `${inSeconds(coordinator.behind_s)} behind` : "in time",
        coordinator.behind_s >= 0.1 && "warn",
      ),
    ),
    card("Models", table(MODEL_COLUMNS(known), models, (info) => info.model, "No model is registered yet."),
      coordinator.models > models.length ? h("p", { class: "faint" }, `and ${whole(coordinator.models - models.length)} more models, with older publications`) : null),
    known.slices(),
    card("Events", known.events.length ? eventRows(known, known.events.slice(-60).reverse()) : h("p", { class: "none" }, "Nothing has happened yet.")),
  ];
}

function tile(title, value, text, kind, picture) {
  return h("div", { class: `tile ${kind || ""}`, key: title },
    h("div", { class: "tile-title" }, title),
    h("div", { class: "tile-value" }, value),
    h("div", { class: "tile-text" }, text),
    picture);
}

const MODEL_COLUMNS = (known) => [
  ["model", (info) => h("a", { href: to("model", info.model), class: "strong" }, name(info.model))],
  ["newest", (info) => (info.mark === null ? h("span", { class: "faint" }, "nothing published") : `version ${info.mark}`)],
  ["age", (info) => { const age = ageOf(known, info.model, info.mark); return age === null ? "–" : inSeconds(age); }, "number"],
  ["size", (info) => { const newest = newestOf(info); return newest ? inBytes(newest.nbytes) : "–"; }, "number"],
  ["replicas", (info) => sharesPicture(sharesOf(info))],
  ["waits for", (info) => callWords(info.summary?.calls ?? [])],
]; // prettier-ignore

function callWords(calls) {
  if (calls.length === 0) return h("span", { class: "faint" }, "nothing");
  const [first] = calls;
  const more = calls.length > 1 ? `, and ${calls.length - 1} more` : "";
  return `${callsOf(first)}: ${first.waits_for}, ${inSeconds(first.longest_s)}${more}`;
}

function callsOf({ count, call }) {
  return `${whole(count)} ${call}${count === 1 ? "" : /sh$|ch$/.test(call) ? "es" : "s"}`;
}

// -------------------------------------------------------------------------------------------------
// one model

function modelView(known, place) {
  const rowsCome = !known.models.has(place.model); // until then the summary's counts are shown
  const info = known.models.get(place.model) ?? known.told(place.model);
  if (!info) return nothing(known, "model", place.model);
  const rows = known.updates.get(place.model) ?? [];
  const newest = newestOf(info);
  const age = newest && ageOf(known, info.model, newest.version);
  return [
    h("div", { class: "title", key: "title" },
      h("h1", {}, name(info.model)),
      h("p", { class: "lead" },
        newest
          ? [`version ${newest.version}`, age === null ? "" : `, ${inSeconds(age)} old`, `, ${inBytes(newest.nbytes)} in ${counted(newest.world_size, "shard")}`]
          : "nothing published yet",
        ` · lineage ${info.lineage} · retains ${info.retain}`),
      sharesPicture(sharesOf(info))),
    callsCard(info),
    rowsCome ? card("Who reads from whom", h("p", { class: "none" }, "Asking the coordinator …")) : treeCard(known, info),
    timelineCard(known, info, rows),
    card("Versions", versionsTable(known, info)),
    card("Updates", longTable(known, "updates", UPDATE_COLUMNS(known, info.model), newestFirst(rows), rowKey, "No update has ended yet.")),
    card(`Workers (${workersOf(info)})`, longTable(known, "workers", WORKER_COLUMNS(info), byName(info.workers), (each) => each.incarnation)),
  ]; // prettier-ignore
}

/** How many are known one by one, and how many there are. */
function workersOf({ workers, summary }) {
  const more = summary && summary.workers > workers.length;
  return `${whole(workers.length)}${more ? ` of ${whole(summary.workers)}` : ""}`;
}

function rowKey(row) {
  return `${row.group}@${row.key.epoch}#${row.key.sequence}`;
}

function newestFirst(rows) {
  return [...rows].sort((some, other) => other.began_at - some.began_at);
}

function byName(workers) {
  return [...workers].sort((some, other) => some.name.localeCompare(other.name, "en", { numeric: true }));
}

function nothing(known, what, which) {
  const text = known.source.saved
    ? [`This report has no ${what} `, name(which), "."]
    : known.asked
      ? [`There is no ${what} `, name(which), ", or not any more."]
      : ["Asking the coordinator …"];
  return [h("p", { class: "none", key: "none" }, text)];
}

function callsCard(info) {
  const calls = info.summary?.calls ?? [];
  if (calls.length === 0) return null;
  return card("Calls under way", table([
    ["calls", callsOf],
    ["waits for", (each) => [h("strong", {}, each.waits_for), ": ", WAITS[each.waits_for] ?? ""]],
    ["longest without progress", (each) => inSeconds(each.longest_s), "number"],
    ["of", (each) => (each.who ? name(each.who) : "–")],
  ], calls)); // prettier-ignore
}

function treeCard(known, info) {
  const newest = newestOf(info);
  if (!newest) return null;
  const asked = known.chosen.get(info.model);
  const read = new Set(info.leases.map((lease) => String(lease.version)));
  const version = info.versions.find((each) => String(each.version) === asked) ?? newest;
  const nodes = treeOf(info, version.version, known.pastOf(info.model, version.version));
  const many = nodes.length > DRAWN_MAX;
  const drawn = many ? gathered(nodes) : nodes;
  const holders = new Set(nodes.map((node) => node.id));
  const others = info.workers.filter((each) => !holders.has(each.name)).length;
  const choices = [...new Map(info.versions.map((each) => [String(each.version), each])).values()].slice(-12).reverse();
  const live = drawn.some((node) => [...node.parents.values()].includes(true));
  return card("Who reads from whom",
    h("div", { class: "toolbar" },
      h("label", {}, "version ",
        h("select", { onchange: (event) => known.choose(info.model, event.target.value) },
          choices.map((each) => h("option", { key: String(each.version), value: String(each.version), selected: each === version },
            `${each.version}${each === newest ? " (newest)" : ""}${read.has(String(each.version)) ? ", being read" : ""}`)))),
      h("span", { class: "faint" },
        many ? `${whole(nodes.length)} workers, gathered` : counted(nodes.length, "worker"),
        others ? `; ${counted(others, "other")} without it` : "",
        live ? "" : "; no read is running")),
    // of each version anew: no progress goes back
    h("div", { key: `tree ${version.version}` }, treePicture(drawn, known.width, known.ratesOf(info.model, version.version), (node) => (node.states ? null : to("model", info.model, "worker", node.id)))),
    h("ul", { class: "legend" },
      h("li", {}, h("span", { class: "line live" }), "is read now"),
      h("li", {}, h("span", { class: "line past" }), "was read from"),
      h("li", {}, h("span", { class: "line between" }), "between sites"))); // prettier-ignore
}

const WINDOWS = [60, 300, 1800, 7200, 86_400];

function timelineCard(known, info, rows, title = "What each group did") {
  if (rows.length === 0) return null;
  const now = known.now();
  const groups = new Set(rows.map((row) => row.group)).size;
  const inWindow = (span) => rows.filter((row) => (row.ended_at ?? now) > now - span).length;
  const span = known.span ?? WINDOWS.find((each) => inWindow(each) >= Math.min(rows.length, groups)) ?? WINDOWS.at(-1);
  return card(title,
    h("div", { class: "toolbar", role: "group", "aria-label": "time shown" },
      WINDOWS.map((each) => h("button", { type: "button", "aria-pressed": String(each === span), onclick: () => known.setSpan(each) }, inSeconds(each)))),
    timelinePicture(rows, now - span, now, (row) => (row.version === null ? null : to("model", info.model, "update", row.version, row.group))),
    legend(Object.keys(PHASE_KINDS), "phase", PHASE_KINDS)); // prettier-ignore
}

function versionsTable(known, info) {
  const rows = [...info.versions].sort((some, other) => other.lineage - some.lineage || other.version - some.version);
  const number = (field) => (each) => (each.summary ? whole(each.summary[field]) : "–");
  return longTable(known, "versions", [
    ["version", (each) => h("strong", {}, String(each.version))],
    ["state", (each) => stateTag(each.state)],
    ["age", (each) => { const age = ageOf(known, info.model, each.version); return age === null ? "–" : inSeconds(age); }, "number"],
    ["replicas", (each) => (each.summary ? sharesPicture(STATES.map((state) => [state, each.summary[state], state])) : "–")],
    ["copies", number("copies"), "number"],
    ["readers", number("readers"), "number"],
    ["kept", (each) => (each.retained ? "yes" : "no")],
    ["lineage", (each) => String(each.lineage), "number"],
  ], rows, (each) => `${each.lineage}/${each.version}`, "Nothing published yet."); // prettier-ignore
}

const UPDATE_COLUMNS = (known, model) => [
  ["when", (row) => (row.ended_at === null ? "now" : ago(known.now() - row.ended_at))],
  ["group", (row) => name(row.group)],
  ["call", (row) => {
    const text = `${row.call} ${row.version ?? ""}`;
    return row.version === null ? text : h("a", { href: to("model", model, "update", row.version, row.group) }, text);
  }],
  ["outcome", (row) => stateTag(row.outcome)],
  ["took", (row) => inSeconds(row.seconds), "number"],
  ["phases", (row) => phaseBar(row)],
  ["why", (row) => (row.sentence ? h("bdi", {}, row.sentence) : row.longest || "–"), "wide"],
]; // prettier-ignore

function phaseBar(row) {
  if (row.phases.length === 0) return h("span", { class: "faint" }, "–");
  const text = row.phases.map(([phase, seconds]) => `${phase} ${inSeconds(seconds)}`).join(", ");
  const sum = row.phases.reduce((total, [, seconds]) => total + seconds, 0) || 1;
  return h("span", { class: "mini", title: text, role: "img", "aria-label": text },
    row.phases.map(([phase, seconds]) => h("span", { class: `phase-${phaseKind(phase)}`, style: { flex: `${seconds / sum} 0 0px` } }))); // prettier-ignore
}

const WORKER_COLUMNS = (info) => [
  ["worker", (each) => workerLink(info.model, each.name)],
  ["state", (each) => stateTag(each.state)],
  ["site", (each) => name(each.location.site)],
  ["host", (each) => name(each.location.host)],
  ["reached by", (each) => each.endpoints.map((end) => end.transport).join(", ") || "–"],
]; // prettier-ignore

// -------------------------------------------------------------------------------------------------
// one update

function updateView(known, place) {
  const found = known.explanation;
  const back = h("p", { class: "back", key: "back" }, h("a", { href: to("model", place.model) }, "‹ ", name(place.model)));
  if (!found) {
    return [back, ...nothing(known, "explanation of version " + place.version + " in the group", place.group)];
  }
  const isSmall = (part) => part.seconds < PART_LEAST * found.seconds;
  const [large, small] = [found.parts.filter((part) => !isSmall(part)), found.parts.filter(isSmall)];
  const rate = found.seconds ? ` · ${inBytes(found.nbytes / found.seconds)}/s` : "";
  return [
    back,
    h("div", { class: "title", key: "title" },
      h("h1", {}, `${found.call} of version ${found.version}, `, name(found.group)),
      h("p", { class: "sentence" }, h("bdi", {}, found.sentence)),
      h("p", { class: "lead" }, `ended ${ago(known.now() - found.ended_at)} (${clock(found.ended_at)}) · took ${inSeconds(found.seconds)} · ${inBytes(found.nbytes)}${rate}`)),
    card("Where the time went",
      pathPicture(found),
      legend(Object.keys(KINDS).filter((kind) => found.parts.some((part) => kindOf(part.name) === kind)), "kind", KINDS),
      table([
        ["part", (part) => [h("span", { class: `swatch kind-${kindOf(part.name)}` }), " ", h("strong", {}, part.name)]],
        ["seconds", (part) => inSeconds(part.seconds), "number"],
        ["share", (part) => percent(found.seconds ? part.seconds / found.seconds : 0), "number"],
        ["on", (part) => (part.worker ? workerLink(place.model, part.worker) : "–")],
        ["for", (part) => (part.peer ? workerLink(place.model, part.peer) : "–")],
        ["what", (part) => [part.text ? [h("bdi", {}, part.text), h("br")] : null, h("span", { class: "faint" }, Object.hasOwn(PARTS, part.name) ? PARTS[part.name][1] : "")], "wide"],
      ], known.unfolded.has("parts") ? found.parts : large),
      small.length && !known.unfolded.has("parts")
        ? h("button", { type: "button", class: "more", onclick: () => known.unfold("parts") }, `show ${counted(small.length, "part")} of less than ${percent(PART_LEAST)} each, ${inSeconds(small.reduce((sum, part) => sum + part.seconds, 0))} together`)
        : null,
      h("p", { class: "faint" }, `The parts add up to ${inSeconds(found.parts.reduce((sum, part) => sum + part.seconds, 0))} of ${inSeconds(found.seconds)}. Between machines a part may be off by ${inSeconds(found.unsure_s)}: the messages' own time.`)),
    found.help.length ? card("What would help", h("ul", { class: "help" }, found.help.map((each) => h("li", {}, h("bdi", {}, each))))) : null,
    card("Sources", table(LINK_COLUMNS(place.model), found.links, (each) => each.lease, "No bytes came from a source.")),
  ]; // prettier-ignore
}

const LINK_COLUMNS = (model) => [
  ["source", (each) => [workerLink(model, each.source), each.site ? [" in ", name(each.site)] : null]],
  ["by", (each) => `${each.transport}${each.kind === "live" ? "" : `, ${each.kind}`}`],
  ["bytes", (each) => inBytes(each.nbytes), "number"],
  ["while", (each) => inSeconds(each.seconds), "number"],
  ["rate", (each) => (each.seconds ? `${inBytes(each.nbytes / each.seconds)}/s` : "–"), "number"],
  ["the reader's seconds", (each) => LANE_PARTS.filter(([field]) => each[field] > 0).map(([field, text]) => `${text} ${inSeconds(each[field])}`).join(", ") || "–", "wide"],
]; // prettier-ignore

const LANE_PARTS = [
  ["link_s", "waiting for bytes"],
  ["empty_s", "source had none yet"],
  ["cpu_s", "CPU"],
  ["delay_s", "no core free"],
  ["gil_s", "GIL"],
  ["digest_s", "digests"],
  ["codec_s", "deltas"],
];

// -------------------------------------------------------------------------------------------------
// one worker

function workerView(known, place) {
  const info = known.models.get(place.model);
  const back = h("p", { class: "back", key: "back" }, h("a", { href: to("model", place.model) }, "‹ ", name(place.model)));
  const worker = info?.workers.find((each) => each.name === place.worker);
  if (!worker) return [back, ...nothing(known, "worker", place.worker)];
  const held = info.replicas.flatMap((replica) =>
    replica.shards.filter((shard) => shard.worker === worker.name).map((shard) => ({ replica, shard })));
  const groups = new Set(held.map(({ replica }) => replica.group));
  const all = known.updates.get(place.model) ?? [];
  const rows = newestFirst(all.filter((row) => groups.has(row.group) || row.worker === worker.name));
  const reads = info.leases.filter((lease) => lease.reader === worker.name);
  const serves = info.leases.filter((lease) => lease.source === worker.name);
  const { location } = worker;
  const where = [location.site, location.rack, location.host].filter(Boolean).map((each, index) => [index ? " / " : "", name(each)]);
  const events = known.events.filter((event) => event.worker === worker.name || groups.has(event.worker));
  const readColumns = (other, title) => [
    [title, (lease) => workerLink(info.model, lease[other])],
    ["version", (lease) => String(lease.version), "number"],
    ["shard", (lease) => String(lease.rank), "number"],
    ["state", (lease) => stateTag(lease.state)],
    ["deltas", (lease) => lease.deltas],
  ]; // prettier-ignore
  return [
    back,
    h("div", { class: "title", key: "title" },
      h("h1", {}, name(worker.name), " ", stateTag(worker.state)),
      h("p", { class: "lead" }, where)),
    card("Why is it waiting?", h("div", { class: "why" }, whyWaiting(known, info, worker, held, rows, reads).map((line) => h("div", {}, line)))),
    card("Reads from", table(readColumns("source", "source"), reads, (lease) => lease.lease, "It reads from no worker now.")),
    card("Is read by", longTable(known, "serves", readColumns("reader", "reader"), serves, (lease) => lease.lease, "No worker reads from it now.")),
    card("Holds", table([
      ["version", ({ replica }) => String(replica.version), "number"],
      ["state", ({ replica, shard }) => stateTag(shard.state === "complete" ? replica.state : shard.state)],
      ["rank", ({ shard }) => String(shard.rank), "number"],
      ["chunks", ({ shard }) => `${whole(shard.chunks_verified)} of ${whole(shard.chunks)}`, "number"],
      ["readers", ({ shard }) => whole(shard.readers), "number"],
      ["memory", ({ replica }) => (replica.purpose === "use" ? replica.medium : `${replica.medium}, ${replica.purpose}`)],
      ["group", ({ replica }) => name(replica.group)],
    ], held, ({ replica, shard }) => `${replica.replica}/${shard.rank}`, "It holds no version.")),
    timelineCard(known, info, rows, "What it did"),
    card("Last updates", table(UPDATE_COLUMNS(known, info.model), rows.slice(0, 32), rowKey, "No update of it has ended yet.")),
    card("Events", events.length ? eventRows(known, events.slice(-30).reverse()) : h("p", { class: "none" }, "None.")),
    card("Reached at", table([
      ["transport", (end) => end.transport],
      ["address", (end) => name(end.address)],
    ], worker.endpoints, null, "It serves nobody.")),
  ]; // prettier-ignore
}

/** What the worker's call waits for, as far as the coordinator knows it: lines, the reason first. */
function whyWaiting(known, info, worker, held, rows, reads) {
  const lines = [];
  const silent = info.summary?.silent.find((each) => each.incarnation === worker.incarnation);
  if (worker.state === "suspect")
    lines.push(h("strong", {}, `The coordinator has not heard it${silent ? ` for ${inSeconds(silent.silent_s)}` : ""}: its process is busy or gone, or the network is cut.`));
  const running = rows.find((row) => row.outcome === "running");
  const calls = info.summary?.calls ?? [];
  const groups = new Set(held.map(({ replica }) => replica.group));
  const named = calls.find((each) => groups.has(each.who) || each.who === worker.name);
  const filling = held.find(({ replica }) => replica.state === "filling");
  if (running) {
    const version = running.version === null ? "" : ` of version ${running.version}`;
    const part = known.explanation?.parts.at(-1); // of what it does now
    const meaning = part && Object.hasOwn(PARTS, part.name) ? `: now ${PARTS[part.name][1]}` : "";
    lines.push(h("strong", {}, `Its ${running.call}${version} has run for ${inSeconds(running.seconds)}${meaning}`, part?.peer ? [" (", name(part.peer), ")"] : null, "."));
    if (known.explanation) lines.push([pathPicture(known.explanation), h("bdi", {}, known.explanation.sentence)]);
  }
  if (named)
    lines.push(`Of the calls that wait for ${WAITS[named.waits_for] ?? named.waits_for}, its ${named.call} has been the longest without progress: ${inSeconds(named.longest_s)}.`);
  if (reads.length)
    lines.push([`It reads version ${reads[0].version} from `, [...new Set(reads.map((lease) => lease.source))].map((source, index) => [index ? ", " : "", workerLink(info.model, source)]), "."]);
  if (filling)
    lines.push(`It has ${whole(filling.shard.chunks_verified)} of ${whole(filling.shard.chunks)} chunks of version ${filling.replica.version}${reads.length ? "" : ", and no source at the moment"}.`);
  if (lines.length === 0) {
    lines.push(h("strong", {}, "No call of it is under way: it generates, trains or rests."));
    const last = rows[0];
    if (last)
      lines.push(`Its last ${last.call} ended ${ago(known.now() - (last.ended_at ?? known.now()))} and took ${inSeconds(last.seconds)}.`);
    if (last?.sentence) lines.push(h("bdi", {}, last.sentence));
  } else if (calls.length && !named && !running) {
    const [first] = calls;
    lines.push(`In this model, ${callsOf(first)} wait for ${WAITS[first.waits_for] ?? first.waits_for}.`);
  }
  return lines;
} // prettier-ignore
