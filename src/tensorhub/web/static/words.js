// The dashboard's vocabulary. A test compares it with what the library says.
"use strict";

/** Parts of a critical path: the kind of each (which is its colour), and what it means. */
const PARTS = {
  ranks: ["waits", "waiting for the group's last rank to call"],
  version: ["waits", "waiting for a version"],
  source: ["waits", "waiting for a worker to read from"],
  before_write: ["waits", "the caller's before_write ran"],
  fence: ["waits", "ending the reads of the old version"],
  upstream: ["sources", "waiting for chunks that the source itself did not have yet"],
  "source busy": ["sources", "the source served other readers, or was short of CPU or GIL"],
  "source disk": ["sources", "the source waited for its disk"],
  link: ["network", "bytes on their way: the network between source and reader"],
  loss: ["network", "bytes on their way, with many segments sent again"],
  reader: ["reader", "the source waited for the reader to take bytes"],
  cpu: ["reader", "the reader waited for a core, or used it"],
  gil: ["reader", "the reader waited for its interpreter's lock"],
  digest: ["reader", "digests of bytes that had arrived"],
  codec: ["reader", "applying deltas"],
  copy: ["reader", "copies within the reader"],
  digests: ["waits", "waiting for the publisher's digests"],
  others: ["waits", "waiting for another rank of the group"],
  store: ["control", "the coordinator's store"],
  coordinator: ["control", "the coordinator was late"],
  control: ["control", "messages between worker and coordinator, planning, and starting to read"],
  other: ["rest", "not attributed"],
};

const KINDS = {
  waits: "waiting",
  sources: "the source",
  network: "the network",
  reader: "the reader",
  control: "the coordinator",
  rest: "not attributed",
};

/** The phases of a rank's call, in their order, and the kind of each (which is its colour). */
const PHASES = {
  resolve: "bind",
  prepare: "bind",
  hook: "hook",
  fence: "wait",
  room: "wait",
  copy: "copy",
  wait: "wait",
  transfer: "transfer",
  verify: "verify",
  unpack: "copy",
  apply: "copy",
  commit: "commit",
};

const PHASE_KINDS = {
  generate: "generate (between updates)",
  bind: "bind and plan",
  hook: "before_write",
  wait: "wait",
  transfer: "transfer",
  verify: "digests",
  copy: "copies",
  commit: "commit",
  running: "not over yet",
};

/** What a call can wait for (`CallsSummary.waits_for`). */
const WAITS = {
  ranks: "other ranks of the group, which have not called yet",
  version: "a version that can be fetched: no published version fits, or it has no holder now",
  successor: "another holder of a retained version, which the caller holds last",
  before_write: "a rank that is not ready to be overwritten: its before_write runs",
  source: "a worker to read from",
  chunks: "bytes that are being read",
  digests: "agreement with the digests of the publisher",
  readers: "running reads of the memory that is to be given up",
  holders: "holders that have not acknowledged yet that they keep the version",
  store: "the coordinator's store",
};

/** Kinds of events, by how much they matter. */
const EVENTS = {
  published: "good",
  readable: "plain",
  unpublished: "plain",
  updated: "good",
  failed: "bad",
  joined: "plain",
  left: "plain",
  suspect: "warn",
  lost: "bad",
  source_failed: "warn",
  corrupt: "bad",
  rolled_back: "warn",
  retained: "plain",
  behind: "warn",
  serving: "good",
};

const STATES = ["ready", "filling", "draining", "torn"];
