// SPDX-License-Identifier: Apache-2.0
// The page of kvqd: asks for the lists every two seconds and shows them. It changes nothing.
"use strict";

const LOOK_MS = 2000, MINUTE = 30; // looks that a minute has
const ANSWER_MS = 10000, LIST_MS = 60000; // that an answer may take, and a list of sessions
const SILENT_MS = 5000;            // without an answer, until that is said
const STORE_MS = 2500;             // that the rest waits for the store's answer
const ROWS = 200, EVENTS = 100;    // that are shown
const SHARE = 20;                  // a long list is asked for in a 20th of the time
const $ = (id) => document.getElementById(id);
let token = sessionStorage.getItem("token") || "", last = 0;
let sort = { key: "memory", down: true }, sessions = [];
let listAt = 0, listEvery = 0; // when sessions are to be listed next, and how often, in ms
const looks = []; // of the last minute: when, counters, histograms

// ---- Words ----

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit + 1 < units.length; unit++) n /= 1024;
  return (unit ? n.toFixed(1) : n) + " " + units[unit];
}
const whole = (n) => Math.round(n).toLocaleString("en");
const rate = (n) => n >= 100 ? whole(n) : n.toFixed(1);
function span(ms) {
  const s = ms / 1000;
  return s < 120 ? s.toFixed(0) + " s" : s < 7200 ? (s / 60).toFixed(0) + " min" :
    s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " days";
}
function seconds(s) {
  return s === null ? "–" : s === Infinity ? "> 8.4 s" : s < 1e-3 ? (s * 1e6).toFixed(0) + " µs" :
    s < 1 ? (s * 1e3).toFixed(s < 1e-2 ? 1 : 0) + " ms" : s.toFixed(1) + " s";
}

// ---- Elements; all text comes from others, and is never read as HTML ----

function element(name, text, attributes) {
  const e = document.createElement(name);
  if (text instanceof Node) e.append(text);
  else if (text !== undefined) e.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) e.setAttribute(key, value);
  return e;
}

// cells: texts, nodes, or {n: text} for numbers; the first one names the row.
function fill(id, rows, empty) {
  const body = $(id).tBodies[0], columns = $(id).tHead.rows[0].cells.length;
  body.replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    cells.forEach((cell, i) => {
      const number = cell !== null && typeof cell === "object" && "n" in cell;
      const td = element(i ? "td" : "th", number ? cell.n : cell, i ? {} : { scope: "row" });
      if (number) td.className = "n";
      row.append(td);
    });
    return row;
  }));
  if (!rows.length) {
    const row = element("tr");
    row.append(element("td", empty, { class: "wide", colspan: columns }));
    body.append(row);
  }
}

function meter(used, most, name) {
  const m = element("meter", undefined, { min: 0, max: 1, high: 0.9, "aria-label": name });
  m.value = most ? used / most : 0;
  const both = element("span");
  both.append(m, ` ${(most ? 100 * used / most : 0).toFixed(1)}%`);
  return both;
}

function line(values) {
  const ns = "http://www.w3.org/2000/svg", most = Math.max(...values, 1e-9);
  const svg = document.createElementNS(ns, "svg"), path = document.createElementNS(ns, "polyline");
  svg.setAttribute("viewBox", `0 0 ${MINUTE} 28`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("points", values.map((v, i) =>
    `${MINUTE - values.length + i + 1},${(27 - 25 * v / most).toFixed(1)}`).join(" "));
  svg.append(path);
  return svg;
}

// ---- Asking ----

class Refused extends Error {}

async function ask(path, json = true, ms = ANSWER_MS) {
  const reply = await fetch(path, { signal: AbortSignal.timeout(ms),
    headers: token ? { Authorization: "Bearer " + token } : {} });
  if (reply.status === 401) throw new Refused(await reply.text());
  if (!reply.ok) throw new Error(`${path}: ${await reply.text()}`);
  return json ? reply.json() : reply.text();
}

// Counts of kvqd_request_seconds by operation and bound.
function histograms(text) {
  const found = {};
  const row = /^kvqd_request_seconds_bucket\{op="(\w+)",le="([^"]+)"\} (\S+)$/gm;
  for (const [, op, le, count] of text.matchAll(row))
    (found[op] ||= []).push([le === "+Inf" ? Infinity : Number(le), Number(count)]);
  return found;
}

// ---- Showing ----

