// Charts of every page, in the colours of theme.css: lines over steps, bars over time, a canvas, and the note beside the pointer.

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Round numbers between two values, at least `smallest` apart.
export function ticks(low, high, count, smallest = 0) {
  const raw = Math.max((high - low) / count || 1, smallest), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(k => k * power).find(s => s >= raw * (1 - 1e-9)), result = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) result.push(n * step);
  return result;
}

export const short = n => Math.abs(n) >= 1e4 || (n && Math.abs(n) < 1e-3) ? n.toExponential(2) : String(+n.toPrecision(4));
export const seconds = s => s === 0 ? "0 s" : s >= 1e5 ? `${+(s / 86400).toPrecision(3)} d` : s >= 7200 ? `${+(s / 3600).toPrecision(3)} h` : s >= 1 ? `${+s.toPrecision(4)} s` : `${+(1e3 * s).toPrecision(4)} ms`;
export const color = name => getComputedStyle(document.documentElement).getPropertyValue(name);

const note = document.createElement("div");
note.setAttribute("role", "status");
Object.assign(note.style, {
  position: "fixed", display: "none", pointerEvents: "none", zIndex: 2, maxWidth: "90vw", whiteSpace: "pre-wrap", padding: "6px 10px",
  borderRadius: "6px", font: "12px system-ui, sans-serif", background: "var(--ink)", color: "var(--paper)",
});
export function tell(text, event) {
  if (!note.isConnected) document.body.append(note);
  note.textContent = text; note.style.display = text ? "block" : "none";
  note.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - note.offsetWidth - 8))}px`;
  note.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - note.offsetHeight - 8))}px`;
}
// A finger tells by touching and a mouse by moving; `textAt` gives the text for an event, or nothing.
export function tellAt(target, textAt) {
  for (const kind of ["pointerdown", "pointermove"]) target.addEventListener(kind, event => tell(textAt(event) || "", event));
  target.addEventListener("pointerleave", event => tell("", event));
}

// The context of a canvas as wide as its box, in units of the page.
export function pen(canvas, tall) {
  const ratio = devicePixelRatio || 1, context = canvas.getContext("2d");
  canvas.style.height = `${tall}px`; canvas.width = canvas.clientWidth * ratio; canvas.height = tall * ratio;
  context.setTransform(ratio, 0, 0, ratio, 0, 0); context.font = "12px system-ui, sans-serif";
  return context;
}

const text = (x, y, content, more = {}) => svg("text", {x, y, fill: "var(--soft)", "font-size": 12, "font-family": "system-ui, sans-serif", ...more}, content);
const picture = (wide, tall, label) => svg("svg", {viewBox: `0 0 ${wide} ${tall}`, width: "100%", role: "img", "aria-label": label});
const nearest = (points, at) => points.reduce((a, b) => !a || Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a, null);

// curves: [{name, color, line: [[step, value], …], dots: [[step, value], …]}], values that are null are left out. Null where there is nothing.
export function lineChart(curves, {wide, title, across = "optimizer step", log = false}) {
  const usable = points => (points || []).filter(([, y]) => y !== null && (!log || y > 0));
  const lines = curves.map(c => ({...c, line: usable(c.line), dots: usable(c.dots)})).filter(c => c.line.length || c.dots.length);
  if (!lines.length) return null;
  const tall = Math.round(Math.min(380, Math.max(240, wide * 0.4))), left = 58, right = 12, top = 26, bottom = 40;
  const label = title + (lines.some(c => c.dots.length) ? ", dots: held-out" : "");
  const points = lines.flatMap(c => [...c.line, ...c.dots]), f = log ? Math.log10 : v => v, last = Math.max(...points.map(p => p[0]), 1);
  let low = Math.min(...points.map(p => f(p[1]))), high = Math.max(...points.map(p => f(p[1])));
  const pad = (high - low || Math.abs(high) || 1) * 0.04; low -= pad; high += pad;
  const x = step => left + step / last * (wide - left - right), y = value => top + (high - f(value)) / (high - low) * (tall - top - bottom);
  const drawing = picture(wide, tall, label);
  drawing.style.touchAction = "pan-y";
  for (const at of ticks(low, high, 5)) {
    const value = log ? 10 ** at : at;
    drawing.append(svg("line", {x1: left, x2: wide - right, y1: y(value), y2: y(value), stroke: "var(--line)"}), text(left - 6, y(value) + 4, short(value), {"text-anchor": "end"}));
  }
  for (const at of ticks(0, last, wide < 500 ? 4 : 8, 1)) drawing.append(text(x(at), tall - bottom + 16, short(at), {"text-anchor": "middle"}));
  drawing.append(text(4, 14, label, {fill: "var(--ink)"}), text(wide - right, tall - 6, across, {"text-anchor": "end"}));
  for (const c of lines) {
    drawing.append(svg("path", {d: c.line.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join(""), fill: "none", stroke: c.color, "stroke-width": 1.8}));
    for (const p of c.dots) drawing.append(svg("circle", {cx: x(p[0]), cy: y(p[1]), r: 4, fill: c.color}));
  }
  const cursor = drawing.appendChild(svg("line", {y1: top, y2: tall - bottom, stroke: "var(--soft)", "stroke-dasharray": "3 3", visibility: "hidden"}));
  tellAt(drawing, event => {
    const box = drawing.getBoundingClientRect();
    const step = Math.round(((event.clientX - box.left) / box.width * wide - left) / (wide - left - right) * last), inside = step >= 0 && step <= last;
    cursor.setAttribute("visibility", inside ? "visible" : "hidden");
    if (!inside) return "";
    cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step));
    const rows = lines.map(c => [c.name, nearest(c.line, step), nearest(c.dots, step)]);
    return [`step ${step}`, ...rows.map(([name, p, dot]) => `${name}  ${p ? short(p[1]) : ""}${dot ? `  held-out ${short(dot[1])} (step ${dot[0]})` : ""}`)].join("\n");
  });
  drawing.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
  return drawing;
}

// spans: [{row, from, to, name, color}], times in seconds. Null where there are none.
export function spanChart(spans, {wide, title}) {
  if (!spans.length) return null;
  const rows = [...new Set(spans.map(span => span.row))], left = 110, right = 12, step = 22, tall = rows.length * step + 26;
  const from = Math.min(...spans.map(span => span.from)), to = Math.max(...spans.map(span => span.to), from + 1);
  const x = at => left + (at - from) / (to - from) * (wide - left - right), drawing = picture(wide, tall, title);
  rows.forEach((row, n) => drawing.append(text(0, n * step + 15, row.length > 16 ? `${row.slice(0, 15)}…` : row)));
  for (const span of spans) {
    const wide = Math.max(2, x(span.to) - x(span.from)), label = `${span.name}\n${seconds(span.to - span.from)}`;
    const bar = svg("rect", {x: x(span.from), y: rows.indexOf(span.row) * step + 3, width: wide, height: step - 6, rx: 3, fill: span.color}, svg("title", {}, label));
    tellAt(bar, () => label);
    drawing.append(bar);
  }
  for (const at of ticks(0, to - from, wide < 500 ? 3 : 8)) drawing.append(text(x(from + at), tall - 6, seconds(at), {"text-anchor": "middle"}));
  return drawing;
}
