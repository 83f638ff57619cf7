// One worker: why it waits, whom it reads from, what it holds and did.
"use strict";

function workerView(known, place) {
  const info = known.models.get(place.model);
  const back = h(
    "p",
    { class: "back", key: "back" },
    h("a", { href: to("model", place.model) }, "‹ ", name(place.model)),
  );
  const worker = info?.workers.find((each) => each.name === place.worker);
  if (!worker) return [back, ...nothing(known, "worker", place.worker)];
  const held = info.replicas.flatMap((replica) =>
    replica.shards
      .filter((shard) => shard.worker === worker.name)
      .map((shard) => ({ replica, shard })),
  );
  const groups = new Set(held.map(({ replica }) => replica.group));
  const all = known.updates.get(place.model) ?? [];
  const rows = newestFirst(
    all.filter((row) => groups.has(row.group) || row.worker === worker.name),
  );
  const reads = info.leases.filter((lease) => lease.reader === worker.name);
  const serves = info.leases.filter((lease) => lease.source === worker.name);
  const { location } = worker;
  const where = [location.site, location.rack, location.host]
    .filter(Boolean)
    .map((each, index) => [index ? " / " : "", name(each)]);
  const events = known.events.filter(
    (event) => event.worker === worker.name || groups.has(event.worker),
  );
  return [
    back,
    h(
      "div",
      { class: "title", key: "title" },
      h("h1", {}, name(worker.name), " ", stateTag(worker.state)),
      h("p", { class: "lead" }, where),
    ),
    card(
      "Why is it waiting?",
      h(
        "div",
        { class: "why" },
        whyWaiting(known, info, worker, held, rows, reads).map((line) => h("div", {}, line)),
      ),
    ),
    card(
      "Reads from",
      table(
        READ_COLUMNS(info.model, "source"),
        reads,
        (lease) => lease.lease,
        "It reads from no worker now.",
      ),
    ),
    card(
      "Is read by",
      longTable(
        known,
        "serves",
        READ_COLUMNS(info.model, "reader"),
        serves,
        (lease) => lease.lease,
        "No worker reads from it now.",
      ),
    ),
    card(
      "Holds",
      table(
        HELD_COLUMNS,
        held,
        ({ replica, shard }) => `${replica.replica}/${shard.rank}`,
        "It holds no version.",
      ),
    ),
    timelineCard(known, info, rows, "What it did"),
    card(
      "Last updates",
      table(
        UPDATE_COLUMNS(known, info.model),
        rows.slice(0, 32),
        rowKey,
        "No update of it has ended yet.",
      ),
    ),
    card(
      "Events",
      events.length
        ? eventRows(known, events.slice(-30).reverse())
        : h("p", { class: "none" }, "None."),
    ),
    card(
      "Reached at",
      table(
        [
          ["transport", (end) => end.transport],
          ["address", (end) => name(end.address)],
        ],
        worker.endpoints,
        null,
        "It serves nobody.",
      ),
    ),
  ];
}

/** Of reads, with the worker at their other end. */
const READ_COLUMNS = (model, other) => [
  [other, (lease) => workerLink(model, lease[other])],
  ["version", (lease) => String(lease.version), "number"],
  ["shard", (lease) => String(lease.rank), "number"],
  ["state", (lease) => stateTag(lease.state)],
  ["deltas", (lease) => lease.deltas],
];

const HELD_COLUMNS = [
  ["version", ({ replica }) => String(replica.version), "number"],
  [
    "state",
    ({ replica, shard }) => stateTag(shard.state === "complete" ? replica.state : shard.state),
  ],
  ["rank", ({ shard }) => String(shard.rank), "number"],
  ["chunks", ({ shard }) => `${whole(shard.chunks_verified)} of ${whole(shard.chunks)}`, "number"],
  ["readers", ({ shard }) => whole(shard.readers), "number"],
  [
    "memory",
    ({ replica }) =>
      replica.purpose === "use" ? replica.medium : `${replica.medium}, ${replica.purpose}`,
  ],
  ["group", ({ replica }) => name(replica.group)],
];

/** What the worker's call waits for, as far as the coordinator knows it: lines, the reason first. */
function whyWaiting(known, info, worker, held, rows, reads) {
  const lines = [];
  const silent = info.summary?.silent.find((each) => each.incarnation === worker.incarnation);
  if (worker.state === "suspect")
    lines.push(
      h(
        "strong",
        {},
        `The coordinator has not heard it${silent ? ` for ${inSeconds(silent.silent_s)}` : ""}: its process is busy or gone, or the network is cut.`,
      ),
    );
  const running = rows.find((row) => row.outcome === "running");
  const calls = info.summary?.calls ?? [];
  const groups = new Set(held.map(({ replica }) => replica.group));
  const named = calls.find((each) => groups.has(each.who) || each.who === worker.name);
  const filling = held.find(({ replica }) => replica.state === "filling");
  if (running) {
    const version = running.version === null ? "" : ` of version ${running.version}`;
    const part = known.explanation?.parts.at(-1); // of what it does now
    const meaning = part && Object.hasOwn(PARTS, part.name) ? `: now ${PARTS[part.name][1]}` : "";
    lines.push(
      h(
        "strong",
        {},
        `Its ${running.call}${version} has run for ${inSeconds(running.seconds)}${meaning}`,
        part?.peer ? [" (", name(part.peer), ")"] : null,
        ".",
      ),
    );
    if (known.explanation)
      lines.push([pathPicture(known.explanation), h("bdi", {}, known.explanation.sentence)]);
  }
  if (named)
    lines.push(
      `Of the calls that wait for ${WAITS[named.waits_for] ?? named.waits_for}, its ${named.call} has been the longest without progress: ${inSeconds(named.longest_s)}.`,
    );
  if (reads.length)
    lines.push([
      `It reads version ${reads[0].version} from `,
      [...new Set(reads.map((lease) => lease.source))].map((source, index) => [
        index ? ", " : "",
        workerLink(info.model, source),
      ]),
      ".",
    ]);
  if (filling)
    lines.push(
      `It has ${whole(filling.shard.chunks_verified)} of ${whole(filling.shard.chunks)} chunks of version ${filling.replica.version}${reads.length ? "" : ", and no source at the moment"}.`,
    );
  if (lines.length === 0) {
    lines.push(h("strong", {}, "No call of it is under way: it generates, trains or rests."));
    const last = rows[0];
    if (last)
      lines.push(
        `Its last ${last.call} ended ${ago(known.now() - (last.ended_at ?? known.now()))} and took ${inSeconds(last.seconds)}.`,
      );
    if (last?.sentence) lines.push(h("bdi", {}, last.sentence));
  } else if (calls.length && !named && !running) {
    const [first] = calls;
    lines.push(
      `In this model, ${callsOf(first)} wait for ${WAITS[first.waits_for] ?? first.waits_for}.`,
    );
  }
  return lines;
}