function showNow(status, now) {
  const c = now.counters, before = looks.length > 1 ? looks[looks.length - 2] : now;
  const each = (name, a, b) => b.at > a.at ?
    (b.counters[name] - a.counters[name]) / (b.at - a.at) * 1000 : 0;
  const drawn = (name) => looks.slice(1).map((look, i) => each(name, looks[i], look));
  const cards = [
    ["steps a second", rate(each("steps", before, now)), drawn("steps")],
    ["tokens a second", rate(each("appended_tokens", before, now)), drawn("appended_tokens")],
    ["attention calls a second", rate(each("attends", before, now)), drawn("attends")],
    ["sessions", whole(status.sessions)],
    ["tokens", whole(status.tokens)],
    ["clients", whole(status.clients)],
    ["parked on disk", whole(c.offloaded_now)],
    ["made room, came back", `${whole(c.parked_room + c.parked_quota + c.parked_idle + c.demoted)}, ` +
      whole(c.fetched + c.promoted)],
    ["wait for room", whole(c.waiting_for_room_now)],
    ["refused requests", whole(c.refused_requests)],
    ["up for", span(status.uptime_ms)],
  ];
  $("now").replaceChildren(...cards.map(([name, value, values]) => {
    const card = element("div"), dd = element("dd", value);
    if (values) dd.append(line(values));
    card.append(element("dt", name), dd);
    return card;
  }));
}

function quantile(before, now, share) {
  const counts = now.map(([le, n], i) => [le, n - (before ? before[i][1] : 0)]);
  const all = counts[counts.length - 1][1];
  return all ? counts.find(([, n]) => n >= share * all)[0] : null;
}

function showTime(now, first) {
  const seconds_ = (now.at - first.at) / 1000;
  fill("time", Object.entries(now.times).map(([op, buckets]) => {
    const before = first === now ? null : first.times[op];
    const n = buckets[buckets.length - 1][1] - (before ? before[before.length - 1][1] : 0);
    return [n, op, buckets, before];
  }).filter(([n]) => n).map(([n, op, buckets, before]) => [op,
    { n: before && seconds_ ? rate(n / seconds_) : "–" },
    ...[0.5, 0.9, 0.99].map((q) => ({ n: seconds(quantile(before, buckets, q)) }))]),
  "no request in the last minute");
}

function showMemory(status, quotas) {
  const places = [{ place: "host", used_bytes: status.pool_used_bytes,
    extent_bytes: status.pool_extent_bytes, pool_bytes: status.pool_bytes }, ...status.gpus];
  fill("memory", places.map((p) => [p.name ? `${p.place} (${p.name})` : p.place,
    meter(p.used_bytes, p.pool_bytes, `used of ${p.place}`), { n: bytes(p.used_bytes) },
    { n: bytes(p.extent_bytes) }, { n: bytes(p.pool_bytes) }]));
  const of = (q, key) => ({ n: bytes(q.used[key]) + (q.limit[key] ? " of " + bytes(q.limit[key]) : "") });
  fill("namespaces", quotas.map((q) => [q.namespace,
    { n: whole(q.used.sessions) + (q.limit.sessions ? " of " + whole(q.limit.sessions) : "") },
    of(q, "host_bytes"), of(q, "device_bytes"), of(q, "disk_bytes"),
    { n: whole(Object.values(q.refused).reduce((a, b) => a + b, 0)) }]), "no namespace yet");
}

// In a sentence, first what is wrong.
function savingState(s, unsaved) {
  const save = s.jobs.save, waits = `${whole(unsaved)} session${unsaved === 1 ? " is" : "s are"} not saved`;
  if (!s.store) return ["no session is saved: storage_dir is not set", false];
  if (s.store.read_only) return ["the store is read-only, nothing is saved: kvqctl storage status says why", true];
  if (save.fails) return [`saves fail (${save.status}, ${span(save.last_ms)} ago): ${waits}; ` +
    "kvqctl doctor says what to do", true];
  return ["no save fails just now" + (unsaved ? "; " + waits : ""), false];
}

// Why nothing is known of the store just now; empties what was shown of it before.
function showNoStore(why) {
  const text = `the store cannot be looked at: ${why}`;
  if ($("saving").textContent !== text) $("saving").textContent = text;
  $("saving").className = "bad";
  $("store").replaceChildren();
  $("jobs").parentNode.hidden = true;
  $("remote").textContent = "";
}

