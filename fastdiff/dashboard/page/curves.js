// The cards with curves: which columns each shows, of which runs, with which marks.
"use strict";

function curveOf(run, name, more = {}) {
  const column = run.columns[name];
  return { name: run.name, colour: colourOf(run), x: xOf(run), y: column.mean, low: column.min, high: column.max, ...more };
}

const curvesOf = (name, more) => shownRuns().filter((run) => hasColumn(run, name)).map((run) => curveOf(run, name, more));

/** The starts after the first, with the number of the one before. */
const laterStarts = (run) => (run.time?.starts ?? []).slice(1).map((start, n) => ({ start, n }));

/** Restarts as lines, spikes and skipped steps as marks on the curve of the loss. */
function marksOf(run, onlyStarts = false) {
  const colour = colourOf(run), several = shownRuns().length > 1 ? `${run.name}: ` : "";
  const starts = laterStarts(run).filter(({ start }) => start.resumed > 0).map(({ start, n }) => ({
    x: onAxis(run, start.resumed), shape: "line", colour,
    text: `${several}start ${n + 2} continues from step ${count(start.resumed)}; before it: ${run.time.starts[n].outcome || "killed"}`,
  }));
  if (onlyStarts) return starts;
  const spikes = (run.events?.spikes.last ?? []).map((one) => one.rewound_to === undefined
    ? { x: onAxis(run, one.step), y: one.loss, shape: "spike", colour, text: `${several}step ${count(one.step)}: spike, loss ${number(one.loss)}, threshold ${number(one.threshold)}` }
    : { x: onAxis(run, one.step), shape: "lost", colour, text: `${several}step ${count(one.step)}: rewound to step ${count(one.rewound_to)}` });
  const skipped = (run.events?.skipped.last ?? []).map((one) => ({ x: onAxis(run, one.step), shape: "skipped", colour, text: `${several}step ${count(one.step)}: skipped, not finite` }));
  return [...starts, ...spikes, ...skipped];
}

const restarts = () => shownRuns().flatMap((run) => marksOf(run, true));

function drawLoss(host) {
  const curves = curvesOf("loss", { smoothed: true });
  if (!curves.length) return empty(host, whyNoRecord());
  drawLines(host, { curves, marks: shownRuns().flatMap((run) => marksOf(run)), label: "loss", unit: "loss", log: Store.log, height: 320, reach: reach() });
}

function whyNoRecord() {
  const run = shownRuns()[0];
  return run.state.kind === "waiting" ? `${run.name}: ${run.state.text}.` : `${run.name} has no record.`;
}

/** Show a text in the place of a card, which makes its parts anew when it has something to show again. */
function empty(host, text) {
  host.strip = null;
  delete host.dataset.key;
  host.replaceChildren(el("p", { class: "empty" }, text));
}

/** A card of one column. */
function curvesOfColumn(name, options) {
  return (host) => {
    const curves = curvesOf(name, options.curve);
    if (!curves.length) return empty(host, options.without ?? whyNoRecord());
    drawLines(host, { curves, marks: restarts(), reach: reach(), ...options });
  };
}

const drawNorm = curvesOfColumn("grad_norm", { label: "gradient norm", unit: "gradient norm", log: true, curve: { smoothed: true }, without: "No gradient norm is recorded yet." });
const drawRate = curvesOfColumn("lr", { label: "learning rate", unit: "learning rate", zero: true });
const drawMemory = curvesOfColumn("peak_gib", { label: "peak memory", unit: "GiB", zero: true });

function drawThroughput(host) {
  curvesOfColumn("samples_per_s", { label: "throughput", unit: "samples per second", zero: true, curve: { smoothed: true } })(host);
}

function drawWait(host) {
  const curves = shownRuns().filter((run) => hasColumn(run, "step_ms")).map((run) => {
    const { step_ms: step, data_wait_ms: wait } = run.columns;
    return { name: run.name, colour: colourOf(run), x: xOf(run), y: step.mean.map((one, n) => (one ? (100 * (wait.mean[n] ?? 0)) / one : null)), smoothed: true };
  });
  if (!curves.length) return empty(host, whyNoRecord());
  drawLines(host, { curves, marks: restarts(), label: "waiting for data", unit: "% of a step", zero: true, reach: reach() });
}

function drawUtilisation(host) {
  const curves = curvesOf("mfu", { smoothed: true }).map((curve) => ({ ...curve, y: curve.y.map((one) => (one === null ? null : 100 * one)), low: null, high: null }));
  drawLines(host, { curves, marks: restarts(), label: "model FLOPs utilisation", unit: "MFU, %", zero: true, reach: reach() });
}

const drawScale = curvesOfColumn("loss_scale", { label: "loss scale of fp16", unit: "loss scale", log: true });

/** The parts of a loss that is a sum: columns that also come by quartile, as those of the loss do. */
function partsOf(run) {
  return Object.keys(run.columns).filter((name) => name !== "loss" && run.columns[`${name}_q0`]);
}

