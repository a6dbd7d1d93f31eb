// The status page. It inserts all data of the bus as text, never as HTML.
"use strict";

const KEPT = 300, STALE = 10, SPARKS = 40, FILLS = 8, FINDINGS = 12;
const STATES = { live: "ok", syncing: "warn", gap: "warn", connecting: "bad", lost: "bad", conflict: "bad", waiting: "warn",
  receiving: "warn", stalled: "bad", idle: "idle", left: "idle", connected: "ok", partial: "warn", whole: "ok", over: "ok" };
const SIGNS = { ok: "✓", warn: "▲", bad: "✕", idle: "○" };
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);
const bus = { about: {}, sources: [], routers: [], findings: [], times: [], all: {}, outputs: {}, courses: {}, transitions: [], rates: null, heard: 0, filled: -Infinity };
let open = null;

// -- words

const number = n => n === null || n === undefined || Number.isNaN(n) ? "–" : n.toLocaleString("en", { maximumFractionDigits: n < 10 ? 1 : 0 });
const bytes = n => n >= 1e6 ? number(n / 1e6) + " MB" : n >= 1e3 ? number(n / 1e3) + " kB" : number(n) + " B";
const seconds = s => !s ? "0 s" : s < 1 ? Math.round(s * 1000) + " ms" : s < 100 ? s.toFixed(1) + " s" : duration(s);
const duration = s => s < 60 ? Math.round(s) + " s" : s < 3600 ? Math.floor(s / 60) + " min" : s < 172800 ?
  Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min" : Math.floor(s / 86400) + " days";
const clock = at => new Date(at * 1000).toLocaleTimeString("en-GB");
const sum = counts => Object.values(counts).reduce((a, b) => a + b, 0);
const kind = state => STATES[state] ?? "warn";

// -- elements

