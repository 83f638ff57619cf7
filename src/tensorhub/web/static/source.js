// Where the figures come from: a coordinator's HTTP endpoints, or the document that `tensorhub
// report` has put into this page.
"use strict";

const TOKEN = "tensorhub-token"; // of this tab only: sessionStorage
const EVENTS_KEPT = 1024;
const ANSWER_S = 10;
const PAGES_MAX = 64;

class Refused extends Error {}
class Late extends Error {}

/** JSON in which integers that a double cannot hold stay whole, as text. */
function parsed(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text);
  return JSON.parse(text, (key, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^\d+$/.test(context?.source ?? "")
      ? context.source
      : value,
  );
}

function query(path, fields) {
  const given = Object.entries(fields).filter(([, value]) => value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** A coordinator. Each call raises Refused (a token is needed), Late (it is behind), or Error (it is away). */
class LiveSource {
  saved = false;
  leftOut = [];
  lastId = "";

  async ask(path, signal = AbortSignal.timeout(ANSWER_S * 1000), headers = {}) {
    const token = sessionStorage.getItem(TOKEN);
    if (token) headers.Authorization = `Bearer ${token}`;
    const answer = await fetch(path, { headers, signal, cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) throw new Refused();
    if (answer.status === 503) throw new Late();
    return answer;
  }

  /** The JSON of a path; null: there is no such thing. */
  async json(path) {
    const answer = await this.ask(path);
    if (answer.status === 404) return null;
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return parsed(await answer.text());
  }

  summary() {
    return this.json("summary");
  }

  /** A model's description, from as many pages as it has. */
  async model(model) {
    let whole = null;
    let next = {};
    for (let pages = 0; next && pages < PAGES_MAX; pages++) {
      const page = await this.json(query("models", { name: model, ...next }));
      if (page === null) break;
      whole = whole === null ? page.model : joined(whole, page.model);
      next = page.next;
    }
    return whole;
  }

  async updates(model) {
    return (await this.json(query("updates", { model })))?.updates ?? [];
  }

  explain(model, version, group) {
    return this.json(query("explain", { model, version, group }));
  }

  async metrics() {
    const answer = await this.ask("metrics");
    return answer.ok ? answer.text() : "";
  }

  /** Call `heard` with lists of events, those after `this.lastId`, until the stream ends or fails. */
  async events(heard) {
    const headers = this.lastId ? { "Last-Event-ID": this.lastId } : {};
    const answer = await this.ask("events", null, headers);
    if (!answer.ok) throw new Error(`events: ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      const told = [];
      for (const block of blocks) {
        const data = fieldOf(block, "data");
        if (data === null) continue; // a comment: the stream lives
        this.lastId = fieldOf(block, "id") ?? this.lastId;
        told.push(parsed(data));
      }
      if (told.length) heard(told);
    }
  }
}

/** A field of an event of a stream; null if it has none. */
function fieldOf(block, field) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith(`${field}:`));
  return lines.length
    ? lines.map((line) => line.slice(field.length + 1).trimStart()).join("\n")
    : null;
}

/** A run that was saved: the same calls, and answers that do not change. */
class SavedSource {
  saved = true;

  constructor(run) {
    this.run = run;
    this.leftOut = run.left_out;
  }

  async summary() {
    return this.run.summary;
  }

  async model(model) {
    return Object.hasOwn(this.run.models, model) ? this.run.models[model] : null;
  }

  async updates(model) {
    return Object.hasOwn(this.run.updates, model) ? this.run.updates[model] : [];
  }

  async explain(model, version, group) {
    return (
      this.run.explanations.find(
        (each) =>
          each.model === model &&
          String(each.version) === String(version) &&
          (!group || each.group === group),
      ) ?? null
    );
  }

  async metrics() {
    return "";
  }

  async events(heard) {
    heard(this.run.events);
  }
}

/** A row of `/updates`, with when it began, and without an end while it runs. */
function timed(row) {
  const runs = row.outcome === "running";
  return {
    ...row,
    group: row.key.group,
    began_at: row.ended_at - row.seconds,
    ended_at: runs ? null : row.ended_at,
  };
}

/** One description from two pages of it: a row that both have counts once. */
function joined(whole, page) {
  const both = (rows, more, id) => [
    ...new Map([...rows, ...more].map((row) => [id(row), row])).values(),
  ];
  const replicas = new Map(whole.replicas.map((each) => [each.replica, each]));
  for (const each of page.replicas) {
    const known = replicas.get(each.replica);
    const shards = known ? [...known.shards, ...each.shards] : each.shards;
    replicas.set(each.replica, { ...each, shards });
  }
  return {
    ...whole,
    versions: both(whole.versions, page.versions, (each) => `${each.lineage}/${each.version}`),
    replicas: [...replicas.values()],
    leases: both(whole.leases, page.leases, (each) => each.lease),
    workers: both(whole.workers, page.workers, (each) => each.incarnation),
  };
}

/** The samples of Prometheus' text form that have this name, as {labels, value}. */
function samples(text, wanted) {
  const found = [];
  for (const line of text.split("\n")) {
    if (!line.startsWith(wanted)) continue;
    const match = /^([a-zA-Z0-9_]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match || match[1] !== wanted) continue;
    const labels = {};
    for (const [, label, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g))
      labels[label] = value.replace(/\\(.)/g, (_, mark) => (mark === "n" ? "\n" : mark));
    found.push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** What this page shows. */
function openSource() {
  const saved = document.getElementById("run");
  return saved ? new SavedSource(parsed(saved.textContent)) : new LiveSource();
}
