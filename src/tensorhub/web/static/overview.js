// The overview: the coordinator, all models, and what has happened.
"use strict";

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
      tile(
        "workers",
        whole(workers),
        suspect ? `${whole(suspect)} not heard` : "all heard",
        suspect > 0 && "warn",
      ),
      tile(
        "reads now",
        whole(reads),
        rate === undefined ? "" : `${inBytes(rate)}/s`,
        "",
        sparkPicture(known.throughput),
      ),
      tile(
        "calls under way",
        whole(waiting),
        longest ? `longest without progress: ${inSeconds(longest)}` : "nothing waits",
        longest > 10 && "warn",
      ),
      tile(
        "coordinator",
        coordinator.state,
        coordinator.behind_s >= 0.1 ? `${inSeconds(coordinator.behind_s)} behind` : "in time",
        coordinator.behind_s >= 0.1 && "warn",
      ),
    ),
    card(
      "Models",
      table(MODEL_COLUMNS(known), models, (info) => info.model, "No model is registered yet."),
      coordinator.models > models.length
        ? h(
            "p",
            { class: "faint" },
            `and ${whole(coordinator.models - models.length)} more models, with older publications`,
          )
        : null,
    ),
    known.slices(),
    card(
      "Events",
      known.events.length
        ? eventRows(known, known.events.slice(-60).reverse())
        : h("p", { class: "none" }, "Nothing has happened yet."),
    ),
  ];
}

function tile(title, value, text, kind, picture) {
  return h(
    "div",
    { class: `tile ${kind || ""}`, key: title },
    h("div", { class: "tile-title" }, title),
    h("div", { class: "tile-value" }, value),
    h("div", { class: "tile-text" }, text),
    picture,
  );
}

const MODEL_COLUMNS = (known) => [
  ["model", (info) => h("a", { href: to("model", info.model), class: "strong" }, name(info.model))],
  [
    "newest",
    (info) =>
      info.mark === null
        ? h("span", { class: "faint" }, "nothing published")
        : `version ${info.mark}`,
  ],
  [
    "age",
    (info) => (info.mark === null ? "–" : (ageOf(known, info.model, info.mark) ?? "–")),
    "number",
  ],
  [
    "size",
    (info) => {
      const newest = newestOf(info);
      return newest ? inBytes(newest.nbytes) : "–";
    },
    "number",
  ],
  ["replicas", (info) => sharesPicture(sharesOf(info))],
  ["waits for", (info) => callWords(info.summary?.calls ?? [])],
];

function callWords(calls) {
  if (calls.length === 0) return h("span", { class: "faint" }, "nothing");
  const [first] = calls;
  const more = calls.length > 1 ? `, and ${calls.length - 1} more` : "";
  return `${callsOf(first)}: ${first.waits_for}, ${inSeconds(first.longest_s)}${more}`;
}

function callsOf({ count, call }) {
  return `${whole(count)} ${call}${count === 1 ? "" : /sh$|ch$/.test(call) ? "es" : "s"}`;
}
