// Scales from numbers to pixels, their round ticks, and smoothing.
"use strict";

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

function linear([from, to], [start, end]) {
  const span = to - from || 1;
  const scale = (value) => start + ((value - from) / span) * (end - start);
  scale.invert = (pixel) => from + ((pixel - start) / (end - start || 1)) * span;
  scale.ticks = (most) => steps(from, to, most);
  return scale;
}

function logarithmic([from, to], [start, end]) {
  const inner = linear([Math.log10(from), Math.log10(to)], [start, end]);
  const scale = (value) => (value > 0 ? inner(Math.log10(value)) : NaN);
  scale.invert = (pixel) => 10 ** inner.invert(pixel);
  scale.ticks = (most) => powers(from, to, most);
  return scale;
}

function steps(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) || 10 * power;
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to + step * 1e-9; n++) found.push(+(n * step).toPrecision(12));
  return found;
}

function powers(from, to, most) {
  const decades = Math.log10(to / from);
  if (decades < 1.2) return steps(from, to, 2 * most); // those that would lie too close are left out
  const every = Math.max(1, Math.ceil(decades / most));
  const within = decades < most / 3 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(to)); power++) {
    if (power % every) continue;
    for (const factor of within) {
      const one = factor * 10 ** power;
      if (one >= from * (1 - 1e-9) && one <= to * (1 + 1e-9)) found.push(+one.toPrecision(6));
    }
  }
  return found;
}

/** Index of the last place of ascending `values` that is not above `wanted`; -1: all are. */
function placeOf(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Exponential mean over `reach` of x, so that it does not depend on how densely the points lie; unbiased at its begin. */
function smooth(x, y, reach) {
  if (!(reach > 0)) return y;
  let sum = 0, weight = 0, before = null;
  return y.map((one, n) => {
    if (one === null || one === undefined) return null;
    const width = before === null ? (x[n + 1] ?? x[n] + 1) - x[n] : x[n] - before;
    const keep = Math.exp(-width / reach);
    before = x[n];
    sum = keep * sum + width * one;
    weight = keep * weight + width;
    return sum / weight;
  });
}
