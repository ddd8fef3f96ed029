// Sample pictures: those of all runs at one step beside one another, a strip of all steps, and prompts side by side.
"use strict";

const THUMB = 160;
const CLASS_ROWS = 8, BORDER = 2; // of a grid of classes
const MOST_ENLARGED = 8, HIGHEST_VH = 75, SMALL = 300; // times, percent of the window, pixels whose enlargement stays sharp
let playing = null;

const addressOf = (run, picture, width) => picture.data ?? `runs/${run.key}/pictures/${picture.step}?changed=${picture.changed}${width ? `&width=${width}` : ""}`;
const withPictures = () => shownRuns().filter((run) => run.pictures?.length);
const stepsOfPictures = (runs) => [...new Set(runs.flatMap((run) => run.pictures.map((one) => one.step)))].sort((a, b) => a - b);
const isOfText = (run) => Boolean(run.about?.config?.model?.cross_attention_dim);
const promptsOf = (run) => run.about?.config?.validation?.prompts ?? [];

/** The newest picture of a run up to a step; its first if there is none. */
function pictureAt(run, step) {
  const place = placeOf(run.pictures.map((one) => one.step), step);
  return run.pictures[Math.max(0, place)];
}

function drawFilmStrip(host) {
  const runs = withPictures();
  if (!runs.length) {
    if (playing) pause(host.strip.play);
    return empty(host, whyNoPictures());
  }
  const steps = stepsOfPictures(runs);
  const isNewest = Store.step === null || Store.step >= steps.at(-1);
  const place = isNewest ? steps.length - 1 : Math.max(0, placeOf(steps, Store.step));
  const parts = host.strip ?? makeStrip(host);
  fill(parts.slider, { max: steps.length - 1 }, []);
  parts.slider.value = place;
  parts.slider.disabled = steps.length < 2;
  parts.play.disabled = steps.length < 2;
  parts.name.textContent = `step ${count(steps[place])} (${place + 1} of ${steps.length})`;
  parts.note.textContent = runs.map(leftOut).filter(Boolean).join(" ");
  updateChildren(parts.large, runs, (run) => run.key, largePicture, (figure, run) => setLarge(figure, run, pictureAt(run, steps[place])));
  const first = runs[0];
  updateChildren(parts.film, first.pictures, (one) => `${first.key}-${one.step}-${one.changed}`, (one) => thumbnail(first, one), (button, one) => {
    const isNow = one === pictureAt(first, steps[place]);
    button.setAttribute("aria-pressed", isNow);
    if (isNow && !button.wasNow) parts.film.scrollLeft = button.offsetLeft - parts.film.clientWidth / 2;
    button.wasNow = isNow;
  });
}

function whyNoPictures() {
  const run = shownRuns()[0];
  const config = run?.about?.config;
  if (!config) return "No picture yet.";
  const isText = isOfText(run), it = shownRuns().length > 1 ? run.name : "This run";
  const every = isText ? config.validation?.every : config.output?.sample_every;
  if (isText && !promptsOf(run).length) return `${it} draws no pictures: it has no --validation.prompts or --validation.captions.`;
  if (config.model?.low_res_size) return `${it} draws no pictures: super-resolution starts from small images, which fastdiff sample takes with --low-res.`;
  if (!every) return `${it} draws no pictures (${isText ? "--validation.every" : "--output.sample_every"} 0).`;
  return `No picture${whenFirst(run, (isText && config.validation.first) || every)}`;
}

/** When a run that does something every so many steps, and at its end, does it first; in its past, that it did not. */
function whenFirst(run, every) {
  const { kind, steps, last } = run.state;
  const first = Math.min(every, steps ?? Infinity);
  if (kind === "running" || kind === "waiting") return ` yet: the first comes after step ${count(first)}${first === steps ? ", the last one" : ""}.`;
  if (last.step >= first) return `: its files have none, though the first comes after step ${count(first)}.`;
  return `: the first comes after step ${count(first)}, and this run ${kind === "done" ? "is done" : "has not come so far"}.`;
}

