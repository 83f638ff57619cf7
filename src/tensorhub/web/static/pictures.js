// Pictures: who reads from whom, what each group did when, where one update's seconds went.
"use strict";

const DRAWN_MAX = 64; // workers or groups that are drawn one by one

// -------------------------------------------------------------------------------------------------
// the transfer tree: its facts

/**
 * Who holds or reads `version`, and from whom. `past`: the source that a reader was last seen with,
 * by its name. A node: {id, workers, site, state, done, total, parents, depth}.
 */
function treeOf(info, version, past) {
  const sites = new Map(info.workers.map((each) => [each.name, each.location.site]));
  const suspect = new Set(
    info.workers.filter((each) => each.state === "suspect").map((each) => each.name),
  );
  const found = new Map();
  const at = (worker) => {
    if (!found.has(worker))
      found.set(worker, {
        id: worker,
        group: "",
        workers: 1,
        site: sites.get(worker) ?? "default",
        state: suspect.has(worker) ? "suspect" : "filling",
        done: 0,
        total: 0,
        parents: new Map(), // a source, and whether it is read now
      });
    return found.get(worker);
  };
  for (const replica of info.replicas) {
    if (replica.version !== version || replica.medium !== "device") continue;
    for (const shard of replica.shards) {
      const node = at(shard.worker);
      node.group = replica.group;
      node.done += shard.chunks_verified;
      node.total += shard.chunks;
      if (node.state === "suspect") continue;
      node.state = ["doubtful", "quarantined"].includes(shard.state) ? shard.state : replica.state;
    }
  }
  for (const lease of info.leases) {
    if (lease.version !== version) continue;
    at(lease.source);
    at(lease.reader).parents.set(lease.source, true);
  }
  for (const node of found.values()) {
    const source = past.get(node.id);
    if (node.parents.size === 0 && source !== undefined && source !== node.id && found.has(source))
      node.parents.set(source, false);
  }
  return withDepths([...found.values()]);
}

const LEVELS = ["holders", "readers", "their readers", "further readers"];

/** Nodes of many workers: of each group, or, if there are too many groups, of a site and level. */
function gathered(nodes) {
  const byGroup = new Set(nodes.map((node) => node.group || node.id)).size <= DRAWN_MAX;
  const idOf = (node) =>
    byGroup
      ? node.group || node.id
      : `${node.site}: ${LEVELS[Math.min(node.depth, LEVELS.length - 1)]}`;
  const ids = new Map(nodes.map((node) => [node.id, idOf(node)]));
  const made = new Map();
  for (const node of nodes) {
    const id = ids.get(node.id);
    if (!made.has(id))
      made.set(id, {
        ...node,
        id,
        workers: 0,
        done: 0,
        total: 0,
        parents: new Map(),
        states: new Map(),
      });
    const one = made.get(id);
    one.workers += 1;
    one.done += node.done;
    one.total += node.total;
    one.states.set(node.state, 1 + (one.states.get(node.state) ?? 0));
    for (const [source, live] of node.parents) {
      const parent = ids.get(source);
      if (parent !== id) one.parents.set(parent, live || one.parents.get(parent) || false);
    }
  }
  for (const one of made.values())
    one.state = [...one.states].sort(([, some], [, other]) => other - some)[0][0];
  return withDepths([...made.values()]);
}

function withDepths(nodes) {
  const known = new Map(nodes.map((node) => [node.id, node]));
  const depthOf = (node, above) => {
    if (node.depth !== undefined) return node.depth;
    if (above.has(node.id)) return 0; // readers of each other: of two versions of the facts
    above.add(node.id);
    const parents = [...node.parents.keys()].map((id) => known.get(id)).filter(Boolean);
    node.depth = parents.length
      ? 1 + Math.min(...parents.map((parent) => depthOf(parent, above)))
      : 0;
    return node.depth;
  };
  for (const node of nodes) delete node.depth;
  for (const node of nodes) depthOf(node, new Set());
  return nodes;
}

// -------------------------------------------------------------------------------------------------
// the transfer tree: its places

const NODE = { width: 168, least: 74, height: 46, gapX: 44, gapY: 10, pad: 14, head: 30 };

const ROWS_MOST = 12; // in one column of a site, while there is room beside it

