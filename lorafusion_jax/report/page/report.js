const $ = id => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const number = (value, digits = 4) => value == null ? "–" : Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : value.toFixed(digits);
const time = s => s == null ? "–" : s >= 3600 ? `${Math.floor(s / 3600)} h ${Math.round(s % 3600 / 60)} min` : s >= 60 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : `${s.toFixed(1)} s`;
const tokens = n => n >= 1e6 ? (n / 1e6).toFixed(1) + " M" : n >= 1e3 ? (n / 1e3).toFixed(1) + " k" : String(n);

// What the reader has chosen survives the page's own reloading.
const view = Object.assign({metric: "loss", smooth: 0, log: false, hidden: [], sort: "", down: false}, JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}"));
const keep = () => history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(view)));

// Of many adapters the page shows the best and the worst, unless the reader asks for all.
const adapterOf = new Map(data.adapters.map(a => [a.label, a]));
if (data.crowd) {
  const button = make("button", {"aria-pressed": Boolean(view.all)}, "show all");
  button.addEventListener("click", () => { view.all = !view.all; keep(); location.reload(); });
  $("crowd").append(make("ul", {class: "limits"}, ...data.crowd.lines.map(text => make("li", {}, text))), button);
  if (!view.all) data.adapters = data.crowd.shown.map(label => adapterOf.get(label));
}

// Runs: figures, and what limits their speed.
for (const run of data.runs) {
  const tiles = run.tiles.map(([name, value]) => make("div", {class: "tile"}, make("b", {}, value), make("span", {}, name)));
  const block = make("div", {class: "run"}, ...(data.several ? [make("b", {}, run.name)] : []), make("div", {class: "tiles"}, ...tiles));
  if (run.reason) block.append(make("p", {class: "bad"}, run.reason));
  block.append(make("ul", {class: "limits"}, ...run.limits.map(text => make("li", {}, text))));
  $("runs").append(block);
}

// Curves.
const WORDS = {loss: "training and held-out loss", grad_norm: "gradient norm", lr: "learning rate"};
const objectives = [...new Set(data.adapters.map(a => a.objective))];
const metrics = [...new Set(data.adapters.flatMap(a => Object.keys(a.series)))].filter(name => !name.startsWith("eval_"));
const held = new Set(data.adapters.flatMap(a => Object.keys(a.series)).filter(name => name.startsWith("eval_") && !metrics.includes(name.slice(5))));
for (const name of [...metrics, ...held]) $("metric").append(make("option", {value: name}, WORDS[name] || name));
if (![...metrics, ...held].includes(view.metric)) view.metric = metrics[0] || "";
$("metric").value = view.metric; $("smooth").value = view.smooth; $("log").checked = view.log;

const smoothed = points => {
  let mean = null, weight = 0;
  return points.map(([step, value]) => {
    mean = view.smooth * (mean ?? 0) + (1 - view.smooth) * value; weight = view.smooth * weight + 1 - view.smooth;
    return [step, mean / weight];
  });
};
// A chart for each objective: losses of different ones have no common scale.
function draw() {
  const shown = data.adapters.filter(a => !view.hidden.includes(a.label)), name = view.metric, wide = Math.max(320, $("chart").clientWidth || 900);
  const curves = shown.map(a => ({name: a.label, color: a.color, objective: a.objective, line: smoothed(a.series[name] || []), dots: a.series["eval_" + name]}));
  const groups = name === "lr" ? [curves] : objectives.map(o => curves.filter(c => c.objective === o));
  const charts = groups.map(group => {
    const title = (name !== "lr" && objectives.length > 1 && group.length ? `${group[0].objective}: ` : "") + (name === "loss" ? "loss" : WORDS[name] || name);
    return lineChart(group, {wide, title, log: view.log});
  }).filter(Boolean);
  $("chart").replaceChildren(...charts);
  if (!charts.length) $("chart").append(make("p", {}, "nothing recorded yet"));
}
for (const id of ["metric", "smooth", "log"]) $(id).addEventListener("input", () => { view.metric = $("metric").value; view.smooth = +$("smooth").value; view.log = $("log").checked; keep(); draw(); });

