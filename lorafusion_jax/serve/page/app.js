// The page of the service. It reads the same REST API as every other client.

import {lineChart, spanChart} from "/charts.js";

const main = document.getElementById("main");
const notice = document.getElementById("notice");
let closeView = () => {}, shown = "";

class Refused extends Error {
  constructor(status, error, problems) { super(error.what || `HTTP ${status}`); this.status = status; this.problems = problems || [error]; }
}

async function api(path, options = {}) {
  const headers = {"X-Requested-With": "page"};
  if (options.body) headers["Content-Type"] = options.body instanceof File ? "application/octet-stream" : "application/json";
  if (options.method === "POST") headers["Idempotency-Key"] = crypto.randomUUID();
  const answer = await fetch(path, {...options, headers});
  const text = await answer.text();
  const isJson = (answer.headers.get("content-type") || "").includes("json");
  const body = isJson && text ? JSON.parse(text) : text;
  if (!answer.ok) throw new Refused(answer.status, (body && body.error) || {}, body && body.problems);
  return body;
}

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return made;
}

const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(0\.0*)$/, "$1"));
const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "–");
const state = (name) => el("span", {class: `state ${name}`}, name);

function table(head, rows, none) {
  if (!rows.length) return el("p", {class: "empty"}, none);
  const heads = head.map(([title, kind]) => el("th", {class: kind || null, scope: "col"}, title));
  const cells = rows.map((row) => el("tr", {}, row.map((cell, at) => el("td", {class: head[at][1] || null}, cell))));
  return el("div", {class: "table"}, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, cells)));
}

function progress(job) {
  const share = job.steps ? Math.min(1, job.step / job.steps) : 0;
  const bar = el("span");
  bar.style.setProperty("width", `${100 * share}%`);
  return [`${job.step}/${job.steps ?? "?"}`, el("div", {class: "bar"}, bar)];
}

const link = (job) => el("a", {href: `#/jobs/${job.id}`}, job.name);

async function jobs(after) {
  const {items, next} = await api(`/v1/jobs?limit=200${after ? `&after=${after}` : ""}`);
  const rows = items.map((job) => [link(job), state(job.state), progress(job), number(job.loss), job.owner, job.weight, moment(job.created)]);
  const head = [["job"], ["state"], ["steps", "n"], ["loss", "n"], ["owner", "wide"], ["weight", "n wide"], ["submitted", "wide"]];
  return [
    el("h2", {}, after ? "Older jobs" : "Jobs"), el("p", {}, el("a", {class: "button", href: "#/new"}, "New job")),
    table(head, rows, "No jobs yet. Submit one here, or with lorafusion jobs submit jobs.yaml"),
    next ? el("p", {}, el("a", {href: `#/older/${next}`}, "Older jobs")) : null,
  ];
}

function problemList(problems) {
  return el("ul", {class: "problems"}, problems.map((p) => el("li", {}, el("b", {}, p.what), p.why ? ` ${p.why}` : "",
    p.fix ? el("div", {}, "Fix: ", p.fix) : null, el("small", {class: "empty"}, [p.code, p.where].filter(Boolean).join(" · ")))));
}