function make(tag, props = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
}
function draw(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const pill = (state, colour) => make("span", { className: "pill " + colour }, make("span", { ariaHidden: "true", textContent: SIGNS[colour] }), state);

/** Make a table's rows match a list. Existing rows and cells are reused, so that the focus and the selection stay. */
function rows(body, list, key, cells) {
  const known = new Map([...body.rows].map(row => [row.dataset.key, row]));
  const labels = [...body.parentElement.tHead.rows[0].cells].map(cell => cell.textContent.trim());
  list.forEach((each, at) => {
    const row = known.get(key(each)) ?? make("tr");
    known.delete(row.dataset.key);
    row.dataset.key = key(each);
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
    cells(each).forEach((value, i) => {
      const cell = row.cells[i] ?? row.insertCell();
      cell.dataset.label = labels[i];
      cell.classList.toggle("long", /\S{20}/.test(value.shows ?? value));
      if (typeof value === "object") {
        if (cell.dataset.shows !== value.shows) { cell.replaceChildren(value.make()); cell.dataset.shows = value.shows; }
        if (value.text) cell.classList.add("text");
      } else if (cell.textContent !== String(value)) cell.textContent = value;
    });
  });
  for (const row of known.values()) row.remove();
}
const asPill = (state, ill) => ({ shows: state + (ill ? " ill" : ""), make: () => pill(state, ill ? "bad" : kind(state)), text: true });
const asText = text => ({ shows: text, make: () => document.createTextNode(text), text: true });

// -- charts

/** The 99th percentile. As the maximum of a chart's axis, it keeps one spike from flattening the rest of the chart. */
const usual = known => [...known].sort((a, b) => a - b)[Math.floor((known.length - 1) * .99)] || Math.max(...known, 0) || 1;

function chart(svg, times, values, what, unit = "") {
  const now = times.at(-1), known = values.filter(v => v !== null), top = usual(known), peak = Math.max(...known, 0);
  let line = "", area = "", begun = null;
  values.forEach((value, i) => {
    if (value === null) { if (begun !== null) area += `V60H${begun}Z`; begun = null; return; }
    const x = (300 - (now - times[i])).toFixed(1), y = (57 - 52 * Math.min(value / top, 1.08)).toFixed(1);
    line += (begun === null ? "M" : "L") + x + " " + y;
    area += (begun === null ? `M${x} 60L` : "L") + x + " " + y;
    begun ??= x;
    if (i === values.length - 1) area += `V60H${begun}Z`;
  });
  if (!svg.firstChild) {
    svg.append(draw("path", { class: "area" }), draw("path", { class: "line" }), draw("title", {}));
    svg.addEventListener("pointermove", event => hover(svg, event));
    for (const [name, value] of Object.entries({ viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img" })) svg.setAttribute(name, value);
    svg.classList.add("chart");
  }
  svg.children[0].setAttribute("d", area);
  svg.children[1].setAttribute("d", line);
  svg.setAttribute("aria-label", `${what}, last five minutes: now ${number(known.at(-1))}${unit}, peak ${number(peak)}${unit}`);
  svg.read = { times, values, unit };
}
/** Show the chart's value and time under the pointer. */
function hover(svg, event) {
  const box = svg.getBoundingClientRect(), { times, values, unit } = svg.read;
  const wanted = times.at(-1) - 300 * (1 - (event.clientX - box.left) / box.width);
  const at = times.findLastIndex(time => time <= wanted + .5);
  svg.querySelector("title").textContent = at < 0 ? "" : `${number(values[at])}${unit} at ${clock(times[at])}`;
}
const spark = (id, colour) => ({ shows: id, make: () => { const made = draw("svg", { class: "spark " + colour }); made.dataset.spark = id; return made; } });

const TILES = [
  ["in", "Batches in", "batches", () => ["/s", bus.all.batches, bus.rates?.all.batches]],
  ["out", "Batches out", "sent", () => ["/s", sent(), sent().at(-1)]],
  ["in", "Live blocks", "blocks", () => ["", bus.all.blocks, bus.rates?.all.blocks]],
  ["out", "Slowest router's lag", "behind", () => [" s", behind(), behind().at(-1)]],
];
const each = name => Object.values(bus.outputs).map(course => course[name]);
const sent = () => bus.times.map((_, i) => each("batches").reduce((a, v) => v[i] === null ? a : (a ?? 0) + v[i], null));
const behind = () => bus.times.map((_, i) => Math.max(0, ...each("behind").map(v => v[i] ?? 0)));

function tiles() {
  for (const [colour, title, name, read] of TILES) {
    const [unit, values, now] = read();
    if (!$("tile-" + name)) {
      const svg = draw("svg", { id: "tile-" + name, class: colour });
      $("tiles").append(make("article", { className: "tile" }, make("h3", {}, title, make("span")), make("p", {}, make("span"), make("small")), svg));
    }
    const tile = $("tile-" + name).parentElement;
    const [figure, of] = name === "behind" ? seconds(now).split(" ") : [number(now), unit], top = Math.max(...values.filter(v => v !== null), 0);
    tile.querySelector("p span").textContent = figure;
    tile.querySelector("small").textContent = name === "behind" ? " " + of : of;
    tile.querySelector("h3 span").textContent = `peak ${name === "behind" ? seconds(top) : number(top) + unit}`;
    chart($("tile-" + name), bus.times, values, title, unit);
  }
  for (const svg of document.querySelectorAll("[data-spark]")) {
    const [what, ...name] = svg.dataset.spark.split(" "), course = (what === "output" ? bus.outputs : bus.courses)[name.join(" ")];
    if (course?.batches) chart(svg, bus.times, course.batches.slice(-bus.times.length), "batches per second", "/s");
  }
}

/** Draw sources at the left, the bus in the middle, and routers at the right. A line is thicker if more batches pass over it. */
function flow() {
  const svg = $("flow"), shown = 8, apart = 31, drawn = new Map([...svg.children].map(each => [each.dataset.key, each]));
  const left = bus.sources.slice(0, shown), routers = bus.routers.filter(r => r.left === null), right = routers.slice(0, shown);
  const width = Math.max(600, svg.clientWidth || 1100), height = Math.max(left.length, right.length, 3) * apart + 16, middle = height / 2;
  // Reuse existing elements, so that their animations continue.
  const put = (key, tag, attributes, text = "") => {
    const element = drawn.get(key) ?? svg.appendChild(draw(tag, {}));
    drawn.delete(element.dataset.key);
    element.dataset.key = key;
    for (const [name, value] of Object.entries(attributes)) if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
    if (element.textContent !== text) element.textContent = text;
  };
  const node = (key, x, y, side, state, colour, rate, name, note) => {
    const end = width / 2 + side * 62, to = middle + (y - middle) * .4, half = (x + end) / 2;
    const d = side < 0 ? `M${x} ${y}C${half} ${y} ${half} ${to} ${end} ${to}` : `M${end} ${to}C${half} ${to} ${half} ${y} ${x} ${y}`;
    put(key + "line", "path", { d, class: state === "ok" ? colour : state, "stroke-width": (1.5 + Math.min(5, Math.sqrt(rate || 0) / 2)).toFixed(1) });
    put(key + "moves", "path", { d: rate ? d : "", class: "moves " + colour });
    put(key + "dot", "circle", { cx: x, cy: y, r: 5.5, class: state });
    put(key + "name", "text", { x: x + side * 14, y: y - 1, "text-anchor": side < 0 ? "end" : "start" }, name);
    put(key + "note", "text", { x: x + side * 14, y: y + 12, "text-anchor": side < 0 ? "end" : "start", class: "note" }, note);
  };
  const place = (i, of) => middle + (i - (of - 1) / 2) * apart, cut = text => text.length > 24 ? text.slice(0, 23) + "…" : text;
  left.forEach((s, i) => node("s" + i, 190, place(i, left.length), -1, ill("source", s.name) ? "bad" : kind(s.state), "in", bus.rates?.sources[s.name]?.batches, cut(s.name),
    `${s.state} · ${number(sum(s.blocks))} blocks`));
  right.forEach((r, i) => node("r" + i, width - 190, place(i, right.length), 1, ill("router", r.peer) ? "bad" : kind(r.state), "out", r.state === "live" ? bus.rates?.outputs[r.output]?.batches : 0, cut(r.name || r.peer),
    cut(`${r.output} · ${r.behind_seconds ? seconds(r.behind_seconds) + " lag" : r.state}`)));
  const tall = Math.min(height - 8, Math.max(84, height * .55));
  put("bus", "rect", { x: width / 2 - 62, y: middle - tall / 2, width: 124, height: tall, rx: 14, class: "bus" });
  put("rate", "text", { x: width / 2, y: middle + 2, "text-anchor": "middle", class: "big" }, number(bus.rates?.all.batches));
  put("what", "text", { x: width / 2, y: middle + 19, "text-anchor": "middle", class: "note" }, "batches/s");
  const more = [bus.sources.length - left.length, routers.length - right.length];
  more.forEach((n, i) => put("more" + i, "text", { x: i ? width - 2 : 2, y: height - 3, "text-anchor": i ? "end" : "start", class: "note" }, n > 0 ? `and ${n} more` : ""));
  for (const element of drawn.values()) element.remove();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
}

// -- tables

function named(source) {
  return { shows: source.name, make: () => make("button", { textContent: source.name, onclick: () => look(source.name) }) };
}
const REASONS = { copy: "duplicate copy" };
const who = router => router.name ? { shows: router.name + router.peer, make: () => make("span", {}, router.name + " ", make("span", { className: "soft", textContent: router.peer })) } : router.peer;
// A stream may fit the dialects of several engines. The table names one of them, and the details of the source name all.
const dialect = source => {
  const [first, ...others] = (source.dialect ?? "–").split(" | ");
  return first.split(" ")[0].replace(/\.\..*/, "+") + (others.length ? " or alike" : "");
};
const blocks = source => Object.entries(source.blocks).map(([medium, n]) => (medium === "GPU" ? "" : medium + " ") + number(n)).join(" + ") || "0";

function tables() {
  const { sources, routers } = bus, here = routers.filter(r => r.left === null), gone = routers.filter(r => r.left !== null);
  rows($("sources"), sources, s => s.name, s => [named(s), asPill(s.partial ? "partial" : s.state, ill("source", s.name)), asText(dialect(s)),
    s.block_size ?? "–", number(s.last_seq < 0 ? null : s.last_seq), blocks(s),
    number(bus.rates?.sources[s.name]?.batches), spark("source " + s.name, "in"), number(s.counts.recovered), number(s.counts.lost),
    number(sum(s.counts.rejected))]);
  findings();
  const outputs = Object.entries(bus.rates?.outputs ?? {});
  rows($("outputs"), outputs, ([name]) => name, ([name, o]) => [name, number(o.routers), number(o.batches), spark("output " + name, "out"),
    bytes(o.bytes ?? 0), number(o.queue), seconds(o.behind)]);
  rows($("routers"), here, r => r.output + r.stream + r.peer + r.since, r => [who(r), asPill(r.state, ill("router", r.peer)), asText(r.output + (r.stream ? " #" + r.stream : "")),
    asText(r.topics.map(t => t || "all").join(", ") || "none"), clock(r.since), number(r.queued), seconds(r.behind_seconds), number(r.dropped.batches),
    number(r.state_sent.count)]);
  $("no-router").textContent = here.length ? "" : "No router is connected.";
  $("left").hidden = !gone.length;
  $("left").firstElementChild.textContent = gone.length + (gone.length === 1 ? " router disconnected" : " routers disconnected");
  rows($("gone"), gone, r => r.output + r.stream + r.peer + r.since, r => [who(r), asText(r.output), clock(r.left_at), asText(r.left === "left" ? "it ended the connection" : r.left), number(r.dropped.batches)]);
  const why = new Map();
  for (const s of sources) for (const [how, counts] of [["rejected", s.counts.rejected], ["filtered", s.counts.filtered]])
    for (const [reason, count] of Object.entries(counts)) {
      const entry = why.get(how + reason) ?? { how, reason, count: 0, sources: [], example: "" };
      entry.count += count;
      entry.sources.push(s.name);
      entry.example ||= s.examples?.[reason] ?? "";
      why.set(how + reason, entry);
    }
  const found = [...why.values()].filter(w => w.count).sort((a, b) => b.how.localeCompare(a.how) || b.count - a.count);
  rows($("refused"), found, w => w.how + w.reason, w => [(REASONS[w.reason] ?? w.reason) + " · " + w.how, number(w.count), asText(w.sources.join(", ")), asText(w.example || "–")]);
  $("no-refused").textContent = found.length ? "" : "Nothing was rejected or filtered.";
  verdict(sources, here);
  flow();
  if (open) detail();
}

/** Read the metrics that have a limit, and show those that are closest to their limit. */
async function fills() {
  const answer = await fetch("/metrics", { headers: shown({}) });
  if (!answer.ok) return;
  const text = await answer.text(), values = new Map(), about = new Map();
  for (const [, name, help] of text.matchAll(/^# HELP kvbus_(\w+) (.*)$/gm)) about.set(name, help);
  for (const [, name, labels = "", value] of text.matchAll(/^kvbus_(\w+)(\{.*\})? (\S+)$/gm)) values.set(name + labels, Number(value));
  const found = [...values].flatMap(([key, limit]) => {
    const [, name, labels] = key.match(/^(\w+)_limit(\{.*\})?$/) ?? [], used = values.get(name + (labels ?? ""));
    const of = [...(labels ?? "").matchAll(/"([^"]*)"/g)].map(each => each[1]).join(" ");
    return name && used !== undefined && limit > 0 ? [{ key, what: about.get(name), of, used, limit }] : [];
  }).sort((a, b) => b.used / b.limit - a.used / a.limit).slice(0, FILLS);
  rows($("fills"), found, f => f.key, f => [f.what, asText(f.of || "the bus"), number(f.used), number(f.limit), Math.round(100 * f.used / f.limit) + " %"]);
}

function verdict(sources, routers) {
  const ill = sources.filter(s => s.state !== "live"), partial = sources.filter(s => s.partial), slow = routers.filter(r => r.state === "stalled");
  const worst = ill.some(s => kind(s.state) === "bad") || slow.length ? "bad" : ill.length || partial.length || !sources.length ? "warn" : "ok";
  const said = [ill.length ? `${ill.map(s => `${s.name} is ${s.state}`).slice(0, 3).join(", ")}${ill.length > 3 ? ` and ${ill.length - 3} more` : ""}` :
    !sources.length ? "No engine found yet" : sources.length === 1 ? "The source is live" : `All ${sources.length} sources are live`];
  if (partial.length) said.push(`${partial.length} partial`);
  if (slow.length) said.push(`${slow.length} of ${routers.length} routers stalled`);
  else if (routers.length) said.push(routers.length === 1 ? "1 router follows" : `${routers.length} routers follow`);
  const text = said.join(" · ");
  if ($("verdict").textContent.slice(1) === text) return;
  $("verdict").className = "verdict " + worst;
  $("verdict").replaceChildren(make("span", { ariaHidden: "true", textContent: SIGNS[worst] }), text);
}

const happened = t => make("li", {}, make("time", { dateTime: new Date(t.at * 1000).toISOString(), textContent: clock(t.at) }),
  make("span", { className: "dot " + kind(t.after), ariaHidden: "true" }), make("span", {}, make("strong", { textContent: t.name + " " }), t.text));
const ill = (kind, name) => bus.findings.some(f => f.severity === "problem" && f.kind === kind && (kind === "router" ? f.peer : f.name) === name);
/** Show what is wrong with the bus, its sources and its routers: problems first, each with its key, remedy and place in the runbook. Equal findings are one card. */
function findings() {
  const who = f => f.kind === "bus" ? "" : f.kind === "source" ? f.name : "router " + (f.name || f.peer);
  const cards = new Map();
  for (const f of bus.findings) cards.set(f.id, [...(cards.get(f.id) ?? []), f]);
  const more = cards.size - FINDINGS;
  const subjects = all => all.slice(0, 3).map(who).join(", ") + (all.length > 3 ? ` and ${all.length - 3} more` : "");
  $("reasons").replaceChildren(...[...cards.values()].slice(0, FINDINGS).map(all => make("li", { className: all[0].severity },
    make("strong", { textContent: subjects(all) + " ", title: all.map(who).join(", ") }), `${all[0].text}. `,
    make("span", { className: "soft", textContent: `${all[0].key}: ${all[0].remedy}. See ${all[0].link}` }))),
    ...(more > 0 ? [make("li", { className: "note", textContent: `and ${more} more: /findings has all` })] : []));
}
const passes = { all: () => true, incidents: t => ["warn", "bad"].includes(kind(t.after)), folded: () => true };
/** Show what happened, the newest first. Routers that connect, or disconnect without a reason, become one line. */
function timeline() {
  const wanted = $("wanted").value, shown = [];
  let fold = null;
  for (const t of bus.transitions.filter(passes[wanted]).slice(-300).reverse()) {
    if (wanted !== "folded" || t.kind !== "router" || t.text.includes("(")) { fold = null; shown.push(t); continue; }
    if (!fold) shown.push(fold = { at: t.at, after: "idle", name: "", connected: 0, left: 0 });
    fold[t.after] += 1;
    fold.text = `routers: ${fold.connected} connected, ${fold.left} disconnected`;
  }
  $("timeline").replaceChildren(...shown.slice(0, 100).map(happened), ...(shown.length ? [] : [make("li", { className: "soft", textContent: "Nothing yet." })]));
}

// -- one source

async function look(name) {
  open = name;
  $("source-body").replaceChildren();
  detail();
  $("source").showModal();
}
function detail() {
  const s = bus.sources.find(each => each.name === open), course = bus.courses[open], body = $("source-body");
  $("source-name").textContent = open;
  if (!s) return body.replaceChildren("This source was removed.");
  const c = s.counts, facts = { state: s.state + (s.partial ? ", partial" : ""), endpoint: s.endpoint, "replay endpoint": s.replay_endpoint ?? "none",
    epoch: s.epoch, "last seq": number(s.last_seq < 0 ? null : s.last_seq), dialect: s.dialect ?? "–", "block size": s.block_size ?? "–", blocks: blocks(s),
    "batches in": `${number(c.batches)}, ${bytes(c.bytes)}`, events: `${number(c.stored)} stored, ${number(c.removed)} removed, ${number(c.cleared)} cleared`,
    missing: `${number(c.missing)}: ${number(c.recovered)} recovered, ${number(c.lost)} lost, ${number(c.pending)} pending`,
    duplicates: number(c.duplicates), restarts: c.restarts, waiting: number(s.queue_depth) };
  if (!body.firstChild) {
    const titles = { batches: "Batches per second", events: "Events per second", blocks: "Live blocks", queue: "Batches that wait for a gap" };
    body.append(make("div", { className: "charts" }, ...Object.entries(titles).map(([each, title]) => make("div", {}, make("h3", { textContent: title }),
      draw("svg", { class: each === "blocks" ? "out" : "in" })))), make("dl"), make("h3", { textContent: "What happened" }), make("ol", { className: "timeline", tabIndex: 0 }));
  }
  const charts = body.querySelectorAll("svg"), dl = body.querySelector("dl");
  ["batches", "events", "blocks", "queue"].forEach((each, i) => course?.[each] && chart(charts[i], bus.times, course[each].slice(-bus.times.length), each));
  dl.replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  body.querySelector("ol").replaceChildren(...bus.transitions.filter(t => t.name === open).slice(-20).reverse().map(happened));
}

// -- what comes from the bus

// Keep the token only in this page's memory. A browser would send a cookie for other sites' pages, too, and storage would outlive the page.
let token = "", polling = false;
const shown = headers => token ? { ...headers, Authorization: "Bearer " + token } : headers;

async function get(path, options = {}) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(3000), ...options, headers: shown(options.headers) });
  if (!answer.ok) throw Object.assign(new Error((await answer.json().catch(() => ({}))).error ?? answer.statusText), { status: answer.status });
  return answer.json();
}
async function overview() {
  const all = await get("/overview");
  Object.assign(bus, { about: all, times: all.times, all: all.all, outputs: all.outputs, transitions: all.transitions, courses: {} });
  $("config").textContent = lines(all.config).join("\n");
  access(all.content ?? "");
  $("about").textContent = all.version;
  timeline();
  return all.id;
}
function lines(value, indent = "") {
  return Object.entries(value).flatMap(([name, each]) => {
    const key = indent + (Array.isArray(value) ? "-" : name + ":");
    return each !== null && typeof each === "object" && Object.keys(each).length ? [key, ...lines(each, indent + "  ")] : [`${key} ${JSON.stringify(each)}`];
  });
}
async function poll() {
  try {
    [bus.sources, bus.routers, bus.findings] = await Promise.all([get("/sources"), get("/routers"), get("/findings")]);
    bus.heard = performance.now();
    const wanted = bus.sources.slice(0, SPARKS).map(s => s.name).filter(name => !bus.courses[name]);
    await Promise.all(wanted.map(async name => { bus.courses[name] = await get("/history?source=" + encodeURIComponent(name)).catch(() => undefined); }));
    tables();
    if (performance.now() - bus.filled > 10000) { bus.filled = performance.now(); await fills(); }
  } catch { /* the age says it */ }
  setTimeout(poll, document.hidden ? 10000 : 2000);
}
function sampled(rates) {
  const put = (course, values) => { for (const [name, list] of Object.entries(course)) if (name in values) { list.push(values[name]); if (list.length > KEPT) list.shift(); } };
  bus.rates = rates;
  bus.heard = performance.now();
  if (bus.times.at(-1) >= rates.at - .5) return;
  bus.times.push(rates.at);
  if (bus.times.length > KEPT) bus.times.shift();
  put(bus.all, rates.all);
  for (const [name, course] of Object.entries(bus.outputs)) put(course, rates.outputs[name] ?? {});
  for (const [name, course] of Object.entries(bus.courses)) if (course) put(course, rates.sources[name] ?? {});
  if (!document.hidden) { tiles(); flow(); }
}
function access(refused) {
  $("sign-in").hidden = !refused;
  $("content").textContent = refused || (token ? "Signed in, until this page is closed or loaded again." : "");
}
const heard = {
  rates: sampled,
  transition: each => {
    bus.transitions.push(each);
    bus.transitions = bus.transitions.slice(-1000);
    timeline();
    if (each.kind === "finding" && each.name === "bus") ofBus().catch(() => {});
  },
};
/** Read again whether kvbus writes its state, and the findings, which change with it. */
async function ofBus() {
  [bus.about.state_writing, bus.findings] = [(await get("/overview")).state_writing, await get("/findings")];
  tables();
}
/** Follow /events until it ends. An EventSource is not used, because it cannot send the token. */
async function events(id) {
  const answer = await fetch("/events?after=" + id, { headers: shown({}) });
  if (!answer.ok) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map(line => line.split(/: (.*)/s)));
      if (fields.event === "start" && JSON.parse(fields.data).resumed === false) return reader.cancel();
      heard[fields.event]?.(JSON.parse(fields.data));
    }
  }
}
async function follow() {
  try {
    const id = await overview();
    if (!polling) { polling = true; poll(); }
    await events(id);
  } catch (error) {
    if (error.status === 403) { $("verdict").textContent = "Sign in to see this bus."; access(error.message); }
  }
  setTimeout(follow, 1000);
}
async function signIn(event) {
  event.preventDefault();
  token = $("sign-in-token").value.trim();
  try { await overview(); $("sign-in-token").value = ""; } catch (error) { access(error.message); }
}
function age() {
  const old = bus.heard ? (performance.now() - bus.heard) / 1000 : null, stale = old !== null && old > STALE;
  $("age").className = stale ? "age stale" : "age";
  document.body.className = stale ? "stale" : "";
  $("age-text").textContent = old === null ? "asking the bus…" : stale ? `no answer for ${duration(old)}` : `as of ${old.toFixed(1)} s ago`;
  const alarm = stale ? "The bus does not answer. What is shown is old." : "";
  if ($("alarm").textContent !== alarm) $("alarm").textContent = alarm;
  document.title = stale ? "(no answer) kvbus" : "kvbus";
  if (!stale && bus.rates) {
    const state = !bus.about.config?.state_dir ? "off" : bus.about.state_writing ? "written" : "not written";
    const facts = { version: bus.about.version, state, up: duration(bus.rates.at - bus.about.started), started: new Date(bus.about.started * 1000).toLocaleString("en-GB") };
    if ($("facts").dataset.shows !== JSON.stringify(facts)) {
      $("facts").dataset.shows = JSON.stringify(facts);
      $("facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
      $("about").textContent = `${facts.version} · up ${facts.up}`;
    }
  }
}

$("wanted").addEventListener("change", timeline);
$("sign-in").addEventListener("submit", signIn);
$("source").addEventListener("close", () => { open = null; });
follow();
setInterval(age, 250);
