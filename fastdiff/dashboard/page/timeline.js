// Where the time of a run went: throughput over the clock, with its gaps, and the sums of its ledger.
"use strict";

const NOTES = {
  "step kept": "steps that count: the goodput",
  "step lost": "steps that were taken again or undone",
  "data wait": "waiting for data",
  compile: "rehearsal and compilation before the first step",
  start: "from the begin of the process to the first step",
  save: "the training waited for a save",
  validation: "validation losses",
  sampling: "sample pictures",
  stop: "from the last step to the end, or to the next start",
  queue: "waiting for nodes",
  unknown: "no record tells",
};
const SHORTEST_S = 0.0005; // what is shorter is written as 0 ms
const timeColour = (name) => `var(--time-${slug(name)})`;

function drawTimeline(host, run) {
  const { timeline, classes } = run.time;
  const frame = makeFrame(host, { height: 240, label: `throughput of ${run.name} over the clock` });
  const { box, inside, below } = frame;
  const strip = { top: box.bottom - 34, bottom: box.bottom };
  const upper = { ...box, bottom: strip.top - 8 };
  const [from, to] = [timeline[0].began, timeline.at(-1).ended];
  const bottom = linear([0, to - from || 1], [box.left, box.right]);
  const most = Math.max(1, ...timeline.map((span) => span.samples_per_s ?? 0));
  const left = linear([0, most * 1.08], [upper.bottom, upper.top]);
  drawElapsedAxis(frame, bottom, from);
  drawLeftAxis({ ...frame, box: upper }, left, "samples per second");
  let line = "";
  for (const span of timeline) {
    const x = [bottom(span.began - from), bottom(span.ended - from)];
    drawShares(inside, span, classes, x, strip);
    const gap = gapOf(span);
    if (gap) drawGap(inside, gap, span, x, upper);
    if (span.samples_per_s !== null) line += `M${x[0]} ${left(span.samples_per_s)}H${x[1]}`;
  }
  inside.append(svg("path", { class: "line", d: line, style: { stroke: colourOf(run) } }));
  below.append(svg("text", { class: "label", x: box.left - 6, y: (strip.top + strip.bottom) / 2 + 4, "text-anchor": "end" }, "time"));
  const at = (x) => timelineAt(timeline[Math.max(0, placeOf(timeline.map((span) => span.began - from), x))], run, classes);
  follow(frame, { at, scale: bottom, isShared: false });
}

function drawElapsedAxis(frame, bottom, from) {
  const { box, below } = frame;
  const whole = bottom.invert(box.right);
  const [unit, name] = whole < 600 ? [1, "seconds"] : whole < 14400 ? [60, "minutes"] : whole < 345600 ? [3600, "hours"] : [86400, "days"];
  const scaled = linear([0, whole / unit], [box.left, box.right]);
  drawBottomAxis(frame, scaled, `${name} since ${clock(from, true, whole < 14400)}`);
  below.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
}

/** The class that most of a span without steps went into; null: it has steps. */
function gapOf(span) {
  if (span.samples_per_s !== null) return null;
  const [name] = Object.entries(span.seconds).sort((a, b) => b[1] - a[1])[0] ?? [];
  return name && !name.startsWith("step kept") ? name : null;
}

function drawGap(inside, name, span, [x0, x1], box) {
  inside.append(svg("rect", { class: "gap", x: x0, y: box.top, width: Math.max(0.5, x1 - x0), height: box.bottom - box.top, style: { fill: timeColour(name) } }));
  if (x1 - x0 < 16) return;
  const words = `${name} ${duration(span.ended - span.began)}`;
  const isWide = x1 - x0 > words.length * 7;
  const [x, y] = [(x0 + x1) / 2, isWide ? box.top + 14 : (box.top + box.bottom) / 2];
  inside.append(svg("text", { class: "gap-name", "text-anchor": "middle", transform: isWide ? `translate(${x} ${y})` : `translate(${x + 4} ${y}) rotate(-90)` }, words));
}

function drawShares(inside, span, classes, [x0, x1], { top, bottom }) {
  const total = Object.values(span.seconds).reduce((sum, one) => sum + one, 0) || 1;
  let y = bottom;
  for (const name of classes) {
    const height = ((span.seconds[name] ?? 0) / total) * (bottom - top);
    if (!height) continue;
    y -= height;
    inside.append(svg("rect", { x: x0, y, width: Math.max(0.6, x1 - x0 + 0.2), height, style: { fill: timeColour(name) } }));
  }
}

function timelineAt(span, run, classes) {
  if (!span) return null;
  const spent = classes.filter((name) => span.seconds[name]).map((name) => ({ colour: timeColour(name), name, text: duration(span.seconds[name]) }));
  const rate = span.samples_per_s === null ? [] : [{ colour: colourOf(run), name: "samples per second", text: number(span.samples_per_s) }];
  return [`${clock(span.began)}, ${duration(span.ended - span.began)}, up to step ${count(span.step)}`, ...rate, ...spent];
}

/** The sums by class, as bars. */
function timeTable({ seconds, wall_s: wall, classes, steps_kept: kept, steps_lost: lost }) {
  const rows = classes.filter((name) => seconds[name] >= SHORTEST_S).map((name) => {
    const note = name === "step kept" ? `${count(kept)} steps` : name === "step lost" && lost ? `${count(lost)} steps taken again or undone` : NOTES[name];
    return el("tr", {},
      el("th", { scope: "row" }, el("i", { class: "swatch", style: { background: timeColour(name) } }), name),
      el("td", { class: "n" }, duration(seconds[name])),
      el("td", { class: "n" }, percent(seconds[name] / (wall || 1))),
      el("td", { class: "note" }, note));
  });
  return el("table", {}, el("tbody", {}, rows));
}

/** One row per start. */
function startTable({ starts }, { kind }) {
  const head = ["start", "began", "lasted", "ranks", "from step", "steps kept", "lost", "end"];
  const rows = starts.map((start, n) => el("tr", {},
    [n + 1, clock(start.began), duration(start.wall_s), start.nodes.length, count(start.resumed), count(start.steps_kept), count(start.steps_lost)]
      .map((text, column) => el("td", { class: column === 1 ? "" : "n" }, String(text))),
    el("td", {}, endOf(start, n === starts.length - 1, kind))));
  return el("table", { class: "starts" }, el("thead", {}, el("tr", {}, head.map((name, n) => el("th", { class: n === 1 || n === 7 ? "" : "n" }, name)))), el("tbody", {}, rows));
}

/** How a start ended; of the last one, the state of the run says whether it goes on. */
function endOf(start, isLast, kind) {
  if (start.outcome) return start.outcome;
  if (isLast && (kind === "running" || kind === "waiting")) return "running";
  return isLast && kind === "silent" ? "no sign of life" : "killed";
}
