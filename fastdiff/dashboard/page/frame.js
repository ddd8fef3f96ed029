// The frame of a plot: axes with units, a cursor that all plots share, zoom, and the box with the values under it.
"use strict";

const MARGIN = { top: 10, right: 12, bottom: 34, left: 64 };
const cursors = new Set();
const Drag = { isOn: false, isDue: false }; // whether a zoom is being drawn, and whether the page waits for its end
const tip = el("div", { id: "tip", role: "tooltip", hidden: true });

/** A frame of a fixed height within `host`; the scales are made for its width. */
function makeFrame(host, { height, label, bottom = MARGIN.bottom, left = MARGIN.left }) {
  const width = Math.max(240, Math.round(host.clientWidth || host.parentElement?.clientWidth || 600));
  const box = { left, top: MARGIN.top, right: width - MARGIN.right, bottom: height - bottom };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": label });
  const clip = `clip-${makeFrame.made = (makeFrame.made ?? 0) + 1}`;
  root.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 2, width: box.right - box.left + 5, height: box.bottom - box.top + 4 })));
  const below = svg("g", { class: "axes" });
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  const above = svg("g", { class: "above" });
  root.append(below, inside, above);
  host.replaceChildren(root);
  return { host, root, below, inside, above, box, width, height };
}

function drawBottomAxis(frame, scale, label, words = tick) {
  const { box, below } = frame;
  const ticks = scale.ticks(Math.max(2, Math.floor((box.right - box.left) / 80)));
  for (const one of ticks) {
    const x = scale(one);
    if (!(x >= box.left - 0.5 && x <= box.right + 0.5)) continue;
    below.append(svg("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }));
    const isLast = x > box.right - 16;
    below.append(svg("text", { x: isLast ? box.right + MARGIN.right - 1 : x, y: box.bottom + 16, "text-anchor": isLast ? "end" : "middle" }, words(one)));
  }
  below.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  below.append(svg("text", { class: "label", x: (box.left + box.right) / 2, y: box.bottom + 31, "text-anchor": "middle" }, label));
}

function drawLeftAxis(frame, scale, label, words = tick) {
  const { box, below } = frame;
  let before = Infinity;
  for (const one of scale.ticks(Math.max(2, Math.floor((box.bottom - box.top) / 36)))) {
    const y = scale(one);
    if (!(y >= box.top - 0.5 && y <= box.bottom + 0.5) || before - y < 20) continue;
    before = y;
    below.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
    below.append(svg("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, words(one)));
  }
  const middle = (box.top + box.bottom) / 2;
  below.append(svg("text", { class: "label", "text-anchor": "middle", transform: `translate(11 ${middle}) rotate(-90)` }, label));
}

/** Show values at the pointer; `at(x, y)` returns the lines of the box, or null, `place` the cursor on the shared axis. */
function follow(frame, { at, scale, isShared }) {
  const { root, box, above, width } = frame;
  const line = svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  above.append(line);
  const show = (value) => {
    const x = value === null ? NaN : scale(value);
    const isInside = x >= box.left && x <= box.right;
    line.setAttribute("visibility", isInside ? "visible" : "hidden");
    if (isInside) fill(line, { x1: x, x2: x }, []);
  };
  if (isShared) cursors.add({ root, show });
  const everywhere = (value) => {
    if (!isShared) return show(value);
    for (const cursor of cursors) cursor.root.isConnected ? cursor.show(value) : cursors.delete(cursor);
  };
  const place = (event) => {
    const bounds = root.getBoundingClientRect();
    return [((event.clientX - bounds.left) / bounds.width) * width, ((event.clientY - bounds.top) / bounds.width) * width];
  };
  root.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    const isInside = x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;
    const lines = isInside ? at(scale.invert(x), y) : null;
    everywhere(lines ? scale.invert(x) : null);
    showTip(event, lines);
  });
  root.addEventListener("pointerleave", () => {
    everywhere(null);
    showTip(null, null);
  });
  if (isShared) zoomBy(frame, scale, place);
}

function zoomBy({ root, box, above }, scale, place) {
  let from = null;
  const band = svg("rect", { class: "zoom", y: box.top, height: box.bottom - box.top, visibility: "hidden" });
  above.append(band);
  const within = (x) => Math.min(box.right, Math.max(box.left, x));
  root.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    if (event.pointerType !== "mouse" || event.button || x < box.left || x > box.right || y > box.bottom) return;
    from = x;
    Drag.isOn = true;
    root.setPointerCapture(event.pointerId);
  });
  root.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const ends = [from, within(place(event)[0])].sort((a, b) => a - b);
    fill(band, { x: ends[0], width: ends[1] - ends[0], visibility: "visible" }, []);
  });
  root.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const ends = [from, within(place(event)[0])].sort((a, b) => a - b);
    if (ends[1] - ends[0] > 8) setZoom(ends.map(scale.invert));
  });
  // It comes after each drag, also after one that the system has broken off.
  root.addEventListener("lostpointercapture", () => {
    from = null;
    band.setAttribute("visibility", "hidden");
    Drag.isOn = false;
    if (Drag.isDue) draw();
    Drag.isDue = false;
  });
  root.addEventListener("dblclick", () => setZoom(null));
}

function setZoom(zoom) {
  Store.zoom = zoom;
  draw();
}

function showTip(event, lines) {
  tip.hidden = !lines;
  if (!lines) return;
  tip.replaceChildren(...lines.map((line) => (typeof line === "string" ? el("div", {}, line) : tipLine(line))));
  const bounds = tip.getBoundingClientRect();
  const right = event.clientX + 16 + bounds.width > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - 16 - bounds.width : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - bounds.height - 4, event.clientY + 12))}px`;
}

function tipLine({ colour, name, text }) {
  return el("div", {}, el("i", { class: "swatch", style: { background: colour } }), el("span", {}, name), el("b", {}, text));
}

addEventListener("scroll", () => showTip(null, null), { passive: true });
