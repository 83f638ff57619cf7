// One model: who reads from whom, what each group did, versions, updates and workers.
"use strict";

function modelView(known, place) {
  const rowsCome = !known.models.has(place.model); // until then the summary's counts are shown
  const info = known.models.get(place.model) ?? known.told(place.model);
  if (!info) return nothing(known, "model", place.model);
  const rows = known.updates.get(place.model) ?? [];
  const newest = newestOf(info);
  const age = newest && ageOf(known, info.model, newest.version);
  return [
    h(
      "div",
      { class: "title", key: "title" },
      h("h1", {}, name(info.model)),
      h(
        "p",
        { class: "lead" },
        newest
          ? [
              `version ${newest.version}`,
              age === null ? "" : `, ${age} old`,
              `, ${inBytes(newest.nbytes)} in ${counted(newest.world_size, "shard")}`,
            ]
          : "nothing published yet",
        ` · lineage ${info.lineage} · retains ${info.retain}`,
      ),
      sharesPicture(sharesOf(info)),
    ),
    callsCard(info),
    rowsCome
      ? card("Who reads from whom", h("p", { class: "none" }, "Asking the coordinator …"))
      : treeCard(known, info),
    timelineCard(known, info, rows),
    card("Versions", versionsTable(known, info)),
    card(
      "Updates",
      longTable(
        known,
        "updates",
        UPDATE_COLUMNS(known, info.model),
        newestFirst(rows),
        rowKey,
        "No update has ended yet.",
      ),
    ),
    card(
      `Workers (${workersOf(info)})`,
      longTable(
        known,
        "workers",
        WORKER_COLUMNS(info),
        byName(info.workers),
        (each) => each.incarnation,
      ),
    ),
  ];
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
  return [...workers].sort((some, other) =>
    some.name.localeCompare(other.name, "en", { numeric: true }),
  );
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
  return card(
    "Calls under way",
    table(
      [
        ["calls", callsOf],
        [
          "waits for",
          (each) => [h("strong", {}, each.waits_for), ": ", WAITS[each.waits_for] ?? ""],
        ],
        ["longest without progress", (each) => inSeconds(each.longest_s), "number"],
        ["of", (each) => (each.who ? name(each.who) : "–")],
      ],
      calls,
    ),
  );
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
  const choices = [...new Map(info.versions.map((each) => [String(each.version), each])).values()]
    .slice(-12)
    .reverse();
  const live = drawn.some((node) => [...node.parents.values()].includes(true));
  return card(
    "Who reads from whom",
    h(
      "div",
      { class: "toolbar" },
      h(
        "label",
        {},
        "version ",
        h(
          "select",
          { onchange: (event) => known.choose(info.model, event.target.value) },
          choices.map((each) =>
            h(
              "option",
              {
                key: String(each.version),
                value: String(each.version),
                selected: each === version,
              },
              `${each.version}${each === newest ? " (newest)" : ""}${read.has(String(each.version)) ? ", being read" : ""}`,
            ),
          ),
        ),
      ),
      h(
        "span",
        { class: "faint" },
        many ? `${whole(nodes.length)} workers, gathered` : counted(nodes.length, "worker"),
        others ? `; ${counted(others, "other")} without it` : "",
        live ? "" : "; no read is running",
      ),
    ),
    // of each version anew: no progress goes back
    h(
      "div",
      { key: `tree ${version.version}` },
      treePicture(drawn, known.width, known.ratesOf(info.model, version.version), (node) =>
        node.states ? null : to("model", info.model, "worker", node.id),
      ),
    ),
    h(
      "ul",
      { class: "legend" },
      h("li", {}, h("span", { class: "line live" }), "is read now"),
      h("li", {}, h("span", { class: "line past" }), "was read from"),
      h("li", {}, h("span", { class: "line between" }), "between sites"),
    ),
  );
}

const WINDOWS = [60, 300, 1800, 7200, 86_400];

function timelineCard(known, info, rows, title = "What each group did") {
  if (rows.length === 0) return null;
  const now = known.now();
  const groups = new Set(rows.map((row) => row.group)).size;
  const inWindow = (span) => rows.filter((row) => (row.ended_at ?? now) > now - span).length;
  const span =
    known.span ??
    WINDOWS.find((each) => inWindow(each) >= Math.min(rows.length, groups)) ??
    WINDOWS.at(-1);
  return card(
    title,
    h(
      "div",
      { class: "toolbar", role: "group", "aria-label": "time shown" },
      WINDOWS.map((each) =>
        h(
          "button",
          {
            type: "button",
            "aria-pressed": String(each === span),
            onclick: () => known.setSpan(each),
          },
          inSeconds(each),
        ),
      ),
    ),
    timelinePicture(rows, now - span, now, (row) =>
      row.version === null ? null : to("model", info.model, "update", row.version, row.group),
    ),
    legend(Object.keys(PHASE_KINDS), "phase", PHASE_KINDS),
  );
}

function versionsTable(known, info) {
  const rows = [...info.versions].sort(
    (some, other) => other.lineage - some.lineage || other.version - some.version,
  );
  const number = (field) => (each) => (each.summary ? whole(each.summary[field]) : "–");
  return longTable(
    known,
    "versions",
    [
      ["version", (each) => h("strong", {}, String(each.version))],
      ["state", (each) => stateTag(each.state)],
      [
        "age",
        (each) => ageOf(known, info.model, each.version) ?? "–",
        "number",
      ],
      [
        "replicas",
        (each) =>
          each.summary
            ? sharesPicture(STATES.map((state) => [state, each.summary[state], state]))
            : "–",
      ],
      ["copies", number("copies"), "number"],
      ["readers", number("readers"), "number"],
      ["kept", (each) => (each.retained ? "yes" : "no")],
      ["lineage", (each) => String(each.lineage), "number"],
    ],
    rows,
    (each) => `${each.lineage}/${each.version}`,
    "Nothing published yet.",
  );
}

const UPDATE_COLUMNS = (known, model) => [
  ["when", (row) => (row.ended_at === null ? "now" : ago(known.now() - row.ended_at))],
  ["group", (row) => name(row.group)],
  [
    "call",
    (row) => {
      const text = `${row.call} ${row.version ?? ""}`;
      return row.version === null
        ? text
        : h("a", { href: to("model", model, "update", row.version, row.group) }, text);
    },
  ],
  ["outcome", (row) => stateTag(row.outcome)],
  ["took", (row) => inSeconds(row.seconds), "number"],
  ["phases", (row) => phaseBar(row)],
  ["why", (row) => (row.sentence ? h("bdi", {}, row.sentence) : row.longest || "–"), "wide"],
];

function phaseBar(row) {
  if (row.phases.length === 0) return h("span", { class: "faint" }, "–");
  const text = row.phases.map(([phase, seconds]) => `${phase} ${inSeconds(seconds)}`).join(", ");
  const sum = row.phases.reduce((total, [, seconds]) => total + seconds, 0) || 1;
  return h(
    "span",
    { class: "mini", title: text, role: "img", "aria-label": text },
    row.phases.map(([phase, seconds]) =>
      h("span", { class: `phase-${phaseKind(phase)}`, style: { flex: `${seconds / sum} 0 0px` } }),
    ),
  );
}

const WORKER_COLUMNS = (info) => [
  ["worker", (each) => workerLink(info.model, each.name)],
  ["state", (each) => stateTag(each.state)],
  ["site", (each) => name(each.location.site)],
  ["host", (each) => name(each.location.host)],
  ["reached by", (each) => each.endpoints.map((end) => end.transport).join(", ") || "–"],
];
