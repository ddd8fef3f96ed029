// The table of runs, their events, and their configuration with its differences.
"use strict";

function drawRuns(host) {
  if (!Store.runs.length) {
    const text = Store.reading ? "Reading …" : `No run in ${Store.folders} yet. It appears here once fastdiff train has started one.`;
    host.replaceChildren(el("p", { class: "empty" }, text));
    return;
  }
  const head = ["run", "state", "progress", "loss", "samples/s", "time left", "validation loss"];
  const table = host.querySelector("table") ?? el("table", { class: "runs" }, el("thead", {}, el("tr", {}, head.map((name, n) => el("th", { class: n > 2 ? "n" : "" }, name)))), el("tbody", {}));
  updateChildren(table.tBodies[0], Store.runs, (run) => run.key, runRow, setRow);
  if (!table.isConnected) host.replaceChildren(table);
}

function runRow(run) {
  const box = el("input", { type: "checkbox", onchange: () => showRun(run, box.checked) });
  const name = el("th", { scope: "row" }, el("label", { title: run.path }, box, el("i", { class: "swatch", style: { background: colourOf(run) } }), el("span", {}, run.name)));
  return el("tr", {}, name, el("td", {}), el("td", {}), el("td", { class: "n", "data-name": "loss" }), el("td", { class: "n", "data-name": "samples/s" }), el("td", { class: "n", "data-name": "left" }), el("td", { class: "n", "data-name": "validation" }));
}

function setRow(row, run) {
  const [name, state, progress, loss, rate, left, validation] = row.cells;
  const { last, steps, samples } = run.state;
  const { kind, text } = run.unreadable ? { kind: "unreadable", text: run.unreadable } : run.state;
  name.querySelector("input").checked = run.shown;
  row.className = `state-${kind}`;
  const isOn = kind === "running" || kind === "waiting";
  const isTold = kind === "running" || kind === "done" || (run.shown && run.state.message); // the message stands above the cards
  state.replaceChildren(el("span", { class: `chip ${kind}`, title: text }, kind), isTold ? "" : el("span", { class: "why" }, text));
  progress.replaceChildren(...(last.step === null && !isOn ? ["no record"] : progressOf(last.step ?? 0, steps)));
  loss.textContent = number(last.loss);
  rate.textContent = number(last.samples_per_s);
  left.textContent = kind === "running" && samples && last.samples_per_s ? duration((samples - last.samples) / last.samples_per_s) : "–";
  const newest = run.validation?.at(-1);
  validation.textContent = newest ? `${number(newest.val_loss)} ± ${number(newest.val_loss_se, 2)}` : "–";
}

function progressOf(step, steps) {
  if (!steps) return [`step ${count(step)}`];
  return [el("progress", { max: steps, value: Math.min(step, steps), "aria-label": "progress" }), ` step ${count(step)} of ${count(steps)}`];
}

function showRun(run, isShown) {
  run.shown = isShown;
  draw();
  if (isShown) Live.read(run);
}

/** What happened in the shown runs, newest first. */
function drawEvents(host) {
  const events = shownRuns().flatMap(eventsOf).sort((a, b) => b.step - a.step);
  if (!events.length) return empty(host, "No restart, spike, skipped step or damaged sample.");
  const rows = events.slice(0, 200).map((event) => el("tr", {},
    el("td", { class: "n" }, count(event.step)), el("td", { class: "name" }, el("i", { class: "swatch", style: { background: colourOf(event.run) } }), event.run.name),
    el("td", {}, event.what, event.more ? el("div", { class: "keys" }, event.more) : null)));
  const more = events.length > 200 ? el("p", { class: "note" }, `and ${count(events.length - 200)} earlier ones`) : null;
  host.replaceChildren(...[el("div", { class: "wide-table" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "n" }, "step"), el("th", {}, "run"), el("th", {}, "event, samples"))), el("tbody", {}, rows))), more].filter(Boolean));
}

function eventsOf(run) {
  const keys = (one) => (one.keys ?? []).slice(0, 4).join(", ") + ((one.keys?.length ?? 0) > 4 ? " …" : "");
  const { spikes, skipped, damaged } = run.events ?? { spikes: { last: [] }, skipped: { last: [] }, damaged: { last: [] } };
  const starts = laterStarts(run).map(({ start, n }) => ({
    run, step: start.resumed, what: `start ${n + 2} on ${start.nodes.length} rank${start.nodes.length === 1 ? "" : "s"}, ${clock(start.began)}; before it: ${run.time.starts[n].outcome || "killed"}, ${count(run.time.starts[n].steps_lost)} steps lost`, more: "",
  }));
  return [
    ...starts,
    ...spikes.last.map((one) => (one.rewound_to === undefined
      ? { run, step: one.step, what: `spike: loss ${number(one.loss)}, threshold ${number(one.threshold)} (${one.policy})`, more: keys(one) }
      : { run, step: one.step, what: `rewound to step ${count(one.rewound_to)}`, more: [one.first_key, one.last_key].filter(Boolean).join(" to ") })),
    ...skipped.last.map((one) => ({ run, step: one.step, what: "skipped: not finite", more: keys(one) })),
    ...damaged.last.map((one) => ({ run, step: one.step, what: `damaged sample replaced: ${one.reason ?? ""}`, more: one.key ?? "" })),
  ];
}

/** What differs between the shown runs, and everything of each. */
function drawConfiguration(host) {
  const runs = shownRuns().filter((run) => run.about);
  if (!runs.length) return empty(host, "No configuration is recorded yet.");
  const key = runs.map((run) => `${run.key}${run.tags.about}${run.colour}`).join();
  if (host.dataset.key === key) return; // the reader may have opened a part
  host.dataset.key = key;
  const flat = runs.map((run) => flatten(run.about.config));
  host.replaceChildren(...(runs.length > 1 ? [differences(runs, flat)] : []), ...runs.map((run, n) => whole(run, flat[n], runs.length > 1)));
}

function differences(runs, flat) {
  const names = [...new Set(flat.flatMap(Object.keys))].filter((name) => name !== "output.folder" && new Set(flat.map((one) => value(one[name]))).size > 1);
  if (!names.length) return el("p", {}, "The configurations differ in nothing but their folders.");
  const head = el("tr", {}, el("th", {}, "differs"), runs.map((run) => el("th", {}, el("i", { class: "swatch", style: { background: colourOf(run) } }), run.name)));
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), flat.map((one) => el("td", {}, value(one[name])))));
  return el("div", { class: "wide-table" }, el("table", { class: "differences" }, el("thead", {}, head), el("tbody", {}, rows)));
}

function whole(run, flat, isNamed) {
  const { argv, versions, git, device, deepspeed } = run.about;
  const list = (found) => el("dl", {}, Object.entries(found).map(([name, one]) => el("div", {}, el("dt", {}, name), el("dd", {}, value(one)))));
  return el("details", {},
    el("summary", {}, isNamed ? [el("i", { class: "swatch", style: { background: colourOf(run) } }), run.name] : "Everything"),
    el("p", {}, el("code", {}, (argv ?? []).join(" ") || "no flags")), el("h3", {}, "configuration"), list(flat),
    el("h3", {}, "machine"), list({ device: device ?? "–", commit: git ?? "–", ...versions }), el("h3", {}, "DeepSpeed"), list(flatten(deepspeed)));
}