function drawParts(host) {
  const names = [...new Set(shownRuns().flatMap(partsOf))];
  const curves = names.flatMap((name, n) => curvesOf(name, { smoothed: true, dashed: n % 2 === 1 }).map((curve) => ({ ...curve, name: `${curve.name}, ${name}` })));
  drawLines(host, { curves, marks: restarts(), label: "parts of the loss", unit: `loss (${names.map((name, n) => (n % 2 ? `${name} dashed` : name)).join(", ")})`, log: true, reach: reach() });
}

function drawNoise(host) {
  const runs = shownRuns().filter((run) => hasColumn(run, BIN(8)) || Object.keys(run.columns).some((name) => name.startsWith("loss_snr_") && hasColumn(run, name)));
  if (!runs.length) return empty(host, shownRuns().some((run) => xOf(run).length) ? "These records have no loss by noise level." : whyNoRecord());
  const isRelative = document.querySelector("input[name=noise]:checked").value === "change";
  const rows = runs.map((run) => heatRows(run, isRelative));
  const scale = heatScale(rows, isRelative);
  if (!scale) return empty(host, "No loss by noise level is recorded yet.");
  const maps = runs.map((run, n) => {
    const plot = el("div", {});
    return { plot, run, rows: rows[n], part: el("div", { class: "of-run" }, runs.length > 1 ? runTitle(run) : null, plot) };
  });
  host.replaceChildren(...maps.map((map) => map.part), heatKey(scale));
  for (const map of maps) drawHeatMap(map.plot, map.run, map.rows, scale);
}

const runTitle = (run) => el("h3", {}, el("i", { class: "swatch", style: { background: colourOf(run) } }), run.name);

function drawTime(host) {
  const runs = shownRuns().filter((run) => run.time?.timeline.length);
  if (!runs.length) return empty(host, shownRuns().length ? "No ledger.jsonl tells the time of this run; it begins with the next start." : "");
  const parts = runs.map((run) => {
    const plot = el("div", {});
    const goodput = el("p", {}, el("b", {}, `${percent(run.time.goodput)} goodput`), ` in ${duration(run.time.wall_s)}, ${run.time.starts.length === 1 ? "1 start" : `${run.time.starts.length} starts`}`);
    return { run, plot, part: el("div", { class: "of-run" }, runs.length > 1 ? runTitle(run) : null, plot, el("div", { class: "sums" }, el("div", {}, goodput, el("div", { class: "wide-table" }, timeTable(run.time))), el("div", { class: "wide-table" }, startTable(run.time, run.state)))) };
  });
  host.replaceChildren(...parts.map(({ part }) => part));
  for (const { run, plot } of parts) drawTimeline(plot, run);
}

const TWO_ERRORS = 2;

function whyNoValidation() {
  const run = shownRuns()[0], config = run?.about?.config?.validation;
  if (!config) return "No validation yet.";
  if (!config.data) return `${shownRuns().length > 1 ? run.name : "This run"} has no validation: --validation.data would name held-out samples.`;
  return `No validation${whenFirst(run, config.first ?? config.every)}`;
}

function drawValidation(host) {
  const runs = shownRuns().filter((run) => run.validation?.length);
  if (!runs.length) return empty(host, whyNoValidation());
  const overSteps = el("div", {}), byNoise = el("div", {});
  const kinds = new Set(runs.map((run) => `${run.validation.at(-1).unit}, data ${run.validation.at(-1).data}`));
  const warning = kinds.size > 1 ? el("p", { class: "warning" }, `Not comparable: ${[...kinds].join("; ")}.`) : null;
  const note = el("p", { class: "note" }, `${[...new Set(runs.map((run) => run.validation.at(-1).unit))].join("; ")}. Bars: ± 2 standard errors.`);
  host.replaceChildren(...[warning, el("div", { class: "pair" }, overSteps, byNoise), note].filter(Boolean));
  const curves = runs.map((run) => ({
    name: run.name, colour: colourOf(run), points: true, x: run.validation.map((one) => one[Store.axis]),
    y: run.validation.map((one) => one.val_loss), error: run.validation.map((one) => TWO_ERRORS * (one.val_loss_se ?? 0)),
  }));
  drawLines(overSteps, { curves, marks: restarts(), label: "validation loss", unit: "validation loss", log: Store.log });
  drawByNoise(byNoise, runs);
}

/** The newest validation of each run by bin of the log SNR. */
function drawByNoise(host, runs) {
  const edges = runs[0].snrEdges ?? [];
  const width = edges[1] - edges[0], centres = [edges[0] - width / 2, ...edges.map((edge) => edge + width / 2)];
  const curves = runs.map((run, n) => {
    const last = run.validation.at(-1);
    const shift = (n - (runs.length - 1) / 2) * 0.12;
    return {
      name: `${run.name}, step ${count(last.step)}`, colour: colourOf(run), points: true, x: centres.map((one) => one + shift),
      y: last.val_loss_snr ?? [], error: (last.val_loss_snr_se ?? []).map((one) => TWO_ERRORS * (one ?? 0)),
    };
  });
  const words = (at) => `log SNR about ${number(at)}`;
  drawLines(host, { curves, label: "newest validation loss by noise level", unit: "newest validation loss", log: true, x: { range: [centres[0] - width / 2, centres.at(-1) + width / 2], label: "log SNR (right: less noise)", words } });
}