// A job by hand. Nothing is submitted before the service has read the rows and found no problem.
async function create() {
  const [{items: bases}, {items: sets}] = await Promise.all([api("/v1/bases"), api("/v1/datasets?limit=200")]);
  const options = (first) => [el("option", {value: ""}, first), ...sets.map((one) => el("option", {value: one.id}, `${one.name} (${one.rows} rows)`))];
  const fields = {
    name: el("input", {required: "", pattern: "[a-z0-9][a-z0-9._\\-]{0,62}", placeholder: "law-1"}),
    base: el("select", {}, bases.map((one) => el("option", {value: one.name}, one.name))),
    "file of rows": el("input", {type: "file", accept: ".jsonl,.json,.csv,.parquet"}),
    "or rows that are here": el("select", {}, options("–")),
    "held-out rows": el("select", {}, options("none")),
    goal: el("select", {}, el("option", {value: "sft"}, "answer as the rows do"), el("option", {value: "dpo"}, "prefer chosen to rejected (DPO)")),
    rank: el("input", {type: "number", min: "1", max: "1024", value: "16"}),
    "learning rate": el("input", {type: "number", min: "0", step: "any", value: "0.0002"}),
    epochs: el("input", {type: "number", min: "1", value: "1"}),
    "samples of a step": el("input", {type: "number", min: "1", value: "16"}),
    "longest row, in tokens": el("input", {type: "number", min: "2", value: "4096"}),
  };
  const result = el("div", {"aria-live": "polite"}), sent = new Map();
  const rowsOf = async () => {
    const file = fields["file of rows"].files[0];
    const stored = fields["or rows that are here"].value;
    if (stored) return stored;
    if (!file) throw new Refused(422, {what: "There are no rows: choose a file, or a data set that is here.", code: "data.missing-file"});
    if (!sent.has(file)) {
      const name = file.name.toLowerCase().replace(/[^a-z0-9._-]/g, "-").replace(/^[^a-z0-9]+/, "");
      sent.set(file, (await api(`/v1/datasets?name=${encodeURIComponent(name)}`, {method: "POST", body: file})).id);
    }
    return sent.get(file);
  };
  const specOf = (train) => JSON.stringify({
    name: fields.name.value, base: fields.base.value, epochs: Number(fields.epochs.value),
    data: {train, eval: fields["held-out rows"].value || null, max_length: Number(fields["longest row, in tokens"].value)},
    lora: {rank: Number(fields.rank.value), alpha: 2 * Number(fields.rank.value)}, optim: {lr: Number(fields["learning rate"].value)},
    objective: {name: fields.goal.value}, batch: {global_samples: Number(fields["samples of a step"].value)},
  });
  const run = async (event) => {
    event.preventDefault();
    const submits = event.submitter.value === "submit";
    result.replaceChildren("reading the rows …");
    try {
      const train = await rowsOf(), spec = specOf(train);
      const checked = await api("/v1/jobs?dry_run=true", {method: "POST", body: spec});
      if (submits) {
        location.hash = `#/jobs/${(await api("/v1/jobs", {method: "POST", body: spec})).id}`;
        return;
      }
      result.replaceChildren(el("p", {}, `No problem was found: ${checked.steps} steps, ${checked.tokens} tokens.`));
      if (fields.goal.value === "sft") {
        const {text} = await api(`/v1/datasets/${train}/preview?row=0&base=${encodeURIComponent(fields.base.value)}`);
        result.append(el("h3", {}, "First row, as the model sees it; ⟦ ⟧ is learned"), el("pre", {tabindex: "0"}, text));
      }
    } catch (problem) {
      result.replaceChildren(problemList(problem.problems ?? [{what: problem.message}]));
    }
  };
  const labels = Object.entries(fields).map(([name, field]) => el("label", {}, name, field));
  const buttons = el("div", {class: "actions"}, el("button", {value: "check"}, "Check and preview"), el("button", {value: "submit"}, "Submit"));
  return [el("h2", {}, "New job"), el("form", {class: "new", on: {submit: run}}, labels, buttons), result,
    el("p", {class: "empty"}, "Other settings are those of a job file: lorafusion jobs submit jobs.yaml, or POST /v1/jobs.")];
}

function action(job, name, title) {
  const act = async () => { await attempt(() => api(`/v1/jobs/${job.id}/${name}`, {method: "POST"})); await render(); };
  return el("button", {on: {click: act}}, title);
}

function actions(job) {
  const live = ["checking", "queued", "starting", "running", "draining", "paused"].includes(job.state);
  const buttons = [];
  if (["queued", "starting", "running"].includes(job.state)) buttons.push(action(job, "pause", "Pause"));
  if (job.state === "paused") buttons.push(action(job, "continue", "Continue"));
  if (live) {
    buttons.push(action(job, "cancel", "Cancel"));
    const input = el("input", {type: "number", min: "0.1", step: "0.1", value: job.weight, "aria-label": "weight", size: "4"});
    const set = async (event) => {
      event.preventDefault();
      await attempt(() => api(`/v1/jobs/${job.id}`, {method: "PATCH", body: JSON.stringify({weight: Number(input.value)})}));
      await render();
    };
    buttons.push(el("form", {class: "actions", on: {submit: set}}, input, el("button", {}, "Set weight")));
  }
  if (job.state === "done") buttons.push(el("a", {class: "button", href: `/v1/jobs/${job.id}/adapter`}, "Download adapter"));
  return el("div", {class: "actions"}, buttons);
}

const COLORS = {running: "var(--accent)", queued: "var(--warn)", paused: "var(--line)"};
// Drawn as wide as the page, so that text has the same size everywhere.
const pageWidth = () => Math.max(280, main.clientWidth - 40);

function spansOf(job) {
  const last = ["done", "failed", "cancelled", "rejected"].includes(job.state);
  return job.transitions.map((step, at) => ({
    row: step.after, name: `${step.after}: ${step.why || step.event}`, kind: step.after, color: COLORS[step.after] || "var(--soft)", from: step.at,
    to: job.transitions[at + 1]?.at ?? (last ? step.at : Date.now() / 1000),
  }));
}

// Reading a row can take seconds, so the view does not wait for it; it is read once.
const previews = new Map();

