// What the page knows: its runs and their sections, and how the reader wants to see them.
"use strict";

const COLOURS = 8;
const MOST_POINTS = 2500; // the server thins to fewer; new records add up until then

const Store = {
  runs: [], // in the order of the server; those that are gone stay until the page is loaded anew
  folders: "",
  written: null, // of a report
  axis: "step",
  log: true,
  smoothing: 30,
  zoom: null, // [from, to] on the horizontal axis
  step: null, // of the film strip; null: the newest
  reading: true,
};

function newRun(found, isShown) {
  const taken = new Set(Store.runs.map((run) => run.colour));
  const free = [...Array(COLOURS).keys()].find((colour) => !taken.has(colour));
  return { ...found, colour: free ?? Store.runs.length % COLOURS, shown: isShown, tags: {}, columns: {}, isRead: false };
}

/** Take the list of runs; one that has vanished keeps what is known of it. */
function takeList(list, named) {
  const isFirst = Store.runs.length === 0;
  const found = list.map((one, place) => {
    const known = Store.runs.find((run) => run.key === one.key);
    if (known) return Object.assign(known, one);
    const isShown = isFirst ? (named ? place < COLOURS : place === 0) || one.state.kind === "running" : one.state.kind === "running" || one.state.kind === "waiting";
    const run = newRun(one, isShown);
    Store.runs.push(run);
    return run;
  });
  const gone = Store.runs.filter((run) => !found.includes(run));
  for (const run of gone) run.state = { ...run.state, kind: "gone", text: "the folder has been deleted; this is what the page knows of it" };
  Store.runs = [...found, ...gone];
}

/** Take sections of a run that are new to the page. */
function takeSections(run, sections) {
  run.unreadable = "";
  run.reading = sections.reading?.data ?? null;
  if (run.reading) return; // of a long log: the server goes on when it is asked again
  run.isRead = true;
  run.picturesLeftOut = sections.pictures?.left_out ?? null;
  for (const [name, section] of Object.entries(sections)) {
    if (name === "metrics") takeMetrics(run, section);
    else run[name] = section.data;
    if (name !== "metrics") run.tags[name] = section.tag;
  }
}

function takeMetrics(run, { tag, data }) {
  run.snrEdges = data.snr_edges;
  if (data.first === 0) run.columns = data.columns;
  else if (data.first === run.records) append(run.columns, data.columns);
  else {
    delete run.tags.metrics; // all anew
    return;
  }
  run.records = data.count;
  run.tags.metrics = tag;
  if ((run.columns.step?.mean.length ?? 0) > MOST_POINTS) delete run.tags.metrics;
}

function append(columns, more) {
  const before = columns.step?.mean.length ?? 0;
  const added = more.step?.mean.length ?? 0;
  for (const name of Object.keys(more)) columns[name] ??= { mean: Array(before).fill(null) };
  for (const [name, column] of Object.entries(columns)) {
    const values = more[name]?.mean ?? Array(added).fill(null);
    for (const part of Object.values(column)) part.push(...values);
  }
}

const shownRuns = () => Store.runs.filter((run) => run.shown && run.isRead);
const colourOf = (run) => `var(--run-${run.colour})`;
const xOf = (run) => run.columns[Store.axis]?.mean ?? [];
const batchOf = (run) => run.about?.config?.batch?.samples ?? null;

/** A step on the horizontal axis. */
function onAxis(run, step) {
  if (Store.axis === "step") return step;
  const steps = run.columns.step?.mean ?? [], samples = run.columns.samples?.mean ?? [];
  const place = Math.max(0, placeOf(steps, step));
  return steps.length ? (samples[place] / steps[place]) * step : step * (batchOf(run) ?? 1);
}

/** The part of the horizontal axis that the curves show. */
function visibleRange() {
  if (Store.zoom) return Store.zoom;
  let last = 0;
  for (const run of shownRuns()) last = Math.max(last, xOf(run).at(-1) ?? 0, ...(run.validation ?? []).map((one) => one[Store.axis] ?? 0));
  return [0, last || 1];
}

/** How far the smoothing reaches, in units of the horizontal axis. */
function reach() {
  const [from, to] = visibleRange();
  return (to - from) * 0.1 * (Store.smoothing / 100) ** 2;
}

function hasColumn(run, name) {
  return run.columns[name]?.mean.some((one) => one !== null) ?? false;
}