function showStore(s, unsaved) {
  const [text, bad] = savingState(s, unsaved), d = s.store;
  if ($("saving").textContent !== text) $("saving").textContent = text;
  $("saving").className = bad ? "bad" : "";
  const most = d && (d.limit_bytes ? Math.min(d.limit_bytes, d.used_bytes + d.free_bytes) :
    d.used_bytes + d.free_bytes);
  const cards = !d ? [] : !d.known ? [["on disk", "not looked at yet"]] : [
    ["sessions on disk", whole(d.sessions)],
    ["not saved", whole(unsaved)],
    [most === d.limit_bytes ? "used of storage_bytes" : "used of the disk",
      `${bytes(d.used_bytes)} of ${bytes(most)}`, meter(d.used_bytes, most, "used by the store")],
    ["room for saves", bytes(d.room_bytes)],
    ["free on the disk", bytes(d.free_bytes)],
  ];
  $("store").replaceChildren(...cards.map(([name, value, more]) => {
    const card = element("div"), dd = element("dd", value);
    if (more) dd.append(more);
    card.append(element("dt", name), dd);
    return card;
  }));
  const words = { save: "save", restore: "restore", fetch: "come back from disk",
    prefix: "read a prefix", push: "push to the remote store", pull: "pull from the remote store" };
  fill("jobs", Object.entries(s.jobs).filter(([task]) => s.remote || !/^pu/.test(task)).map(([task, j]) =>
    [words[task], { n: whole(j.done) }, { n: whole(j.failed) },
      j.failed ? `${span(j.last_ms)} ago: ${j.status}, ${j.text}` : "–"]));
  $("jobs").parentNode.hidden = !d;
  $("remote").textContent = s.remote ? `Remote store: ${s.remote.endpoint}, bucket ${s.remote.bucket}` +
    (s.remote.prefix ? `, prefix ${s.remote.prefix}` : "") : "There is no remote store (remote_endpoint is not set).";
}

const COLUMNS = [ // key, title, value to sort by, what is shown
  ["name", "session", (s) => s.name || "#" + s.id],
  ["namespace", "namespace", (s) => s.namespace],
  ["format", "format", (s) => s.format],
  ["tokens", "tokens", (s) => s.tokens, whole],
  ["memory", "memory", (s) => s.packed_bytes + s.window_bytes, bytes],
  ["compression", "of 16 bits", (s) => s.compression, (n) => n > 0 ?
    n >= 1 ? n.toFixed(2) + " × smaller" : (1 / n).toFixed(2) + " × larger" : "–"],
  ["shared", "shared", (s) => s.shared_bytes, bytes],
  ["tier", "tier", (s) => s.tier + (s.pinned ? ", pinned" : "") + (s.saved ? ", saved" : "")],
  ["idle", "idle", (s) => s.idle_ms, span],
];

function headSessions() {
  $("sessions").tHead.rows[0].replaceChildren(...COLUMNS.map(([key, title, , show]) => {
    const button = element("button", title, { type: "button" }), th = element("th", button, { scope: "col" });
    if (show) th.className = "n";
    if (sort.key === key) th.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    button.addEventListener("click", () => {
      sort = { key, down: sort.key === key ? !sort.down : Boolean(show) };
      headSessions();
      showSessions();
      $("sessions").tHead.rows[0].cells[COLUMNS.findIndex((c) => c[0] === key)].firstChild.focus();
    });
    return th;
  }));
}

function showSessions() {
  const value = COLUMNS.find((c) => c[0] === sort.key)[2], find = $("find").value.toLowerCase();
  const wanted = sessions.filter((s) => !find ||
    `${s.namespace}/${s.name || "#" + s.id} ${s.format} ${s.tier}`.toLowerCase().includes(find));
  wanted.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (sort.down ? -1 : 1));
  const shown = wanted.slice(0, ROWS);
  $("n-sessions").textContent = (shown.length < sessions.length ?
    `${whole(shown.length)} of ${whole(sessions.length)}` : whole(sessions.length)) +
    (listEvery > 2 * LOOK_MS ? `, listed every ${span(listEvery)}` : "");
  fill("sessions", shown.map((s) => COLUMNS.map(([, , get, show]) =>
    show ? { n: show(get(s)) } : get(s))), find ? "none is found" : "no session yet");
}

