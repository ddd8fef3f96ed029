// The cards of the page, what redraws them, and its begin: live from a server, or from the metadata within a report.
"use strict";

const has = (name) => shownRuns().some((run) => hasColumn(run, name));
const hasPrompts = () => withPictures().some((run) => promptsOf(run).length);
/** Whether there is something to see, or still to come: of a run that failed before its first record there is not. */
const hasRecords = () => shownRuns().some((run) => run.records || run.state.kind === "running" || run.state.kind === "waiting");
const CARDS = [
  { id: "loss", title: "Loss", draw: drawLoss, wide: true, if: hasRecords },
  { id: "validation", title: "Validation", draw: drawValidation, wide: true, if: hasRecords },
  { id: "noise", title: "Loss by noise level", draw: drawNoise, wide: true, options: noiseOptions, if: hasRecords },
  { id: "samples", title: "Samples", draw: drawFilmStrip, wide: true, ofText: true, if: () => hasRecords() || withPictures().length },
  { id: "prompts", title: "Prompts side by side", draw: (host) => drawPrompts(host, chosenImage()), wide: true, ofText: true, options: imageOptions, if: hasPrompts },
  { id: "norm", title: "Gradient norm", draw: drawNorm, if: hasRecords },
  { id: "rate", title: "Learning rate", draw: drawRate, if: hasRecords },
  { id: "throughput", title: "Throughput", draw: drawThroughput, if: hasRecords },
  { id: "wait", title: "Waiting for data", draw: drawWait, if: hasRecords },
  { id: "memory", title: "Peak memory of rank 0", draw: drawMemory, if: hasRecords },
  { id: "mfu", title: "Model FLOPs utilisation", draw: drawUtilisation, if: () => has("mfu") },
  { id: "scale", title: "Loss scale of fp16", draw: drawScale, if: () => has("loss_scale") },
  { id: "parts", title: "Parts of the loss", draw: drawParts, if: () => shownRuns().some((run) => partsOf(run).length) },
  { id: "time", title: "Where the time went", draw: drawTime, wide: true },
  { id: "events", title: "Restarts, spikes and skipped steps", draw: drawEvents, wide: true },
  { id: "configuration", title: "Configuration", draw: drawConfiguration, wide: true },
];

function noiseOptions() {
  const choice = (value, text, checked) => el("label", {}, el("input", { type: "radio", name: "noise", value, checked, onchange: draw }), ` ${text}`);
  return el("span", { class: "options" }, choice("loss", "loss", true), choice("change", "change within each row", false));
}

function imageOptions() {
  return el("select", { id: "image", "aria-label": "which image of each prompt", onchange: draw });
}

function makeCards() {
  const cards = CARDS.map((card) => el("section", { class: card.wide ? "card wide" : "card", "aria-label": card.title },
    el("h2", {}, card.title, card.options ? card.options() : null), el("div", { class: "body", id: card.id })));
  document.getElementById("cards").replaceChildren(...cards);
  document.body.append(tip);
}

/** Pictures come first if all shown runs have prompts: whoever tunes such a network looks there first. */
function orderCards() {
  const isFirst = shownRuns().every(isOfText);
  const cards = document.getElementById("cards");
  if (cards.dataset.picturesFirst === String(isFirst)) return;
  cards.dataset.picturesFirst = isFirst;
  const order = isFirst ? [...CARDS.filter((card) => card.ofText), ...CARDS.filter((card) => !card.ofText)] : CARDS;
  cards.append(...order.map((card) => document.getElementById(card.id).parentElement));
}

let isDue = false;

/** Draw the page anew, at most once per frame; not before the end of a drag, whose plot would be replaced. */
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (Drag.isOn) Drag.isDue = true;
    else drawNow();
  });
}