/** What of the pictures of a run a report leaves out. */
function leftOut(run) {
  const { count: all, smaller, width } = run.picturesLeftOut ?? { count: 0, smaller: 0 };
  const several = withPictures().length > 1 ? `${run.name}: ` : "";
  const { unreadable } = run.picturesLeftOut ?? {};
  const parts = [unreadable?.length ? `not readable: ${unreadable.join("; ")}` : "", all > run.pictures.length ? `${count(run.pictures.length)} of ${count(all)} pictures` : "", smaller ? `${count(smaller)} made smaller, ${count(width)} pixels wide` : ""].filter(Boolean);
  return parts.length ? `${several}${parts.join("; ")}.` : "";
}

function makeStrip(host) {
  const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "step of the pictures" });
  const play = el("button", { type: "button", "aria-pressed": "false" }, "Play");
  const name = el("output", {}), note = el("p", { class: "note" });
  const large = el("div", { class: "large" }), film = el("div", { class: "film" });
  const steps = () => stepsOfPictures(withPictures());
  slider.addEventListener("input", () => showStep(steps()[slider.value]));
  play.addEventListener("click", () => (playing ? pause(play) : start(play, slider, steps)));
  host.replaceChildren(el("div", { class: "bar" }, play, slider, name), note, large, film);
  host.strip = { slider, play, name, note, large, film };
  return host.strip;
}

function showStep(step) {
  const last = stepsOfPictures(withPictures()).at(-1);
  Store.step = step >= last ? null : step;
  drawFilmStrip(document.getElementById("samples"));
}

function start(play, slider, steps) {
  if (+slider.value >= steps().length - 1) showStep(steps()[0]);
  play.textContent = "Pause";
  playing = setInterval(() => {
    const next = +slider.value + 1;
    showStep(steps()[Math.min(next, steps().length - 1)]);
    if (next >= steps().length - 1) pause(play);
  }, 400);
}

function pause(play) {
  clearInterval(playing);
  playing = null;
  play.textContent = "Play";
}

function largePicture() {
  return el("figure", {}, el("figcaption", {}), el("div", { class: "picture" }, el("img", { alt: "" }), el("div", { class: "columns" })));
}

function setLarge(figure, run, picture) {
  const [caption, frame] = figure.children;
  const [image, columns] = frame.children;
  const text = `${run.name}, step ${count(picture.step)}`;
  caption.replaceChildren(el("i", { class: "swatch", style: { background: colourOf(run) } }), text);
  const address = addressOf(run, picture);
  if (image.getAttribute("src") !== address) fill(image, { src: address, alt: `samples of ${text}`, width: picture.width, height: picture.height }, []);
  const names = columnNames(run, picture);
  const { width, height } = picture;
  frame.style.maxWidth = `min(${MOST_ENLARGED * width}px, ${((HIGHEST_VH * width) / height).toFixed(2)}vh)`; // as wide as the card, and no higher than the window
  image.classList.toggle("small", width < SMALL);
  columns.style.gridTemplateColumns = `repeat(${Math.max(1, names.length)}, 1fr)`;
  columns.replaceChildren(...names.map((name) => el("span", {}, name)));
}

/** What the columns of a picture are: prompts, or classes, unless their names stand above them in the picture. */
function columnNames(run, { width, height, layout }) {
  if (layout) return [];
  if (promptsOf(run).length) return promptsOf(run);
  const columns = Math.min(10, run.about?.config?.model?.classes ?? 0);
  const names = run.about?.class_names ?? [];
  const bare = ((width - BORDER) / columns) * CLASS_ROWS + BORDER;
  if (!columns || Math.abs(height - bare) > (names.length ? 1 : height / 10)) return [];
  return [...Array(columns).keys()].map((one) => names[one] ?? `class ${one}`);
}

function thumbnail(run, picture) {
  const step = count(picture.step);
  const image = picture.whole && !picture.data ? el("i", { class: "too-large" }, "large") : el("img", { src: addressOf(run, picture, THUMB), alt: `samples at step ${step}`, loading: "lazy", width: picture.width, height: picture.height });
  return el("button", { type: "button", onclick: () => showStep(picture.step) }, image, el("span", {}, step));
}

