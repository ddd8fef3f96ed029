// The loss by noise level over steps as a map of colours, and the colours themselves.
"use strict";

// Anchors of viridis (Smith and van der Walt, matplotlib; CC0) and of a blue-white-red scale, both even in lightness.
const VIRIDIS = ["440154", "482878", "3e4a89", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"];
const DIVERGING = ["2166ac", "4393c3", "92c5de", "d1e5f0", "f7f7f7", "fddbc7", "f4a582", "d6604d", "b2182b"];

function colourAt(anchors, share) {
  const place = Math.min(anchors.length - 1.001, Math.max(0, share * (anchors.length - 1)));
  const part = place % 1;
  const channel = (text, n) => parseInt(text.slice(2 * n, 2 * n + 2), 16);
  const [from, to] = [anchors[Math.floor(place)], anchors[Math.floor(place) + 1]];
  return [0, 1, 2].map((n) => Math.round(channel(from, n) * (1 - part) + channel(to, n) * part));
}

const BIN = (n) => `loss_snr_${String(n).padStart(2, "0")}`;

/** Rows of a run from most to least noise: `[bin][point]`, as losses or as logarithms of their ratio to the row's mean. */
function heatRows(run, isRelative) {
  const bins = (run.snrEdges?.length ?? 0) + 1;
  const [from, to] = visibleRange();
  const x = xOf(run);
  return [...Array(bins).keys()].map((bin) => {
    const row = run.columns[BIN(bin)]?.mean ?? [];
    if (!isRelative) return row;
    const logs = row.map((one, n) => (one > 0 && x[n] >= from && x[n] <= to ? Math.log(one) : null)).filter((one) => one !== null);
    const middle = logs.reduce((sum, one) => sum + one, 0) / (logs.length || 1);
    return row.map((one) => (one > 0 ? Math.log(one) - middle : null));
  });
}

/** The scale of colours that all maps of the page share. */
function heatScale(rowsOfRuns, isRelative) {
  const values = rowsOfRuns.flat(2).filter((one) => one !== null && one !== undefined && (isRelative || one > 0)).sort((a, b) => a - b);
  if (!values.length) return null;
  const at = (share) => values[Math.round(share * (values.length - 1))];
  if (isRelative) {
    const most = Math.max(0.01, -at(0.02), at(0.98));
    return { anchors: DIVERGING, share: (one) => 0.5 + one / (2 * most), at: (share) => (share - 0.5) * 2 * most, words: ratio };
  }
  const [low, high] = [Math.log(at(0.005)), Math.log(at(0.995))];
  const span = high - low || 1;
  return { anchors: VIRIDIS, share: (one) => (Math.log(one) - low) / span, at: (share) => Math.exp(low + share * span), words: number };
}

/** A logarithm of a ratio as a change in percent. */
function ratio(one) {
  const change = Math.round(100 * Math.expm1(one));
  return `${change > 0 ? "+" : change < 0 ? "−" : ""}${Math.abs(change)} %`;
}

function drawHeatMap(host, run, rows, scale) {
  const frame = makeFrame(host, { height: 236, label: `loss by noise level of ${run.name}` });
  const { box, inside, below } = frame;
  const bottom = linear(visibleRange(), [box.left, box.right]);
  const columns = Math.max(1, Math.round(box.right - box.left));
  inside.append(svg("image", {
    class: "heat", x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top,
    preserveAspectRatio: "none", href: paint(run, rows, scale, bottom, columns),
  }));
  drawBottomAxis(frame, bottom, Store.axis === "step" ? "optimizer steps" : "samples");
  const height = (box.bottom - box.top) / rows.length;
  run.snrEdges.forEach((edge, n) => {
    if (n % 4 !== 3) return;
    const y = box.bottom - (n + 1) * height; // the least noise is at the top
    below.append(svg("line", { x1: box.left - 4, x2: box.left, y1: y, y2: y }), svg("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, tick(edge)));
  });
  const middle = (box.top + box.bottom) / 2;
  below.append(svg("text", { class: "label", "text-anchor": "middle", transform: `translate(11 ${middle}) rotate(-90)` }, "log SNR (up: less noise)"));
  follow(frame, { at: (at, y) => heatAt(run, rows, scale, at, Math.min(rows.length - 1, Math.max(0, Math.floor((box.bottom - y) / height)))), scale: bottom, isShared: true });
}

/** A picture with one pixel per screen column and bin; what has no value stays transparent. */
function paint(run, rows, scale, bottom, columns) {
  const canvas = el("canvas", { width: columns, height: rows.length });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows.length);
  const x = xOf(run);
  for (let column = 0; column < columns; column++) {
    const at = bottom.invert(MARGIN.left + column + 0.5);
    const place = placeOf(x, at) + 1; // a record is of the steps up to its own
    if (place >= x.length) break;
    rows.forEach((row, bin) => {
      const one = row[place];
      if (one === null || one === undefined || (scale.anchors === VIRIDIS && one <= 0)) return;
      pixels.data.set([...colourAt(scale.anchors, scale.share(one)), 255], 4 * ((rows.length - 1 - bin) * columns + column));
    });
  }
  context.putImageData(pixels, 0, 0);
  return canvas.toDataURL();
}

function heatAt(run, rows, scale, at, bin) {
  const place = Math.min(placeOf(xOf(run), at) + 1, xOf(run).length - 1);
  const loss = run.columns[BIN(bin)]?.mean[place];
  const { snrEdges: edges } = run;
  const range = bin === 0 ? `below ${edges[0]}` : bin === edges.length ? `above ${edges.at(-1)}` : `${edges[bin - 1]} to ${edges[bin]}`;
  const lines = [`${Store.axis === "step" ? "step" : "sample"} ${count(xOf(run)[place])}, log SNR ${range.replaceAll("-", "−")}`];
  if (loss === null || loss === undefined) return [...lines, "no sample of this noise level"];
  lines.push({ colour: `rgb(${colourAt(scale.anchors, scale.share(rows[bin][place]))})`, name: "loss", text: number(loss) });
  if (scale.anchors === DIVERGING) lines.push(`${scale.words(rows[bin][place])} against the mean of its row`);
  return lines;
}

/** The key of the colours: a bar with its ends and its middle in numbers. */
function heatKey(scale) {
  const stops = scale.anchors.map((anchor) => `#${anchor}`).join(",");
  const ends = [0, 0.5, 1].map((share) => el("span", {}, scale.words(scale.at(share))));
  const what = scale.anchors === DIVERGING ? "against the mean of the row" : "loss";
  return el("div", { class: "heat-key" }, `${what}; without colour: no sample of this noise level`, el("div", { class: "colours", style: { background: `linear-gradient(to right, ${stops})` } }), el("div", { class: "ends" }, ends));
}
