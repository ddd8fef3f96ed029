// Elements of the page, and numbers, times and texts in words. Foreign text only ever becomes a text node.
"use strict";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US"));

/** Significant digits, with an exponent only below a thousandth and from a million on. */
function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(Math.min(2, digits - 1)).replace("e+", "e").replaceAll("-", "−");
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits }).replace("-", "−");
}

/** A number beside an axis: 20k, 1.5M, 1e20, 0.001. */
function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(2).replace(/\.?0*e\+/, "e").replace("-", "−");
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  if (size !== 0 && size < 1e-4) return value.toExponential().replace(/(\.\d\d)\d+/, "$1").replace("-", "−");
  return String(+value.toPrecision(6)).replace("-", "−");
}

const UNITS = [["ms", 1e-3, 1e3], ["s", 1, 120], ["min", 60, 120], ["h", 3600, 48], ["days", 86400, Infinity]];

/** A duration in the first unit whose limit its rounded number does not reach: 7199 s is 2.0 h. */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  for (const [unit, length, limit] of UNITS) {
    const value = seconds / length;
    const shown = value.toFixed(unit === "ms" || (length < 3600 && value >= 9.95) ? 0 : 1);
    if (+shown < limit) return `${shown} ${unit}`;
  }
}

const two = (value) => String(value).padStart(2, "0");

function clock(seconds, withDay = true, withSeconds = true) {
  const date = new Date(1000 * seconds);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}${withSeconds ? `:${two(date.getSeconds())}` : ""}`;
  return withDay ? `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}` : time;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const slug = (text) => text.replace(/[^a-z0-9]+/gi, "-").toLowerCase();

function value(found) {
  if (found === undefined) return "–";
  return typeof found === "string" ? found : JSON.stringify(found);
}

/** Objects within objects as one object with dotted names. */
function flatten(found, prefix = "") {
  const flat = {};
  for (const [name, inner] of Object.entries(found || {})) {
    const isObject = inner !== null && typeof inner === "object" && !Array.isArray(inner);
    if (isObject) Object.assign(flat, flatten(inner, `${prefix}${name}.`));
    else flat[prefix + name] = inner;
  }
  return flat;
}
