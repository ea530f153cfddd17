"use strict";

const $ = (id) => document.getElementById(id);

/** An element with attributes, text or children; text never becomes markup. */
function el(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "rect", "text", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "·") || "∅";
const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : p > 0 ? p.toExponential(1) : "0");
const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

// ---- from records to what is drawn -------------------------------------------------------------------------------------

function read({ name, header, records }) {
  const trace = { name, header, rows: new Map(), drafts: [], searches: new Map(), caches: [], candidates: [], ends: [] };
  const started = header.rows.map((row, index) => ({ row: index, prompt: row.prompt, name: "" }));
  const rowOf = (record) => {
    if (!trace.rows.has(record.row)) {
      trace.rows.set(record.row, { row: record.row, prompt: record.prompt, name: "", tokens: [], end: "" });
    }
    return trace.rows.get(record.row);
  };
  for (const record of records) {
    if (record.type === "token") rowOf(record).tokens.push(record);
    else if (record.event === "draft") trace.drafts.push(record);
    else if (record.event === "cache") trace.caches.push(record);
    else if (record.event === "candidates") trace.candidates.push(record);
    else if (record.event === "finished") trace.ends.push(record);
    else if (record.event === "search") {
      if (!trace.searches.has(record.row)) trace.searches.set(record.row, []);
      trace.searches.get(record.row).push(record);
    }
  }
  for (const [row, steps] of trace.searches) hypotheses(trace, row, steps);
  for (const { row, finish_reason, error } of trace.ends) {
    if (trace.rows.has(row)) trace.rows.get(row).end = error ? `${finish_reason}: ${error}` : finish_reason;
    else if (error && started[row]) trace.rows.set(row, { ...started[row], tokens: [], end: `${finish_reason}: ${error}` });
  }
  for (const told of trace.candidates) {
    (told.rows || []).forEach((row, id) => {
      const own = trace.rows.get(row);
      if (own) Object.assign(own, { name: `candidate ${id}`, best: told.ranking[0] === id, end: told.candidates[id].finish_reason });
    });
  }
  const copies = {};
  for (const own of trace.rows.values()) (copies[own.prompt] ||= []).push(own);
  for (const group of Object.values(copies)) group.forEach((own, i) => (own.name ||= group.length > 1 ? `row ${i}` : "output"));
  return trace;
}

/** Rows of the hypotheses that a search ended with, best first; marks the nodes on the way to the best. */
function hypotheses(trace, row, steps) {
  const over = [];
  let paths = [[]];
  for (const step of steps) {
    for (const ended of step.ended) {
      over.push({ path: ended.text === undefined ? paths[ended.parent] : [...paths[ended.parent], ended], ended });
    }
    paths = step.hypotheses.map((own) => [...paths[own.parent], own]);
  }
  over.sort((a, b) => b.ended.score - a.ended.score);
  if (!over.length) over.push(...paths.map((path) => ({ path, ended: { score: path.at(-1)?.logprob ?? 0, reason: "cut short" } })));
  over[0]?.path.forEach((own) => (own.best = true));
  over.slice(0, 8).forEach(({ path, ended }, rank) => {
    const tokens = path.map((own, position) => Object.assign(own, { position }));
    const name = `hypothesis ${rank + 1}`;
    trace.rows.set(`${row}.${rank}`, { row, prompt: steps[0].prompt, name, best: !rank, tokens, end: `${ended.reason}, score ${ended.score?.toFixed(2) ?? "–"}` });
  });
}

// ---- colours: an alpha over the page, so that they work on light and dark ------------------------------------------------

const AMBER = "230 126 20", BLUE = "45 120 230", GREEN = "30 160 90", RED = "215 60 50";
const first = (token) => token.alternatives[0], last = (token) => token.alternatives.at(-1);
const effect = (token) => Math.log2(Math.max(last(token).prob, 1e-9) / Math.max(token.branches?.[0]?.prob ?? first(token).prob, 1e-9));

