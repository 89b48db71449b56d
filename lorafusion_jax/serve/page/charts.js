// Line charts and time lines as SVG.

const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(low, high, count, smallest = 0) {
  const raw = Math.max((high - low) / count || 1, smallest);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

// Drawn as wide as the page, so that text has the same size everywhere.
const pageWidth = () => Math.max(280, document.getElementById("main").clientWidth - 40);

const short = (n) => (Math.abs(n) >= 1000 ? `${+(n / 1000).toPrecision(3)}k` : String(+n.toPrecision(4)));

// curves: [{name, points: [[x, y], …], dots}]
export function chart(curves, label) {
  const all = curves.flatMap((curve) => curve.points).filter(([, y]) => y !== null);
  if (!all.length) return null;
  const width = pageWidth(), height = 240, left = 48, right = 12, top = 26, bottom = 26;
  let [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [y0, y1] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  if (x0 === x1) x1 = x0 + 1;
  const room = (y1 - y0) * 0.08 || Math.abs(y1) * 0.1 || 1;
  y0 -= room; y1 += room;
  const x = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
  const y = (v) => top + ((y1 - v) / (y1 - y0)) * (height - top - bottom);
  const svg = node("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
  const grid = node("g", {class: "grid"});
  for (const at of ticks(y0, y1, 4)) {
    grid.append(node("line", {x1: left, x2: width - right, y1: y(at), y2: y(at)}));
    grid.append(node("text", {x: left - 6, y: y(at) + 4, "text-anchor": "end"}, short(at)));
  }
  for (const at of ticks(x0, x1, width > 500 ? 8 : 4, 1)) grid.append(node("text", {x: x(at), y: height - 8, "text-anchor": "middle"}, short(at)));
  svg.append(grid);
  curves.forEach((curve, number) => {
    const points = curve.points.filter(([, value]) => value !== null);
    const path = points.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" ");
    svg.append(node("polyline", {points: path, class: `curve line${number}`}));
    if (curve.dots) for (const [px, py] of points) svg.append(node("circle", {cx: x(px), cy: y(py), r: 3, class: "dot"}));
    svg.append(node("text", {x: left + 130 * number, y: 12, class: `name${number}`}, `${curve.dots ? "●" : "—"} ${curve.name}`));
  });
  return svg;
}

// spans: [{row, from, to, name, kind}], times in seconds
export function timeline(spans, label) {
  if (!spans.length) return null;
  const rows = [...new Set(spans.map((span) => span.row))];
  const width = pageWidth(), left = 110, step = 22, top = 4, height = top + rows.length * step + 22;
  const from = Math.min(...spans.map((span) => span.from)), to = Math.max(...spans.map((span) => span.to), from + 1);
  const x = (v) => left + ((v - from) / (to - from)) * (width - left - 8);
  const svg = node("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
  rows.forEach((row, number) => svg.append(node("text", {x: 0, y: top + number * step + 15}, row.length > 16 ? `${row.slice(0, 15)}…` : row)));
  for (const span of spans) {
    const rect = node("rect", {
      x: x(span.from), y: top + rows.indexOf(span.row) * step + 3, height: step - 6, rx: 3,
      width: Math.max(2, x(span.to) - x(span.from)), fill: `var(--${{running: "accent", queued: "warn", paused: "line"}[span.kind] || "soft"})`,
    });
    rect.append(node("title", {}, span.name));
    svg.append(rect);
  }
  svg.append(node("text", {x: left, y: height - 4}, "0 s"));
  svg.append(node("text", {x: width - 8, y: height - 4, "text-anchor": "end"}, `${short(to - from)} s`));
  return svg;
}
