// Curves over steps or samples: raw and smoothed, bands from minimum to maximum, points with error bars, marks.
"use strict";

/**
 * Draw curves into `host`.
 *
 * curves: { name, colour, x, y, low, high, error, smoothed, dashed, points } with arrays of one length; null: no value.
 * marks: { x, y, colour, shape, text }; without y they stand on the axis, "line" crosses the plot.
 */
function drawLines(host, { curves, marks = [], label, unit, log = false, zero = false, height = 240, x = null, reach: far = 0 }) {
  const frame = makeFrame(host, { height, label: `${label}, ${unit}` });
  const { box } = frame;
  const range = x?.range ?? visibleRange();
  const bottom = linear(range, [box.left, box.right]);
  const drawn = curves.map((curve) => ({ ...curve, line: curve.smoothed ? smooth(curve.x, curve.y, far) : curve.y }));
  const domain = verticalDomain(drawn, marks, range, log, zero);
  const left = (domain.log ? logarithmic : linear)(domain.ends, [box.bottom, box.top]);
  drawBottomAxis(frame, bottom, x?.label ?? (Store.axis === "step" ? "optimizer steps" : "samples"));
  drawLeftAxis(frame, left, unit);
  for (const curve of drawn) drawCurve(frame, curve, bottom, left, far);
  for (const mark of marks) drawMark(frame, mark, bottom, left);
  follow(frame, { at: (at) => valuesAt(drawn, marks, at, range, x), scale: bottom, isShared: !x });
}

function verticalDomain(curves, marks, [from, to], log, zero) {
  const isInside = (curve, n) => curve.x[n] >= from && curve.x[n] <= to;
  const values = [];
  for (const curve of curves) {
    curve.x.forEach((_, n) => {
      if (!isInside(curve, n) || curve.line[n] === null || curve.line[n] === undefined) return;
      const error = curve.error?.[n] ?? 0;
      values.push(curve.line[n], (curve.y[n] ?? curve.line[n]) - error, (curve.y[n] ?? curve.line[n]) + error);
    });
  }
  for (const mark of marks) if (mark.y !== undefined && mark.x >= from && mark.x <= to) values.push(mark.y);
  const positive = values.filter((one) => one > 0);
  const isLog = log && positive.length > 0;
  let [low, high] = extent(isLog ? positive : values) ?? [0, 1];
  if (isLog) return { log: true, ends: low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04] };
  if (zero) low = Math.min(0, low);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return { log: false, ends: [zero && low === 0 ? 0 : low - room, high + room] };
}

function drawCurve({ inside }, curve, bottom, left, far) {
  const style = { stroke: curve.colour };
  const isSmooth = curve.smoothed && far > 0;
  if (curve.low) inside.append(svg("path", { class: "band", d: band(curve, bottom, left), style: { fill: curve.colour } }));
  if (isSmooth) inside.append(svg("path", { class: "raw", d: path(curve.x, curve.y, bottom, left), style }));
  inside.append(svg("path", { class: curve.dashed ? "line dashed" : "line", d: path(curve.x, curve.line, bottom, left), style }));
  const isAlone = curve.x.length < 3;
  if (curve.points || isAlone) curve.x.forEach((at, n) => drawPoint(inside, curve, n, bottom(at), left));
}

function drawPoint(inside, curve, n, x, left) {
  const y = left(curve.line[n]);
  if (curve.line[n] === null || !Number.isFinite(y)) return;
  const error = curve.error?.[n];
  if (error) {
    const low = left(curve.line[n] - error), high = left(curve.line[n] + error);
    const base = Number.isFinite(low) ? low : 1e4; // on a logarithmic axis: out of the plot
    inside.append(svg("path", { class: "error", d: `M${x} ${base}V${high}M${x - 3} ${base}h6M${x - 3} ${high}h6`, style: { stroke: curve.colour } }));
  }
  inside.append(svg("circle", { cx: x, cy: y, r: 3, style: { fill: curve.colour } }));
}

function path(x, y, bottom, left) {
  let text = "", pen = "M";
  for (let n = 0; n < x.length; n++) {
    const up = y[n] === null || y[n] === undefined ? NaN : left(y[n]);
    if (!Number.isFinite(up)) {
      pen = "M";
      continue;
    }
    text += `${pen}${bottom(x[n]).toFixed(1)} ${up.toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function band(curve, bottom, left) {
  const there = [], back = [];
  curve.x.forEach((at, n) => {
    const low = left(curve.low[n]), high = left(curve.high[n]);
    if (curve.low[n] === null || !Number.isFinite(low) || !Number.isFinite(high)) return;
    there.push(`${bottom(at).toFixed(1)} ${high.toFixed(1)}`);
    back.push(`${bottom(at).toFixed(1)} ${low.toFixed(1)}`);
  });
  return there.length ? `M${there.join("L")}L${back.reverse().join("L")}Z` : "";
}

function drawMark({ inside, box }, mark, bottom, left) {
  const x = bottom(mark.x);
  const title = svg("title", {}, mark.text);
  const style = { fill: mark.colour, stroke: mark.colour };
  if (mark.shape === "line") {
    inside.append(svg("line", { class: "restart", x1: x, x2: x, y1: box.top, y2: box.bottom, style: { stroke: mark.colour } }, title));
    return;
  }
  const y = mark.y === undefined ? box.bottom - 6 : Math.max(box.top + 6, left(mark.y));
  const shapes = { spike: `M${x} ${y - 6}l5 9h-10Z`, skipped: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`, lost: `M${x} ${y + 6}l5 -9h-10Z` };
  inside.append(svg("path", { class: `mark ${mark.shape}`, d: shapes[mark.shape], style }, title));
}

function valuesAt(curves, marks, at, [from, to], x) {
  const lines = [];
  for (const curve of curves) {
    let place = placeOf(curve.x, at);
    if (place + 1 < curve.x.length && (place < 0 || curve.x[place + 1] - at < at - curve.x[place])) place += 1;
    const found = curve.line[place];
    if (found === null || found === undefined || (at > curve.x.at(-1) && at - curve.x.at(-1) > (to - from) / 50)) continue;
    const error = curve.error?.[place] ? ` ± ${number(curve.error[place], 2)}` : "";
    const raw = curve.smoothed && curve.y[place] !== null && curve.y !== curve.line ? ` (${number(curve.y[place])})` : "";
    lines.push({ colour: curve.colour, name: curve.name, text: `${number(found)}${raw}${error}`, x: curve.x[place] });
  }
  const near = marks.filter((mark) => Math.abs(mark.x - at) < (to - from) / 100).slice(0, 4);
  if (!lines.length && !near.length) return null;
  const where = x ? x.words(at) : `${Store.axis === "step" ? "step" : "sample"} ${count(lines[0]?.x ?? at)}`;
  return [where, ...lines, ...near.map((mark) => ({ colour: mark.colour, name: "", text: mark.text }))];
}