/** name: [what it is, value of a token or undefined, [rgb, alpha] of a value given the largest, legend] */
const MODES = {
  probability: ["of the token that was chosen", (t) => t.prob, (v) => [AMBER, 0.75 * (1 - v)], ["100%", "0%"]],
  entropy: ["of the final distribution, nats", (t) => t.entropy, (v, most) => [BLUE, 0.75 * v / most], ["0", (most) => most.toFixed(1)]],
  shift: ["how far the strategy moved the distribution, nats", (t) => t.shift, (v) => [RED, 0.8 * v / Math.LN2], ["0", "log 2"]],
  divergence: ["noted by the strategy", (t) => t.divergence, (v, most) => [RED, 0.8 * v / most], ["0", (most) => most.toFixed(2)]],
  layer: ["that was contrasted", (t) => t.premature_layer, (v, most) => [GREEN, 0.1 + 0.7 * v / most], ["0", (most) => most]],
  effect: ["of strategy and rules on the token's probability", effect, (v) => [v > 0 ? GREEN : RED, Math.min(0.75, Math.abs(v) / 5)], ["less likely", "more likely"]],
  legal: ["tokens that were allowed", (t) => t.legal, (v, most) => [BLUE, 0.75 * (1 - Math.log(v) / Math.log(Math.max(2, most)))], [(most) => most, "1"]],
  draft: ["accepted from a draft", (t) => (t.draft === undefined ? 0 : 1), (v) => [GREEN, 0.5 * v], ["no", "yes"]],
};

const state = { mode: "probability", pinned: null, focus: null, traces: [], drawn: [] };

function usable(mode, tokens) {
  const values = tokens.map(MODES[mode][1]).filter((value) => value !== undefined && Number.isFinite(value));
  if (mode === "draft") return values.some(Boolean);
  if (mode === "legal") return new Set(values).size > 1;
  return mode === "shift" || mode === "effect" ? values.some((value) => Math.abs(value) > 1e-6) : values.length > 0;
}

function paint() {
  const [, value, colour, ends] = MODES[state.mode];
  const most = Math.max(1e-9, ...state.drawn.map(({ token }) => value(token)).filter(Number.isFinite));
  const css = (v) => { const [rgb, alpha] = colour(v, most); return `rgb(${rgb} / ${Math.max(0, alpha).toFixed(3)})`; };
  for (const { token, node } of state.drawn) {
    const own = value(token);
    node.style.background = own === undefined || !Number.isFinite(own) ? "" : css(own);
  }
  const scale = { probability: [1, 0.75, 0.5, 0.25, 0], effect: [-5, -2.5, 0, 2.5, 5], shift: [0, 0.17, 0.35, 0.52, 0.69], draft: [0, 1],
    legal: [4, 3, 2, 1, 0].map((n) => most ** (n / 4)) }[state.mode] || [0, 1, 2, 3, 4].map((n) => (n / 4) * most);
  const say = (end) => String(typeof end === "function" ? end(most) : end);
  $("legend").replaceChildren(MODES[state.mode][0], ": ", say(ends[0]), ...scale.map((v) => { const i = el("i"); i.style.background = css(v); return i; }), say(ends[1]));
  $("mode").value = state.mode;
}

// ---- the panel ----------------------------------------------------------------------------------------------------------

function bars(stage, token, most = 5) {
  const top = stage.top.slice(0, most);
  if (!top.some(([id]) => id === token.id)) top.push([token.id, token.text, stage.prob]);
  return top.map(([id, text, p]) => {
    const fill = el("i");
    fill.style.width = `${100 * p}%`;
    return el("div", { class: id === token.id ? "bar chosen" : "bar" }, el("span", {}, visible(text)), fill, el("span", {}, percent(p)));
  });
}

function stageView(title, stage, token, before) {
  const same = before && JSON.stringify(before.top) === JSON.stringify(stage.top) && before.legal === stage.legal;
  const legal = same ? "no change" : `${stage.legal.toLocaleString("en")} legal`;
  return el("div", { class: "stage" }, el("p", {}, el("b", {}, title), legal), ...(same ? [] : bars(stage, token)));
}