for (const adapter of data.adapters) {
  const dot = make("i", {class: "dot", style: `background:${adapter.color}`}), button = make("button", {"aria-pressed": !view.hidden.includes(adapter.label)}, dot, adapter.label);
  button.addEventListener("click", () => {
    view.hidden = view.hidden.includes(adapter.label) ? view.hidden.filter(n => n !== adapter.label) : [...view.hidden, adapter.label];
    button.setAttribute("aria-pressed", !view.hidden.includes(adapter.label)); keep(); draw();
  });
  $("legend").append(button);
}

// Settings as cells of tables.
const setting = value => value == null ? "–" : Array.isArray(value) ? value.join(", ") : String(value).replace(/[/_]/g, "$&\u200b");

// Rankings of adapters that can be compared: the first places, and all of them if the reader asks.
const FIRST_PLACES = 20;
const isNarrow = matchMedia("(max-width: 600px)").matches;  // a phone shows the results before the rest scrolls
const why = a => a.reason || a.stopped || (a.status === "done" ? "trained to its end" : a.status);
function ranking({measure, labels, placed, swept}) {
  const columns = [
    ["place", "text", (a, i) => [i < placed ? String(i + 1) : "–"]],
    ["adapter", "text", a => [make("i", {class: "dot", style: `background:${a.color}`}), a.label]],
    ...swept.map(key => [key, "text", a => [setting(a.settings[key])]]),
    [measure, "", a => [a.best ? `${number(a.best[1])} (step ${a.best[0]})` : "–"]],
    ["last step", "", a => [String(a.step)]],
    ["why", "text why", a => [why(a)]],
  ];
  if (isNarrow) columns.splice(1, 0, ...columns.splice(2 + swept.length, 1));
  const cells = columns.map(([name, kind]) => make("th", {class: kind}, name));
  const rows = labels.map((label, i) => {
    const a = adapterOf.get(label);
    return make("tr", a.is_best ? {class: "best"} : {}, ...columns.map(([, kind, children]) => make("td", {class: kind}, ...children(a, i))));
  });
  const body = make("tbody", {}, ...(view.ranked ? rows : rows.slice(0, FIRST_PLACES)));
  const block = [make("div", {class: "wide"}, make("table", {}, make("thead", {}, make("tr", {}, ...cells)), body))];
  if (rows.length > FIRST_PLACES) {
    const button = make("button", {"aria-pressed": Boolean(view.ranked)}, `all ${rows.length} places`);
    button.addEventListener("click", () => {
      view.ranked = !view.ranked; keep();
      button.setAttribute("aria-pressed", view.ranked); body.replaceChildren(...(view.ranked ? rows : rows.slice(0, FIRST_PLACES)));
    });
    block.push(button);
  }
  return block;
}
if (data.rankings.length) $("rankings").append(make("h2", {}, "Ranking"), ...data.rankings.flatMap(ranking));