/** Keep one child per item, in order, without making those anew that are there. */
function updateChildren(host, items, keyOf, make, update) {
  const known = new Map([...host.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => {
    const key = keyOf(item);
    const child = known.get(key) ?? make(item);
    child.dataset.key = key;
    return child;
  });
  if (wanted.some((child, n) => host.children[n] !== child) || host.children.length !== wanted.length) host.replaceChildren(...wanted);
  items.forEach((item, n) => update(wanted[n], item));
}

const MOST_IMAGES = 64, FEWEST_COLUMNS = 4;
const imagesOf = (run) => run.about?.config?.validation?.images_per_prompt || 1;

/** The number of the image to show; the choice has as many as the run that draws the most. */
function chosenImage() {
  const choice = document.getElementById("image");
  const most = Math.min(MOST_IMAGES, Math.max(1, ...withPictures().filter((run) => promptsOf(run).length).map(imagesOf)));
  const chosen = Math.min(+choice.value, most - 1);
  if (choice.options.length !== most) choice.replaceChildren(...[...Array(most).keys()].map((n) => el("option", { value: n, selected: n === chosen }, `image ${n + 1}`)));
  return chosen;
}

/** A row per prompt and run, a column per step: the same noise, drawn by ever later weights. */
function drawPrompts(host, image) {
  const runs = withPictures().filter((run) => promptsOf(run).length);
  const key = JSON.stringify([image, runs.map((run) => [run.key, run.name, run.colour, imagesOf(run), promptsOf(run), run.pictures.map((one) => [one.step, one.changed])])]);
  if (host.dataset.key === key) return; // its pictures are large in a report
  host.dataset.key = key;
  const blocks = runs.flatMap((run) => promptsOf(run).map((prompt, column) => {
    const chosen = spread(run.pictures, 6);
    const base = chosen.findLast((picture) => picture.layout?.columns.length > 1);
    const cells = chosen.map((picture) => el("figure", {}, crop(run, picture, column, image), el("figcaption", {}, `step ${count(picture.step)}`)));
    if (base) cells.unshift(el("figure", {}, crop(run, base, column, image, 0), el("figcaption", {}, base.layout.columns[0])));
    const columns = { "--columns": Math.max(FEWEST_COLUMNS, cells.length) };
    return el("div", { class: "prompt", style: columns }, el("h3", {}, el("i", { class: "swatch", style: { background: colourOf(run) } }), prompt, runs.length > 1 ? el("small", {}, run.name) : null), el("div", { class: "steps" }, cells));
  }));
  host.replaceChildren(...blocks);
}

const spread = (items, most) => items.filter((_, n) => items.length <= most || [...Array(most).keys()].some((k) => Math.round((k * (items.length - 1)) / (most - 1)) === n));

/** One image of a picture: of a prompt, the how many-th, and of which labelled column, the last one unless given. */
function crop(run, picture, prompt, row, column) {
  const [x, y, width, height] = boxOf(run, picture, prompt, row, column);
  const share = (from, all, side) => (all > side ? `${Math.min(100, (100 * from) / (all - side))}%` : "0");
  return el("div", {
    class: width < SMALL ? "crop small" : "crop", role: "img", "aria-label": `${promptsOf(run)[prompt]}, ${column === 0 ? "base" : `step ${picture.step}`}`,
    style: {
      "background-image": `url("${addressOf(run, picture)}")`, "background-size": `${(100 * picture.width) / width}% ${(100 * picture.height) / height}%`,
      "background-position": `${share(x, picture.width, width)} ${share(y, picture.height, height)}`, "aspect-ratio": `${width} / ${height}`,
    },
  });
}

/** Left, top, width and height of an image in pixels; a picture without a layout has a column per prompt. */
function boxOf(run, picture, prompt, row, column) {
  const prompts = promptsOf(run).length, rows = imagesOf(run), { layout } = picture;
  if (layout) {
    const [left, top] = layout.first[Math.min(prompt, layout.first.length - 1)], [right, down] = layout.pitch;
    const place = Math.min(column ?? layout.columns.length - 1, layout.columns.length - 1);
    return [left + place * right, top + Math.min(row, rows - 1) * down, ...layout.side];
  }
  const width = picture.width / prompts, height = picture.height / rows;
  return [prompt * width, Math.min(row, rows - 1) * height, width, height];
}