function showClients(clients, prefixes) {
  fill("clients", clients.map((c) => ["#" + c.id, c.name, { n: c.pid }, { n: c.uid },
    { n: whole(c.sessions) }, { n: whole(c.queues) }, { n: bytes(c.buffer_bytes) },
    { n: whole(c.requests) }, { n: span(c.connected_ms) }]), "no client is attached");
  fill("prefixes", prefixes.map((p) => [p.namespace, { n: whole(128 * p.pages) },
    { n: bytes(p.bytes) }, { n: bytes(p.idle_bytes) }, { n: whole(p.lookups) },
    { n: whole(p.hits) }, { n: whole(p.hit_tokens) }]), "no prefix is kept");
}

function showEvents(news) {
  if (news.last < last) $("events").replaceChildren(); // another daemon
  last = news.last;
  for (const e of news.events) {
    const li = element("li"), when = new Date(e.unix_ms);
    li.append(element("time", when.toLocaleTimeString(), { datetime: when.toISOString() }),
      [e.kind, e.namespace && e.session ? `${e.namespace}/${e.session}` : e.namespace || e.session,
        e.client ? `client ${e.client}` : "", e.text].filter(Boolean).join(" · "));
    $("events").prepend(li);
  }
  while ($("events").children.length > EVENTS) $("events").lastChild.remove();
}

// ---- Looking again and again ----

function state(text, bad) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = bad ? "bad" : "";
}

// Sessions, newly listed or those of before: a daemon with very many of them takes its time.
async function listSessions() {
  const began = performance.now();
  if (began < listAt) return sessions;
  const list = await ask("sessions", true, LIST_MS), now = performance.now();
  listEvery = SHARE * (now - began);
  listAt = now + listEvery;
  return list;
}

// The rest is shown without it. The token is another matter, and so is a daemon that is gone, which
// the other questions find out.
function withoutStore(error) {
  if (error instanceof Refused) throw error;
  return { failed: error.message };
}

async function look() {
  const [status, quotas, list, clients, prefixes, events, metrics, storage] = await Promise.all(
    [ask("status"), ask("quotas"), listSessions(), ask("clients"), ask("prefixes"),
      ask("events?after=" + last), ask("metrics", false), ask("storage", true, STORE_MS).catch(withoutStore)]);
  const now = { at: performance.now(), counters: status.counters, times: histograms(metrics) };
  if (looks.length && status.counters.steps < looks[0].counters.steps) looks.length = 0;
  looks.push(now);
  if (looks.length > MINUTE) looks.shift();
  $("version").textContent = `${status.version}, ${status.backend}, ${status.isa}, ` +
    `${status.workers} worker${status.workers === 1 ? "" : "s"}`;
  state(status.draining ? "ending: nothing new is taken" : "running", status.draining);
  $("sign-in").hidden = true;
  $("all").hidden = false;
  answered = now.at;
  showNow(status, now);
  showMemory(status, quotas);
  if (storage.failed) showNoStore(storage.failed);
  else showStore(storage, status.counters.unsaved_now);
  showTime(now, looks[0]);
  sessions = list;
  showSessions();
  showClients(clients, prefixes);
  showEvents(events);
}

let running = false, again = false, timer = 0;
let answered = performance.now(); // the last look, or the page's beginning

function showSilence(why) {
  state(`no answer for ${span(performance.now() - answered)}` + (why ? ` (${why})` : "") +
    ($("all").hidden ? "" : "; the figures are that old"), true);
}

// One loop, whoever calls it how often: again at once if somebody did during a look.
async function loop() {
  again = running;
  if (running) return;
  running = true;
  clearTimeout(timer);
  const goesOn = await lookOnce();
  running = false;
  if (again) loop();
  else if (goesOn) timer = setTimeout(loop, LOOK_MS);
}

// Whether to look again by itself.
async function lookOnce() {
  try {
    await look();
  } catch (error) {
    if (error instanceof Refused) {
      if (again) return true; // with another token
      $("all").hidden = true;
      $("sign-in").hidden = false;
      $("refused").textContent = token ? "That is not this daemon's token; it changes with each start." : "";
      $("token-file").textContent = (error.message.match(/\S+http-token/) || ["http-token"])[0];
      sessionStorage.removeItem("token");
      state("waiting for the token", true);
      return false; // until there is one
    }
    showSilence(error.message);
  }
  return true;
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("token", token);
  loop();
});
$("find").addEventListener("input", showSessions);
if (location.hash.startsWith("#token=")) { // of a link
  token = location.hash.slice(7);
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
}
setInterval(() => { // while a look takes long
  if (running && performance.now() - answered > SILENT_MS) showSilence();
}, LOOK_MS);
headSessions();
loop();
