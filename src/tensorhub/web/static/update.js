// One update: where its time went, and what would help.
"use strict";

function updateView(known, place) {
  const found = known.explanation;
  const back = h(
    "p",
    { class: "back", key: "back" },
    h("a", { href: to("model", place.model) }, "‹ ", name(place.model)),
  );
  if (!found) {
    return [
      back,
      ...nothing(known, "explanation of version " + place.version + " in the group", place.group),
    ];
  }
  const rate = found.seconds ? ` · ${inBytes(found.nbytes / found.seconds)}/s` : "";
  return [
    back,
    h(
      "div",
      { class: "title", key: "title" },
      h("h1", {}, `${found.call} of version ${found.version}, `, name(found.group)),
      h("p", { class: "sentence" }, h("bdi", {}, found.sentence)),
      h(
        "p",
        { class: "lead" },
        `ended ${ago(known.now() - found.ended_at)} (${clock(found.ended_at)}) · took ${inSeconds(found.seconds)} · ${inBytes(found.nbytes)}${rate}`,
      ),
    ),
    partsCard(known, place.model, found),
    found.help.length
      ? card(
          "What would help",
          h(
            "ul",
            { class: "help" },
            found.help.map((each) => h("li", {}, h("bdi", {}, each))),
          ),
        )
      : null,
    card(
      "Sources",
      table(
        LINK_COLUMNS(place.model),
        found.links,
        (each) => each.lease,
        "No bytes came from a source.",
      ),
    ),
  ];
}

function partsCard(known, model, found) {
  const isSmall = (part) => part.seconds < PART_LEAST * found.seconds;
  const [large, small] = [
    found.parts.filter((part) => !isSmall(part)),
    found.parts.filter(isSmall),
  ];
  return card(
    "Where the time went",
    pathPicture(found),
    legend(
      Object.keys(KINDS).filter((kind) => found.parts.some((part) => kindOf(part.name) === kind)),
      "kind",
      KINDS,
    ),
    table(PART_COLUMNS(model, found.seconds), known.unfolded.has("parts") ? found.parts : large),
    small.length && !known.unfolded.has("parts")
      ? h(
          "button",
          { type: "button", class: "more", onclick: () => known.unfold("parts") },
          `show ${counted(small.length, "part")} of less than ${percent(PART_LEAST)} each, ${inSeconds(small.reduce((sum, part) => sum + part.seconds, 0))} together`,
        )
      : null,
    h(
      "p",
      { class: "faint" },
      `The parts add up to ${inSeconds(found.parts.reduce((sum, part) => sum + part.seconds, 0))} of ${inSeconds(found.seconds)}. Between machines a part may be off by ${inSeconds(found.unsure_s)}: the messages' own time.`,
    ),
  );
}

const PART_COLUMNS = (model, all) => [
  [
    "part",
    (part) => [
      h("span", { class: `swatch kind-${kindOf(part.name)}` }),
      " ",
      h("strong", {}, part.name),
    ],
  ],
  ["seconds", (part) => inSeconds(part.seconds), "number"],
  ["share", (part) => percent(all ? part.seconds / all : 0), "number"],
  ["on", (part) => (part.worker ? workerLink(model, part.worker) : "–")],
  ["for", (part) => (part.peer ? workerLink(model, part.peer) : "–")],
  [
    "what",
    (part) => [
      part.text ? [h("bdi", {}, part.text), h("br")] : null,
      h("span", { class: "faint" }, Object.hasOwn(PARTS, part.name) ? PARTS[part.name][1] : ""),
    ],
    "wide",
  ],
];

const LINK_COLUMNS = (model) => [
  [
    "source",
    (each) => [workerLink(model, each.source), each.site ? [" in ", name(each.site)] : null],
  ],
  ["by", (each) => `${each.transport}${each.kind === "live" ? "" : `, ${each.kind}`}`],
  ["bytes", (each) => inBytes(each.nbytes), "number"],
  ["while", (each) => inSeconds(each.seconds), "number"],
  ["rate", (each) => (each.seconds ? `${inBytes(each.nbytes / each.seconds)}/s` : "–"), "number"],
  [
    "the reader's seconds",
    (each) =>
      LANE_PARTS.filter(([field]) => each[field] > 0)
        .map(([field, text]) => `${text} ${inSeconds(each[field])}`)
        .join(", ") || "–",
    "wide",
  ],
];

const LANE_PARTS = [
  ["link_s", "waiting for bytes"],
  ["empty_s", "source had none yet"],
  ["cpu_s", "CPU"],
  ["delay_s", "no core free"],
  ["gil_s", "GIL"],
  ["digest_s", "digests"],
  ["codec_s", "deltas"],
];