function describe(token) {
  const facts = [["probability", percent(token.prob)], ["entropy", `${token.entropy.toFixed(3)} nats`], ["legal tokens", token.legal.toLocaleString("en")]];
  if (token.shift > 1e-6) facts.push(["shift by strategy", `${token.shift.toFixed(3)} of 0.693 nats`]);
  if (token.premature_layer !== undefined) facts.push(["contrasted layer", token.premature_layer]);
  if (token.divergence !== undefined) facts.push(["divergence", `${token.divergence.toFixed(4)} nats`]);
  if (token.draft !== undefined) facts.push(["draft", "proposed and accepted"]);
  if (token.logprob !== undefined) facts.push(["log-probability so far", token.logprob.toFixed(3)]);
  const branches = token.branches || [];
  const model = branches.map((own) => stageView(own.branch === "main" ? "model" : `model, ${own.branch.replaceAll("_", " ")}`, own, token));
  const stages = token.alternatives.map((own, i) => {
    const before = i ? token.alternatives[i - 1] : branches[0];
    return stageView(own.stage === "scores" ? "after the strategy" : `after ${own.stage}`, own, token, before);
  });
  return [el("span", { class: "big" }, visible(token.text)), el("p", { class: "about" }, `token ${token.position}, id ${token.id}`),
    el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])), ...model, ...stages];
}

function show(token) {
  const rest = "Point at a token to see what it was chosen from; click it, or press Enter, to keep it here.";
  $("detail").replaceChildren(...(token ? describe(token) : [el("p", { class: "about" }, rest)]));
}

