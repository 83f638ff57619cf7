// What several pages share: places, cards, tables, tags and events. Functions from what is known
// (`known`, see app.js) to elements.
"use strict";

const ROWS_SHOWN = 12; // of a table, before "show all"

// -------------------------------------------------------------------------------------------------
// places: #/, #/model/M, #/model/M/worker/W, #/model/M/update/V/G

function to(...parts) {
  return "#/" + parts.map((part) => encodeURIComponent(part)).join("/");
}

function placeOf(hash) {
  try {
    const [kind, model, inner, ...rest] = hash
      .replace(/^#\/?/, "")
      .split("/")
      .map(decodeURIComponent);
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
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        columns.map(([title, , kind]) => h("th", { class: kind, scope: "col" }, title)),
      ),
    ),
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
      ? h(
          "button",
          { type: "button", class: "more", onclick: () => known.unfold(key) },
          `show all ${whole(rows.length)}`,
        )
      : null,
  ];
}

function tag(kind, text) {
  return h("span", { class: `tag ${kind}` }, text);
}

const STATE_KIND = {
  live: "good",
  ready: "good",
  complete: "good",
  available: "good",
  committed: "good",
  filling: "info",
  running: "info",
  staged: "info",
  active: "info",
  draining: "warn",
  suspect: "warn",
  doubtful: "warn",
  fencing: "warn",
  unavailable: "warn",
};

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
        tag(
          Object.hasOwn(EVENTS, event.kind) ? EVENTS[event.kind] : "plain",
          event.kind.replace("_", " "),
        ),
        h("span", { class: "event-text" }, aboutEvent(event)),
      ),
    ),
  );
}

/** Of whom, of which version, and what was said of it. */
function aboutEvent(event) {
  let version = event.version === null ? "" : ` version ${event.version}`;
  if (version && event.kind === "updated" && event.worker)
    version = [
      " ",
      h(
        "a",
        { href: to("model", event.model, "update", event.version, event.worker) },
        version.trim(),
      ),
    ];
  const model = event.model && [
    h("a", { href: to("model", event.model) }, name(event.model)),
    version,
  ];
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

/** How long ago a version of a model was published, for people; null: not known. */
function ageOf(known, model, version) {
  const info = known.told(model);
  if (info && String(info.mark) === String(version) && typeof info.age_s === "number")
    return `${info.age_is_least ? "> " : ""}${inSeconds(info.age_s)}`;
  const at = known.publishedAt.get(model)?.get(String(version));
  return at === undefined ? null : inSeconds(Math.max(0, known.now() - at));
}