/** Sites above one another; within a site a reader stands right of its source. */
function placed(nodes, width) {
  const depths = 1 + Math.max(0, ...nodes.map((node) => node.depth));
  const room = Math.max(240, width - 2 * NODE.pad);
  const gapLeast = room < 480 ? 16 : NODE.gapX;
  const most = Math.max(depths, Math.floor((room + NODE.gapX) / (NODE.width + NODE.gapX)));
  const sites = [...new Set(nodes.map((node) => node.site))];
  const first = (site) =>
    Math.min(...nodes.filter((node) => node.site === site).map((node) => node.depth));
  sites.sort((some, other) => first(some) - first(other) || some.localeCompare(other));
  const cell = (site, depth) =>
    nodes
      .filter((node) => node.site === site && node.depth === depth)
      .sort((some, other) => some.id.localeCompare(other.id, "en", { numeric: true }));
  // the depth with the longest column gets another one, as long as there is room
  const columns = Array(depths).fill(1);
  const longest = (depth) =>
    Math.max(...sites.map((site) => cell(site, depth).length)) / columns[depth];
  for (let used = depths; used < most; used++) {
    const order = columns.map((_, depth) => depth).sort((a, b) => longest(b) - longest(a));
    if (longest(order[0]) <= ROWS_MOST) break;
    columns[order[0]] += 1;
  }
  const all = columns.reduce((sum, each) => sum + each, 0);
  const fitting = (room - (all - 1) * gapLeast) / all;
  const nodeWidth = Math.max(NODE.least, Math.min(NODE.width * 1.25, fitting));
  const gapX = Math.max(
    16,
    Math.min(NODE.gapX * 2, (room - all * nodeWidth) / Math.max(1, all - 1)),
  );
  const leftOf = (column) => NODE.pad + column * (nodeWidth + gapX);
  let top = 0;
  const boxes = [];
  for (const site of sites) {
    let rowsMost = 0;
    let column = 0;
    for (let depth = 0; depth < depths; depth++) {
      const here = cell(site, depth);
      const rows = Math.ceil(here.length / columns[depth]);
      here.forEach((node, index) => {
        node.x = leftOf(column + Math.floor(index / rows));
        node.y = top + NODE.head + (index % rows) * (NODE.height + NODE.gapY);
      });
      rowsMost = Math.max(rowsMost, rows);
      column += columns[depth];
    }
    const height = NODE.head + rowsMost * (NODE.height + NODE.gapY) - NODE.gapY + NODE.pad;
    boxes.push({ site, top, height });
    top += height + 16;
  }
  return {
    boxes,
    nodeWidth,
    width: Math.max(width, leftOf(all - 1) + nodeWidth + NODE.pad),
    height: Math.max(0, top - 16),
  };
}