function loadPreview(dataset) {
  const keep = (text) => {
    previews.set(dataset, text);
    document.getElementById("preview")?.replaceChildren(text);
  };
  api(`/v1/datasets/${dataset}/preview?row=0`).then((found) => keep(found.text), (problem) => keep(problem.message));
  previews.set(dataset, "…");
  return "…";
}

// Only rows from the last step that is there on are read again, unless the job was placed anew: then steps may have run again.
let curve = {};

async function metricsOf({id, epoch}) {
  const before = curve.id === id && curve.epoch === epoch ? curve.rows : [];
  const last = before.at(-1)?.step ?? 0;
  const {items} = await api(`/v1/jobs/${id}/metrics?from_step=${last}`);
  curve = {id, epoch, rows: [...before.filter((row) => row.step < last), ...items]};
  return curve.rows;
}

async function job(id) {
  const found = await api(`/v1/jobs/${id}`);
  const [rows, log] = await Promise.all([metricsOf(found), api(`/v1/jobs/${id}/log`)]);
  const steps = rows.filter((row) => row.kind === "step").map((row) => [row.step, row.loss]);
  const evals = rows.filter((row) => row.kind === "eval").map((row) => [row.step, row.eval_loss]);
  const facts = {
    state: state(found.state), step: `${found.step} of ${found.steps ?? "?"}`, loss: number(found.loss), owner: found.owner,
    base: found.base, rank: found.spec.lora.rank, "learning rate": found.spec.optim.lr, weight: found.weight, priority: found.priority,
    place: found.place ?? "–", "waited (s)": number(found.waited_s, 1), tokens: found.tokens ?? "–", submitted: moment(found.created),
  };
  return [
    el("h2", {}, found.name, " ", el("small", {class: "empty"}, found.id)),
    actions(found),
    el("dl", {class: "facts"}, Object.entries(facts).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)))),
    found.reason ? el("p", {}, found.reason) : null,
    found.waits ? el("p", {}, `Number ${found.waits.position} in the queue: ${found.waits.why}` +
      (found.waits.expected_start ? `; expected to start ${moment(found.waits.expected_start)}` : "")) : null,
    found.predicted_end ? el("p", {}, `${number(found.steps_per_s, 2)} steps/s, expected to end ${moment(found.predicted_end)}`) : null,
    found.problems.length ? problemList(found.problems) : null,
    el("h3", {}, "Loss"),
    lineChart([{name: found.name, color: "var(--accent)", line: steps, dots: evals}], {wide: pageWidth(), title: "training loss"}) || el("p", {class: "empty"}, "No steps yet."),
    el("h3", {}, "States"),
    spanChart(spansOf(found), {wide: pageWidth(), title: `states of ${found.name} over time`}),
    el("h3", {}, "Log"),
    el("pre", {tabindex: "0"}, log),
    el("h3", {}, "First row, as the model sees it"),
    el("pre", {tabindex: "0", id: "preview"}, previews.get(found.spec.data.train) ?? loadPreview(found.spec.data.train)),
  ];
}

async function cluster() {
  const [{workers, policy, refused_decisions: refused, problem}, {items}] = await Promise.all([api("/v1/cluster"), api("/v1/jobs?limit=50")]);
  const parts = workers.map((worker) => [
    el("h3", {}, `${worker.id} · ${worker.base} · ${worker.gpus.length ? `GPU ${worker.gpus.join(", ")} · ` : ""}${worker.device || "opening"}`),
    el("p", {}, `epoch ${worker.epoch}, `, state(worker.connected ? worker.state : "away"), worker.drained ? " drained" : ""),
    el("div", {class: "places"}, worker.slots.map((place) => el("div", {class: place.job === null ? "place free" : "place"},
      el("small", {}, `place ${place.place} · ${place.kind === "lora" ? "" : `${place.kind} `}rank ≤ ${place.rank}`),
      place.job === null ? "free" : place.job ? el("a", {href: `#/jobs/${place.job}`}, place.name) : "another owner",
      place.state ? el("small", {}, place.state) : null))),
  ]);
  const details = await Promise.all(items.slice(0, 12).map((one) => api(`/v1/jobs/${one.id}`)));
  const spans = details.reverse().flatMap((one) => spansOf(one).filter((s) => ["queued", "running", "paused"].includes(s.kind)).map((s) => ({...s, row: one.name})));
  const policyLine = `Policy: ${policy}${refused ? `, ${refused} refused decisions` : ""}${problem ? `. Jobs wait: ${problem}` : ""}`;
  return [el("h2", {}, "Cluster"), el("p", {}, policyLine), ...(parts.length ? parts.flat() : [el("p", {class: "empty"}, "No session is open.")]), el("h3", {}, "Jobs over time"), spanChart(spans, {wide: pageWidth(), title: "states of the newest jobs over time"}) || el("p", {class: "empty"}, "Nothing has run yet.")];
}