function drawNow() {
  drawRuns(document.getElementById("runs"));
  document.getElementById("unzoom").hidden = Store.zoom === null;
  document.getElementById("smoothed").textContent = smoothedOver();
  drawReading(document.getElementById("reading"));
  drawMessages(document.getElementById("messages"));
  document.getElementById("cards").hidden = !shownRuns().length;
  document.getElementById("controls").hidden = !shownRuns().length || !hasRecords();
  if (!shownRuns().length) return;
  orderCards();
  const hosts = new Map(CARDS.map((card) => [card, document.getElementById(card.id)]));
  for (const [card, host] of hosts) host.parentElement.hidden = card.if ? !card.if() : false; // before a plot asks for its width
  for (const [card, host] of hosts) if (!host.parentElement.hidden) drawCard(card, host);
}

function smoothedOver() {
  const reached = Math.round(reach());
  const unit = Store.axis === "step" ? "step" : "sample";
  return reached ? `over ${count(reached)} ${unit}${reached === 1 ? "" : "s"}` : "none";
}

/** Draw a card; one that fails says so, and the others go on. */
function drawCard(card, host) {
  try {
    card.draw(host);
  } catch (error) {
    console.error(error);
    empty(host, `${card.title} cannot be drawn: ${error.message}`);
  }
}

/** What is there instead of the cards. */
function drawReading(host) {
  const wanted = Store.runs.filter((run) => run.shown);
  host.hidden = !Store.runs.length || shownRuns().length > 0;
  host.textContent = wanted.length ? wanted.map(readingOf).join(" ") : "No run is chosen: tick one above.";
}

/** First of all: the errors that ended the shown runs, and what of their files could not be read. */
function drawMessages(host) {
  const runs = shownRuns();
  const key = JSON.stringify(runs.map((run) => [run.key, run.name, run.colour, run.state.message, run.state.text, run.left_out]));
  if (host.dataset.key === key) return; // the reader may have closed a part
  host.dataset.key = key;
  const swatch = (run) => el("i", { class: "swatch", style: { background: colourOf(run) } });
  const failed = runs.filter((run) => run.state.message).map((run) => el("div", { class: "failure", role: "alert" },
    el("h2", {}, el("span", {}, swatch(run), `${run.name} has failed`)), el("p", { class: "message" }, run.state.message), el("p", { class: "note" }, run.state.text)));
  const incomplete = runs.filter((run) => Object.keys(run.left_out ?? {}).length).map((run) => el("details", { class: "incomplete", open: true },
    el("summary", {}, swatch(run), `Left out of ${run.name}`),
    Object.entries(run.left_out).map(([file, lines]) => el("p", {}, el("b", {}, file), `: ${lines.join("; ")}`))));
  host.replaceChildren(...failed, ...incomplete);
}

function readingOf(run) {
  if (run.unreadable) return `${run.name} ${run.unreadable}.`;
  const { offset, size } = run.reading ?? {};
  return `Reading ${run.name} …${size ? ` ${count(offset / 1e6)} of ${count(size / 1e6)} MB` : ""}`;
}

function listen() {
  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => {
      Store.axis = input.value;
      setZoom(null);
    });
  }
  document.getElementById("smoothing").addEventListener("input", (event) => {
    Store.smoothing = +event.target.value;
    draw();
  });
  document.getElementById("log").addEventListener("change", (event) => {
    Store.log = event.target.checked;
    draw();
  });
  document.getElementById("unzoom").addEventListener("click", () => setZoom(null));
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) draw();
    width = innerWidth;
  });
  // Details are open on paper, where nobody can open them.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of closed) one.open = false;
  });
}

function begin() {
  makeCards();
  listen();
  const embedded = document.getElementById("metadata");
  if (!embedded) {
    Live.say("", "Connecting …");
    draw();
    Live.start();
    return;
  }
  const metadata = JSON.parse(embedded.textContent);
  Store.reading = false;
  takeList(metadata.runs.map(({ sections, ...run }) => run), true);
  for (const { key, sections } of metadata.runs) takeSections(Store.runs.find((run) => run.key === key), sections);
  document.getElementById("where").textContent = "report";
  Live.say("report", `as of ${metadata.written}, fastdiff ${metadata.version}`);
  drawNow();
}

begin();