function edgePath(from, to, nodeWidth) {
  const [x1, y1] = [from.x + nodeWidth, from.y + NODE.height / 2];
  const [x2, y2] = [to.x, to.y + NODE.height / 2];
  const bend = Math.max(18, Math.abs(x2 - x1) / 2);
  return `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
}

/** The picture. `rates`: bytes/s by node; `link`: where a node leads. */
function treePicture(nodes, width, rates, link) {
  if (nodes.length === 0) return h("p", { class: "none" }, "No worker holds this version.");
  const places = placed(nodes, width);
  const known = new Map(nodes.map((node) => [node.id, node]));
  const edges = nodes.flatMap((node) =>
    [...node.parents].map(([id, live]) => ({ from: known.get(id), to: node, live })),
  );
  edges.sort((some, other) => some.live - other.live);
  const drawn = edges
    .filter((edge) => edge.from)
    .map(({ from, to, live }) =>
      h("path", {
        key: `${from.id}\n${to.id}`,
        d: edgePath(from, to, places.nodeWidth),
        class: `edge ${live ? "live" : "past"} ${from.site === to.site ? "" : "between"}`,
      }),
    );
  const borders = places.boxes.map((box) =>
    h("rect", {
      class: "site",
      x: 0.5,
      y: box.top + 0.5,
      width: places.width - 1,
      height: box.height - 1,
      rx: 10,
    }),
  );
  const titles = places.boxes.map((box) =>
    h("div", { class: "site-name", style: { top: `${box.top + 7}px` } }, "site ", name(box.site)),
  );
  const size = { width: `${places.width}px`, height: `${places.height}px` };
  return h(
    "div",
    { class: "tree-scroll", tabindex: places.width > width ? "0" : null },
    h(
      "div",
      { class: "tree", style: size },
      h(
        "svg",
        { width: places.width, height: places.height, "aria-hidden": "true" },
        borders,
        drawn,
      ),
      titles,
      nodes.map((node) => nodeCard(node, places.nodeWidth, rates.get(node.id), link(node))),
    ),
  );
}

/** Show the reads of one node only, or all again. */
function light(target, id) {
  const tree = target.closest(".tree");
  tree.toggleAttribute("data-lit", id !== null);
  for (const edge of tree.querySelectorAll(".edge"))
    edge.toggleAttribute("data-lit", edge.vkey.split("\n").includes(id));
}

function nodeCard(node, width, rate, href) {
  const lit = (event) => light(event.currentTarget, node.id);
  const unlit = (event) => light(event.currentTarget, null);
  const share = node.total ? node.done / node.total : node.state === "ready" ? 1 : 0;
  const reads = [...node.parents].filter(([, live]) => live).map(([id]) => id);
  const progress = `${percent(share)}${rate > 1000 ? ` · ${inBytes(rate)}/s` : ""}`;
  const state =
    node.state === "filling" ? progress : node.state === "suspect" ? "not heard" : node.state;
  const silent = node.states?.get("suspect");
  const text = node.states
    ? `${counted(node.workers, "worker")} · ${share < 1 ? progress : state}${silent ? ` · ${silent} not heard` : ""}`
    : state;
  const from = reads.length ? `, reads from ${reads.join(", ")}` : "";
  return h(
    href ? "a" : "div",
    {
      key: node.id,
      class: `node ${node.state}`,
      href,
      title: `${node.id}: ${node.state}, ${node.done} of ${node.total} chunks${from}`,
      style: { left: `${node.x}px`, top: `${node.y}px`, width: `${width}px` },
      onmouseenter: lit,
      onmouseleave: unlit,
      onfocus: lit,
      onblur: unlit,
    },
    h("span", { class: "node-name" }, name(shortened(node.id, Math.floor((width - 14) / 7)))),
    h("span", { class: "node-state" }, text),
    h("span", { class: "node-bar" }, h("span", { style: { width: `${share * 100}%` } })),
  );
}

// -------------------------------------------------------------------------------------------------
// timelines

const LANES_MAX = 32;
const TICKS = { 60: 6, 300: 5, 1800: 6, 7200: 4, 86400: 6 }; // by the seconds that are shown

/**
 * Lanes of rows [from, to] in seconds: each group's updates with their phases, and generation
 * between them. `rows`: as of `/updates`.
 */
function timelinePicture(rows, from, to, link) {
  const lanes = new Map();
  for (const row of rows) {
    if (!lanes.has(row.group)) lanes.set(row.group, []);
    lanes.get(row.group).push(row);
  }
  const slowest = (its) => Math.max(...its.slice(0, 3).map((row) => row.seconds));
  const many = lanes.size > LANES_MAX;
  let shownLanes = [...lanes];
  if (many) {
    shownLanes.sort(([, some], [, other]) => slowest(other) - slowest(some));
    shownLanes = shownLanes.slice(0, LANES_MAX);
  }
  shownLanes.sort(([some], [other]) => some.localeCompare(other, "en", { numeric: true }));
  const steps = TICKS[to - from] ?? 4;
  const ticks = Array.from({ length: steps + 1 }, (_, step) =>
    h("span", {}, step === steps ? "now" : `−${inSeconds((to - from) * (1 - step / steps))}`),
  );
  return h(
    "div",
    { class: "timeline" },
    many
      ? h("p", { class: "none" }, `the ${LANES_MAX} slowest of ${whole(lanes.size)} groups`)
      : null,
    shownLanes.map(([group, its]) =>
      h(
        "div",
        { class: "lane", key: group },
        h("div", { class: "lane-name", title: group }, name(group)),
        h("div", { class: "lane-bars" }, laneBars(its, from, to, link)),
      ),
    ),
    h("div", { class: "ticks", "aria-hidden": "true" }, ticks),
  );
}

function laneBars(rows, from, to, link) {
  const span = to - from;
  const left = (at) => `${(((Math.max(at, from) - from) / span) * 100).toFixed(3)}%`;
  const wide = (start, end) =>
    `${((Math.max(0, Math.min(end, to) - Math.max(start, from)) / span) * 100).toFixed(3)}%`;
  const bars = [];
  let free = null; // since when the group generates
  const inOrder = [...rows].sort((some, other) => some.began_at - other.began_at);
  const generates = (start, end) => {
    if (start !== null && end > start && end > from)
      bars.push(
        h("span", {
          class: "bar phase-generate",
          title: `generate: ${inSeconds(end - start)}`,
          style: { left: left(start), width: wide(start, end) },
        }),
      );
  };
  for (const row of inOrder) {
    const end = row.ended_at ?? to;
    generates(free, row.began_at);
    free = row.ended_at;
    if (end < from) continue;
    const phases = row.phases.length ? row.phases : [["running", row.seconds]];
    const sum = phases.reduce((total, [, seconds]) => total + seconds, 0) || 1;
    const spoken = phases.map(([phase, seconds]) => `${phase} ${inSeconds(seconds)}`).join(", ");
    const what = `${row.call} of version ${row.version ?? "?"}, ${row.outcome}: ${inSeconds(row.seconds)} (${spoken})`;
    bars.push(
      h(
        link(row) ? "a" : "span",
        {
          class: `bar update ${row.outcome === "committed" ? "" : row.outcome === "running" ? "runs" : "failed"}`,
          href: link(row),
          title: what,
          "aria-label": what,
          style: { left: left(row.began_at), width: wide(row.began_at, end) },
        },
        phases.map(([phase, seconds]) =>
          h("span", {
            class: `phase-${phaseKind(phase)}`,
            style: { flex: `${seconds / sum} 0 0px` },
          }),
        ),
      ),
    );
  }
  generates(free, to);
  return bars;
}

function phaseKind(phase) {
  return Object.hasOwn(PHASES, phase) ? PHASES[phase] : "running";
}

function legend(names, prefix, words) {
  return h(
    "ul",
    { class: "legend" },
    names.map((each) =>
      h("li", {}, h("span", { class: `swatch ${prefix}-${each}` }), words[each] ?? each),
    ),
  );
}

// -------------------------------------------------------------------------------------------------
// bars and lines

const PART_LEAST = 0.004; // of the whole: less is not drawn

/** The critical path of an explanation, part by part. */
function pathPicture(explanation) {
  const all = explanation.seconds || 1;
  return h(
    "ol",
    { class: "path", "aria-label": "critical path" },
    explanation.parts
      .filter((part) => part.seconds >= PART_LEAST * all)
      .map((part) => {
        const share = part.seconds / all;
        const text = `${part.name} ${inSeconds(part.seconds)}`;
        return h(
          "li",
          {
            class: `kind-${kindOf(part.name)}`,
            style: { flex: `${share} 0 0px` },
            title: `${text}${part.text ? `: ${part.text}` : ""}`,
          },
          share > 0.11 ? h("span", {}, text) : null,
        );
      }),
  );
}

function kindOf(part) {
  return Object.hasOwn(PARTS, part) ? PARTS[part][0] : "rest";
}

/** Shares of a whole with their numbers: [[class, count, word], ...]. */
function sharesPicture(shares) {
  const there = shares.filter(([, count]) => count > 0);
  if (there.length === 0) return h("span", { class: "faint" }, "none");
  return h(
    "span",
    { class: "shares" },
    h(
      "span",
      { class: "shares-bar", "aria-hidden": "true" },
      there.map(([kind, count]) =>
        h("span", { class: `state-${kind}`, style: { flex: `${count} 0 3px` } }),
      ),
    ),
    h(
      "span",
      { class: "shares-text" },
      there.map(([, count, word]) => `${whole(count)} ${word}`).join(", "),
    ),
  );
}

function sparkPicture(values) {
  if (values.length < 2) return null;
  const most = Math.max(...values) || 1;
  const points = values.map(
    (value, index) =>
      `${((index / (values.length - 1)) * 100).toFixed(1)},${(30 - (value / most) * 28).toFixed(1)}`,
  );
  return h(
    "svg",
    { class: "spark", viewBox: "0 0 100 32", preserveAspectRatio: "none", "aria-hidden": "true" },
    h("polyline", { points: points.join(" ") }),
  );
}