async function decisions() {
  const {items} = await api("/v1/decisions");
  const rows = items.map((row) => [moment(row.at), row.text, row.refused || "–"]);
  return [el("h2", {}, "Decisions"), table([["time", "wide"], ["decision"], ["refused because"]], rows, "No decisions yet.")];
}

async function keys() {
  const me = await api("/v1/me");
  const parts = [el("h2", {}, "Keys"), el("p", {}, `You are ${me.owner}: ${me.scopes.join(", ")}`)];
  if (!me.scopes.includes("admin")) return parts;
  const {items} = await api("/v1/keys");
  const revoke = (key) => el("button", {on: {click: async () => { await attempt(() => api(`/v1/keys/${key.id}`, {method: "DELETE"})); await render(); }}}, "Revoke");
  const rows = items.map((key) => [key.id, key.owner, moment(key.created), moment(key.used), key.revoked ? "revoked" : revoke(key)]);
  const owner = el("input", {required: "", pattern: "[a-z0-9][a-z0-9._\\-]*", "aria-label": "owner", placeholder: "owner"});
  const shown = el("p");
  const add = async (event) => {
    event.preventDefault();
    const made = await attempt(() => api("/v1/keys", {method: "POST", body: JSON.stringify({owner: owner.value})}));
    if (made) shown.replaceChildren("Copy it now, it is not shown again: ", el("code", {}, made.key));
  };
  return [...parts, table([["key"], ["owner"], ["created", "wide"], ["last used", "wide"], [""]], rows, "No keys: everybody on this machine may do everything."),
    el("h3", {}, "Add a key"), el("form", {class: "actions", on: {submit: add}}, owner, el("button", {}, "Add")), shown];
}

function login() {
  const key = el("input", {type: "password", required: "", autocomplete: "off", "aria-label": "key", placeholder: "tml-lf_…"});
  const send = async (event) => {
    event.preventDefault();
    if (await attempt(() => api("/v1/login", {method: "POST", body: JSON.stringify({key: key.value.trim()})}))) await start();
  };
  return [el("form", {class: "login", on: {submit: send}}, el("h2", {}, "Log in"),
    el("p", {}, "This service wants a key. Its operator makes one with ", el("code", {}, "lorafusion keys add NAME"), "."), key, el("button", {}, "Log in"))];
}

async function attempt(act) {
  try { notice.textContent = ""; return (await act()) ?? true; } catch (problem) { notice.textContent = problem.message; return null; }
}

// Events replace the view; who uses the keyboard stays at the same link or button, and a log stays where it was scrolled to.
function keepFocus(replace) {
  const stops = () => [...main.querySelectorAll("a, button, pre")];
  const logs = () => [...main.querySelectorAll("pre")];
  const at = stops().indexOf(document.activeElement), tag = document.activeElement?.tagName;
  const tops = logs().map((log) => log.scrollTop);
  replace();
  const next = at < 0 ? undefined : stops()[at];
  if (next?.tagName === tag) next.focus({preventScroll: true});
  logs().forEach((log, number) => { log.scrollTop = tops[number] ?? 0; });
}

const VIEWS = {jobs, older: jobs, new: create, cluster, decisions, keys};

async function render() {
  const [, name = "jobs", id] = location.hash.split("/");
  const view = name === "jobs" && id ? () => job(id) : VIEWS[name] || jobs;
  for (const a of document.querySelectorAll("nav a")) {
    if (a.getAttribute("href") === `#/${name}`) a.setAttribute("aria-current", "page"); else a.removeAttribute("aria-current");
  }
  if (name === "new" && main.querySelector("form.new")) return;  // events do not take a form from under its reader
  try {
    const content = await view(id);
    if (location.hash === shown && main.contains(document.activeElement) && document.activeElement.matches("input")) return;
    shown = location.hash;
    keepFocus(() => main.replaceChildren(...content.filter(Boolean)));
  } catch (problem) {
    if (problem.status === 401) main.replaceChildren(...login());
    else notice.textContent = problem.message;
  }
}

// Events of the service say when to read again; several at once make one reading.
function follow() {
  let waiting = null;
  const source = new EventSource("/v1/events");
  const again = () => { waiting ??= setTimeout(async () => { waiting = null; await render(); }, 700); };
  for (const kind of ["state", "step", "eval", "worker", "changed"]) source.addEventListener(kind, again);
  return () => source.close();
}

async function start() {
  closeView();
  try {
    const me = await api("/v1/me");
    document.getElementById("who").textContent = me.owner;
    closeView = follow();
  } catch { /* the view shows the login */ }
  await render();
}

addEventListener("hashchange", async () => { notice.textContent = ""; await render(); main.focus(); });
start();
