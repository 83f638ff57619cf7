// Elements as values: h() describes one, patch() makes the page equal to the description. What
// stays equal is not touched, so that focus, selection and scrolling survive each second. Text is
// only ever set as text.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set([
  "svg",
  "path",
  "rect",
  "circle",
  "line",
  "text",
  "g",
  "polyline",
  "title",
]);

// control characters, and marks that show nothing or turn the direction of what follows
const UNPRINTABLE =
  /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** A text of the network, with each unprintable character visible as an escape. */
function shown(text) {
  return String(text).replace(
    UNPRINTABLE,
    (mark) => "\\u" + mark.charCodeAt(0).toString(16).padStart(4, "0"),
  );
}

/**
 * Describe an element. `props`: attributes; `on...` a listener, `style` an object of properties,
 * `key` what finds the element again among its siblings.
 */
function h(tag, props, ...children) {
  const inner = children.flat(Infinity).filter((each) => each || each === 0);
  return {
    tag,
    props: props || {},
    key: props && props.key,
    children: inner.map((each) => (typeof each === "object" ? each : shown(each))),
  };
}

/** A name that somebody chose: text of its own direction. */
function name(text) {
  return h("bdi", { class: "name", title: text.length > 24 ? text : null }, text);
}

/** A text with its middle left out, so that names that differ at their ends differ here. */
function shortened(text, charactersMost) {
  const whole = [...shown(text)];
  if (whole.length <= charactersMost) return text;
  const ends = Math.floor((charactersMost - 1) / 2);
  return `${whole.slice(0, charactersMost - 1 - ends).join("")}…${whole.slice(-ends).join("")}`;
}

/** Make the children of `parent` what `wanted` describes. */
function patch(parent, wanted) {
  const keyed = new Map();
  for (const node of parent.childNodes) if (node.vkey !== undefined) keyed.set(node.vkey, node);
  let place = parent.firstChild;
  for (const each of wanted) {
    const node = typeof each === "string" ? textNode(place, each) : elementNode(place, keyed, each);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function textNode(place, text) {
  if (!place || place.nodeType !== Node.TEXT_NODE) return document.createTextNode(text);
  if (place.data !== text) place.data = text;
  return place;
}

function elementNode(place, keyed, each) {
  let found = place && place.vkey === undefined ? place : null;
  if (each.key !== undefined) {
    found = keyed.get(each.key);
    keyed.delete(each.key);
  }
  let node = found;
  if (!found || found.vtag !== each.tag) {
    node = SVG_TAGS.has(each.tag)
      ? document.createElementNS(SVG, each.tag)
      : document.createElement(each.tag);
    Object.assign(node, { vtag: each.tag, vkey: each.key, vprops: {} });
  }
  setProps(node, each.props);
  patch(node, each.children);
  return node;
}

function setProps(node, props) {
  const before = node.vprops;
  for (const prop in before) if (!(prop in props)) setProp(node, prop, null);
  for (const prop in props) {
    if (prop === "style") setStyle(node, before.style || {}, props.style);
    else if (before[prop] !== props[prop]) setProp(node, prop, props[prop]);
  }
  node.vprops = props;
}

function setProp(node, prop, value) {
  if (prop === "key") return;
  if (prop === "style") setStyle(node, node.vprops.style, {});
  else if (prop.startsWith("on")) node[prop] = value;
  else if (value === null || value === undefined || value === false) node.removeAttribute(prop);
  // an address is a place of this page: no text of the network can lead anywhere else
  else if (prop === "href" && !String(value).startsWith("#")) throw new Error("not of this page");
  else node.setAttribute(prop, value === true ? "" : prop === "title" ? shown(value) : value);
}

function setStyle(node, before, style) {
  for (const each in before) if (!(each in style)) node.style.removeProperty(each);
  for (const each in style)
    if (before[each] !== style[each]) node.style.setProperty(each, style[each]);
}

// -------------------------------------------------------------------------------------------------
// figures

const GROUPED = new Intl.NumberFormat("en-US");

function whole(count) {
  return typeof count === "number" ? GROUPED.format(count) : String(count);
}

function counted(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** Three digits, as people write them: 1,234, 12.3, 0.0123. */
function digits(value) {
  const size = Math.abs(value);
  if (size >= 100) return GROUPED.format(Math.round(value));
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function inBytes(count) {
  let size = Number(count);
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (size < 1000 || unit === "TB") return unit === "B" ? `${size} B` : `${digits(size)} ${unit}`;
    size /= 1000;
  }
  return "";
}

function inSeconds(seconds) {
  if (seconds < 0.000005) return seconds > 0 ? "< 0.01 ms" : "0 ms";
  if (seconds < 0.0095) return `${(seconds * 1000).toFixed(seconds < 0.00095 ? 2 : 1)} ms`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

function ago(seconds) {
  return seconds < 1
    ? "now"
    : `${seconds < 100 ? Math.floor(seconds) + " s" : inSeconds(seconds)} ago`;
}

/** The time of day, in the browser's zone. */
function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

function percent(share) {
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}