function tip(drawn) {
  const box = $("tip");
  box.hidden = !drawn;
  if (!drawn) return;
  box.replaceChildren(...bars(last(drawn.token), drawn.token, 3));
  const place = drawn.node.getClientRects()[0], size = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 8))}px`;
  box.style.top = `${place.bottom + size.height + 8 < innerHeight ? place.bottom + 6 : place.top - size.height - 6}px`;
}

function focusOn(drawn, { pin = false, move = true } = {}) {
  for (const node of document.querySelectorAll(".token.on")) node.classList.remove("on");
  if (state.focus) state.focus.node.tabIndex = -1;
  state.focus = drawn;
  drawn.node.tabIndex = 0;
  drawn.node.classList.add("on");
  if (pin) state.pinned = drawn.token;
  if (move) drawn.node.focus();
  show(drawn.token);
}

// ---- drawing a trace ----------------------------------------------------------------------------------------------------

function tokenRow(own, replayed, other) {
  const line = el("div", { class: "tokens" });
  const drawn = own.tokens.map((token, place) => {
    const node = el("span", { class: "token", role: "button", tabindex: -1, "aria-label": `${visible(token.text)} ${percent(token.prob)}` });
    const [, text, breaks] = token.text.match(/^([^]*?)(\n*)$/);
    node.append(text, ...(breaks ? [el("span", { class: "mark" }, "⏎".repeat(breaks.length)), breaks] : []));
    if (!token.text) node.append(el("span", { class: "mark" }, "∅"));
    if (token.draft !== undefined) node.classList.add("drafted");
    if (place === replayed) node.classList.add("at");
    if (other && other[place]?.id !== token.id) node.classList.add("other");
    const made = { token, node, own };
    node.addEventListener("pointerenter", () => { tip(made); show(token); });
    node.addEventListener("pointerleave", () => { tip(null); show(state.pinned); });
    node.addEventListener("click", () => focusOn(made, { pin: true }));
    node.addEventListener("focus", () => { if (state.focus !== made) focusOn(made, { move: false }); });
    line.append(node);
    return made;
  });
  own.drawn = drawn;
  state.drawn.push(...drawn);
  if (own.end) line.append(el("span", { class: "end" }, `  ${own.end}`));
  return el("div", { class: own.best ? "row best" : "row" }, el("span", { class: "name" }, own.name + (own.best ? " ✓" : "")), line);
}

const link = (text, act) => { const made = el("button", { class: "link", type: "button" }, text); made.addEventListener("click", act); return made; };

function draftsView(trace) {
  const lines = trace.drafts.flatMap((round) => {
    const kept = new Set(round.accepted);
    const leaves = round.tokens.map((_, node) => node).filter((node) => !round.parents.includes(node));
    return leaves.map((leaf, branch) => {
      const path = [];
      for (let node = leaf; node >= 0; node = round.parents[node]) path.unshift(node);
      const own = trace.rows.get(round.row);
      const where = branch ? "└" : `at ${round.position}`;
      const jump = own?.drawn?.[round.position] ? link(where, () => focusOn(own.drawn[round.position], { pin: true })) : where;
      const chips = path.map((node) => el("span", { class: kept.has(node) ? "chip accepted" : "chip" }, visible(round.tokens[node][1])));
      return el("div", { class: "draft" }, el("span", { class: "where" }, jump), ...chips, branch || !round.forced ? "" : " forced");
    });
  });
  const total = trace.drafts.reduce((sum, round) => sum + round.tokens.length, 0);
  const kept = trace.drafts.reduce((sum, round) => sum + round.accepted.length, 0);
  const title = `Drafts: ${kept} of ${total} tokens accepted in ${trace.drafts.length} rounds`;
  return [el("h3", {}, title), el("div", { class: "scroll tall", tabindex: 0 }, ...lines)];
}

function treeView(steps) {
  const wide = 104, high = 30, most = Math.max(...steps.map((step) => step.hypotheses.length + step.ended.length));
  const svg = el("svg", { width: wide * (steps.length + 1), height: high * most + 8, role: "img", "aria-label": "the tree of hypotheses" });
  const edges = el("g"), nodes = el("g");
  svg.append(edges, nodes);
  let before = [{ x: 0, y: (high * most) / 2 }];
  steps.forEach((step, depth) => {
    const place = (own, index, over) => {
      const x = wide * (depth + 0.3), y = high * (index + 0.5) + 4, from = before[own.parent];
      const best = own.best ? " best" : "";
      edges.append(el("path", { class: `edge${best}`, d: `M${from.x} ${from.y}C${from.x + 16} ${from.y} ${x - 16} ${y} ${x} ${y}` }));
      if (own.text === undefined) return { x, y };
      const node = el("g", { class: `node${best}${over ? " over" : ""}`, tabindex: 0, role: "button", "aria-label": visible(own.text) },
        el("rect", { x, y: y - 11, width: 72, height: 22, rx: 4 }), el("text", { x: x + 5, y: y + 4 }, short(visible(own.text), 9)),
        el("title", {}, `${visible(own.text)} ${percent(own.prob)}${over ? `, over: ${own.reason}` : ""}`));
      const keep = () => { state.pinned = own; show(own); };
      node.addEventListener("click", keep);
      node.addEventListener("keydown", (event) => { if (event.key === "Enter") keep(); });
      nodes.append(node);
      return { x: x + 72, y };
    };
    const living = step.hypotheses.map((own, index) => place(own, index, false));
    step.ended.forEach((own, index) => place(own, living.length + index, true));
    before = living;
  });
  return [el("h3", {}, "Hypotheses, a column a token; dashed ones are over"), el("div", { class: "scroll", tabindex: 0 }, svg)];
}

function candidatesView(trace, told) {
  const order = told.ranking || told.candidates.map((_, id) => id);
  const scores = told.candidates.map((own) => own.score).filter((score) => typeof score === "number");
  const low = Math.min(0, ...scores), high = Math.max(...scores, low + 1e-9);
  const answers = told.candidates.some((own) => "answer" in own);
  const parts = [];
  if (told.votes) {
    const total = Object.values(told.votes).reduce((sum, own) => sum + own, 0);
    const bar = (votes) => { const made = el("span", { class: "vote" }); made.style.width = `${(12 * votes) / total}rem`; return made; };
    parts.push(el("h3", {}, "Votes"), el("table", {}, ...Object.entries(told.votes).sort((a, b) => b[1] - a[1]).map(([answer, votes]) =>
      el("tr", {}, el("td", {}, answer === told.answer ? el("b", {}, answer) : answer), el("td", {}, bar(votes), String(+votes.toFixed(3)))))));
  }
  const head = ["", "score", ...(answers ? ["answer"] : []), "log p", "text"].map((name) => el("th", {}, name));
  const lines = order.map((id, rank) => {
    const own = told.candidates[id], row = trace.rows.get(told.rows?.[id]);
    const bar = el("span", { class: "vote" });
    bar.style.width = typeof own.score === "number" ? `${(4 * (own.score - low)) / (high - low)}rem` : 0;
    const score = el("td", {}, bar, typeof own.score === "number" ? own.score.toPrecision(3) : "–");
    const text = row?.drawn?.length ? link(short(own.text, 110), () => focusOn(row.drawn[0], { pin: true })) : short(own.text, 110);
    return el("tr", {}, el("th", {}, `${rank ? "" : "✓ "}${id}`), score, ...(answers ? [el("td", {}, String(own.answer ?? "–"))] : []),
      el("td", {}, own.logprob?.toFixed(1) ?? "–"), el("td", {}, text));
  });
  parts.push(el("h3", {}, "Candidates, the best first"), el("div", { class: "scroll" }, el("table", {}, el("tr", {}, ...head), ...lines)));
  if (told.utilities) {
    const most = Math.max(...told.utilities.flat(), 1e-9);
    const cell = (value) => { const made = el("td", {}, value.toFixed(0)); made.style.background = `rgb(${BLUE} / ${(0.75 * value) / most})`; return made; };
    parts.push(el("h3", {}, `Utility (${told.utility}) of candidates in rows against references in columns`),
      el("div", { class: "scroll" }, el("table", { class: "matrix" }, el("tr", {}, el("th"), ...told.reference_ids.map((id) => el("th", {}, String(id))), el("th", {}, "mean")),
        ...told.utilities.map((line, i) => el("tr", {}, el("th", {}, String(told.hypothesis_ids[i])), ...line.map(cell),
          el("th", {}, (line.reduce((a, b) => a + b, 0) / line.length).toFixed(1)))))));
  }
  return parts;
}

function cacheView(trace) {
  const sum = (event, name) => event.caches.flatMap((cache) => cache.groups).reduce((total, group) => total + group[name], 0);
  const used = trace.caches.map((event) => sum(event, "used")), cached = trace.caches.map((event) => sum(event, "cached"));
  const wide = 640, high = 110, most = Math.max(...used.map((own, i) => own + cached[i]), 1), step = wide / used.length;
  const svg = el("svg", { viewBox: `0 0 ${wide + 80} ${high + 24}`, class: "chart", role: "img", "aria-label": "blocks of the cache over time" });
  const y = (value) => (high * value) / most;
  trace.caches.forEach((event, i) => {
    const tokens = event.caches.reduce((total, cache) => total + cache.tokens, 0), rows = event.caches.reduce((total, cache) => total + cache.rows, 0);
    const says = `forward ${event.step}: ${used[i]} blocks used, ${cached[i]} kept for later, ${sum(event, "free")} free; ${rows} rows, ${tokens} tokens`;
    svg.append(el("g", {}, el("title", {}, says),
      el("rect", { class: "used", x: i * step, y: 8 + high - y(used[i]), width: step, height: y(used[i]) }),
      el("rect", { class: "cached", x: i * step, y: 8 + high - y(used[i] + cached[i]), width: step, height: y(cached[i]) }),
      el("rect", { x: i * step, y: 8, width: step, height: high, fill: "transparent" })));
  });
  svg.append(el("text", { class: "axis", x: wide + 8, y: 16 }, `${most} blocks`), el("text", { class: "axis", x: wide + 8, y: high + 8 }, "0"),
    el("text", { class: "axis", x: 0, y: high + 22 }, "forward 1"), el("text", { class: "axis", x: wide, y: high + 22, "text-anchor": "end" }, String(trace.caches.at(-1).step)));
  return [el("h3", {}, "Cache: blocks in use, and above them those kept for later prompts"), svg];
}

function draw(trace, other) {
  const { header, name } = trace, section = el("section", { class: "trace", "aria-label": name });
  const recipe = header.recipe, kinds = [recipe.strategy?.kind || "sample", ...(recipe.rules || []).map((rule) => rule.kind)];
  for (const part of ["constraint", "drafter"]) if (recipe[part]) kinds.push(recipe[part].kind);
  section.append(el("h2", {}, name), el("p", { class: "about" }, `${(header.model || "model").split("/").at(-1)} · ${kinds.join(" › ")} · seed ${header.seed} · decodekit ${header.decodekit}`),
    el("details", { class: "about" }, el("summary", {}, "recipe"), el("code", {}, JSON.stringify(recipe))));
  if (header.replay) section.append(el("p", { class: "about" }, `replayed from token ${header.replay.at} with ${header.replay.set.join(", ")}`));
  const prompts = [...new Set(header.rows.map((row) => row.prompt))];
  for (const prompt of prompts) {
    const index = header.rows.findIndex((row) => row.prompt === prompt), text = header.prompts?.[index];
    section.append(el("div", { class: "prompt" }, typeof text === "string" ? text : JSON.stringify(text ?? header.prompt_ids[index])));
    for (const own of trace.rows.values()) {
      const beside = other && other.rows.get(header.replay?.row ?? own.row)?.tokens;
      if (own.prompt === prompt) section.append(tokenRow(own, header.replay?.at, beside));
    }
    for (const told of trace.candidates) if (told.prompt === prompt && !trace.searches.has(told.row)) section.append(...candidatesView(trace, told));
    for (const steps of trace.searches.values()) if (steps[0].prompt === prompt) section.append(...treeView(steps));
  }
  if (trace.drafts.length) section.append(...draftsView(trace));
  if (trace.caches.length) section.append(...cacheView(trace));
  return section;
}

// ---- keys ---------------------------------------------------------------------------------------------------------------

function move(event) {
  const lines = state.traces.flatMap((trace) => [...trace.rows.values()]).filter((own) => own.drawn?.length);
  const { focus } = state, line = lines.findIndex((own) => own === focus?.own), place = focus ? focus.own.drawn.indexOf(focus) : 0;
  const at = (row, column) => lines[row] && lines[row].drawn[Math.max(0, Math.min(column, lines[row].drawn.length - 1))];
  const to = { ArrowLeft: [line, place - 1], ArrowRight: [line, place + 1], ArrowUp: [line - 1, place], ArrowDown: [line + 1, place], Home: [line, 0], End: [line, Infinity] }[event.key];
  const next = to && (focus ? at(...to) : at(0, 0));
  if (next) { event.preventDefault(); focusOn(next); }
}

function theme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
}

function help() {
  $("help").hidden = !$("help").hidden;
  $("keys").setAttribute("aria-expanded", String(!$("help").hidden));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  const modes = [...$("mode").options].map((option) => option.value);
  if (event.key === "t") theme();
  else if (event.key === "?") help();
  else if (event.key === "Escape") { state.pinned = null; tip(null); show(null); }
  else if (event.key === "Enter" && event.target.classList.contains("token")) focusOn(state.focus, { pin: true });
  else if (modes[event.key - 1]) { state.mode = modes[event.key - 1]; paint(); }
  else if (!event.target.closest(".scroll")) move(event);
});

state.traces = JSON.parse($("data").textContent).map(read);
state.traces.forEach((trace, i) => $("traces").append(draw(trace, i ? state.traces[0] : null)));
if (state.drawn.length) state.drawn[0].node.tabIndex = 0;
const all = state.drawn.map(({ token }) => token);
Object.keys(MODES).filter((mode) => usable(mode, all)).forEach((mode, i) => $("mode").append(el("option", { value: mode }, `${i + 1} ${mode}`)));
$("mode").addEventListener("change", () => { state.mode = $("mode").value; paint(); });
$("theme").addEventListener("click", theme);
$("keys").addEventListener("click", help);
if (state.drawn.length) paint();
show(null);