// The table: one row per adapter, sorted by a click on a heading.
const COLUMNS = [
  ["adapter", a => a.label, a => [make("i", {class: "dot", style: `background:${a.color}`}), a.label, ...(a.is_best ? [make("span", {class: "badge"}, "best")] : [])]],
  ...(objectives.length > 1 ? [["objective", a => a.objective, a => [a.objective]]] : []),
  ["status", a => a.status, a => [a.reason ? make("span", {class: "bad", title: a.reason}, a.status) : a.status]],
  ["steps", a => a.step, a => [`${a.step}/${a.steps}`]],
  ["loss, last 10 % of steps", a => a.train, a => [number(a.train)]],
  ["held-out before", a => a.before, a => [number(a.before)]],
  ["held-out now", a => a.after, a => [number(a.after)]],
  ["best held-out", a => a.best && (a.rises ? -a.best[1] : a.best[1]), a => [a.best ? `${a.best_by === "held-out loss" ? "" : `${a.best_by} `}${number(a.best[1])} (step ${a.best[0]})` : "–"]],
  ["tokens", a => a.tokens, a => [tokens(a.tokens)]],
  ["device time", a => a.seconds, a => [time(a.seconds)]],
];
const isText = index => ["adapter", "objective", "status"].includes(COLUMNS[index][0]);
if (isNarrow) COLUMNS.splice(1, 0, ...COLUMNS.splice(COLUMNS.findIndex(c => c[0] === "held-out now"), 2));
function table() {
  // Without a chosen column, adapters with the same held-out data stand together, the best first, as they come.
  const index = COLUMNS.findIndex(c => c[0] === view.sort), value = index < 0 ? () => 0 : COLUMNS[index][1];
  const rows = [...data.adapters].sort((a, b) => {
    const group = index >= 0 && !isText(index) ? objectives.indexOf(a.objective) - objectives.indexOf(b.objective) : 0;
    if (group) return group;
    const [p, q] = [value(a), value(b)];
    if (p == null || q == null) return (p == null) - (q == null);
    return (p < q ? -1 : p > q ? 1 : 0) * (view.down ? -1 : 1);
  });
  const heads = COLUMNS.map(([name], i) => {
    const head = make("th", isText(i) ? {class: "text"} : {}, make("button", {}, name));
    if (i === index) head.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    head.firstChild.addEventListener("click", () => { view.down = i === index && !view.down; view.sort = name; keep(); table(); });
    return head;
  });
  $("table").replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows.map(a => make("tr", a.is_best ? {class: "best"} : {}, ...COLUMNS.map(([, , cells], i) => make("td", isText(i) ? {class: "text"} : {}, ...cells(a)))))));
}

// Texts that adapters generated at their evaluations: a table for each prompt, adapters side by side.
const prompts = new Map();
for (const adapter of data.adapters) for (const {step, pairs} of adapter.texts) for (const [prompt, text] of pairs) {
  if (!prompts.has(prompt)) prompts.set(prompt, new Map());
  const steps = prompts.get(prompt);
  if (!steps.has(step)) steps.set(step, new Map());
  steps.get(step).set(adapter, text.trim() || "(no text)");
}
if (prompts.size) $("texts").append(make("h2", {}, "Generated texts"));
for (const [prompt, steps] of prompts) {
  const writers = data.adapters.filter(a => [...steps.values()].some(texts => texts.has(a)));
  const head = make("tr", {}, make("th", {}, "step"), ...writers.map(a => make("th", {class: "text"}, make("i", {class: "dot", style: `background:${a.color}`}), a.label)));
  const rows = [...steps.keys()].sort((a, b) => a - b).map(step => make("tr", {}, make("td", {}, String(step)), ...writers.map(a => make("td", {class: "text words"}, steps.get(step).get(a) ?? "–"))));
  $("texts").append(make("details", {open: ""}, make("summary", {}, prompt), make("div", {class: "wide"}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)))));
}

// Settings that are not the same for all adapters. Those of a ranking are there.
const ranked = new Set(data.rankings.flatMap(r => r.labels)), others = data.adapters.filter(a => !ranked.has(a.label));
const keys = [...new Set(others.flatMap(a => Object.keys(a.settings)))].filter(key => new Set(data.adapters.map(a => JSON.stringify(a.settings[key]))).size > 1);
if (keys.length) {
  const head = make("tr", {}, make("th", {}, "adapter"), ...keys.map(key => make("th", {class: "text"}, key)));
  const rows = others.map(a => make("tr", {}, make("td", {}, a.label), ...keys.map(key => make("td", {class: "text"}, setting(a.settings[key])))));
  $("settings").append(make("h2", {}, "Settings that differ"), make("div", {class: "wide"}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
}
if ($("timelines").childElementCount) $("timelines").prepend(make("h2", {}, "Timeline of the last session"));
table(); draw();
addEventListener("resize", draw);
