// The page: it connects to the server, feeds the model with events, and draws it.

import { Model } from "./model.js";
import { History } from "./history.js";
import { Board } from "./draw.js";
import { Server, events } from "./stream.js";
import { Chat } from "./chat.js";
import { Workload, workload } from "./workloads.js";
import { Recording, savePage } from "./record.js";
import { WhatIf } from "./what-if.js";
import { Guide } from "./guide.js";

const $ = (id) => document.getElementById(id);
const DRAW_MS = 80, RETRY_MS = 1000;
const viewer = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const server = new Server(), model = new Model(), history = new History(model), recording = new Recording();
let chosen = null, dirty = true, drawn = 0, bad = "";

function select(what) {
  board.mark = null;
  chosen = what && (what.step !== undefined || what.uid !== undefined) ? what : null;
  dirty = true;
}
const chat = new Chat(server, model, viewer, select);

// ---- the text of pages, where it is allowed ----

const pageTexts = new Map(), asked = new Set(); // text of token ids, by the ids
function wordsOf(page, state) {
  const own = chat.wordsOf(page, state);
  if (own || !model.server.text) return own;
  const ids = state.pageTokens.get(page);
  if (!ids) return "";
  const key = ids.join(" ");
  if (pageTexts.has(key)) return pageTexts.get(key);
  if (asked.size < 8 && !asked.has(key)) {
    asked.add(key);
    server.json("detokenize", { tokens: ids }).then((found) => { pageTexts.set(key, found.prompt); dirty = true; }, () => pageTexts.set(key, "")).finally(() => asked.delete(key));
    if (pageTexts.size > 4000) pageTexts.clear();
  }
  return "";
}
const board = new Board($("board"), model, history, select, wordsOf);

board.panels.timeline.box.append(document.querySelector(".legend"));
const whatIf = new WhatIf($("what-if"), server, model);

// ---- drawing ----

function draw(time) {
  if (dirty && time - drawn >= DRAW_MS) {
    dirty = false;
    drawn = time;
    board.draw(chosen);
    whatIf.update(chosen);
    chat.markAll();
    $("past").hidden = !board.notice;
    if (board.notice) $("past-words").textContent = board.notice;
    $("pause").textContent = model.pace.paused ? "Resume" : "Pause";
    $("pause").setAttribute("aria-pressed", model.pace.paused);
    const held = model.pace.paused && model.open.size ? pausedWords() : "";
    $("paused").hidden = !held;
    if ($("paused").textContent !== held) $("paused").textContent = held;
    const delay = $("delay"), value = String(model.pace.delay);
    if (document.activeElement !== delay && [...delay.options].some((each) => each.value === value)) delay.value = value;
  }
  requestAnimationFrame(draw);
}
requestAnimationFrame(draw);
addEventListener("resize", () => { dirty = true; });

function status(text, isBad = false) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").classList.toggle("bad", isBad);
}
function message(text, isBad = false) {
  $("message").textContent = text;
  $("message").classList.toggle("bad", isBad);
}

function pausedWords() {
  const lag = model.header && model.header.options.overlap ? " Overlap: a step's token is read one step later." : "";
  return `The server is paused, and ${model.open.size === 1 ? "1 request waits" : `${model.open.size} requests wait`}: press One step (n), or Resume (p).${lag}`;
}
// Buttons that need the server wait until it is there.
let ready = false;
function setReady(is) {
  ready = is;
  if (is) status("watching");
  for (const each of document.querySelectorAll("#first button, #workloads [data-workload], #what-if form button")) each.disabled = !is;
  if (!chat.control) $("send").disabled = !is;
  for (const each of $("pace").querySelectorAll("button, select")) each.disabled = !is || !model.server.control;
}

// ---- events ----

function take(line) {
  const event = JSON.parse(line);
  recording.add(event, line);
  if (event.event === "own") chat.own(event);
  else model.apply(event);
  history.add(event, line);
  if (event.event === "server") {
    $("model").textContent = event.model;
    document.title = `minisgl, live: ${event.model}`;
    $("what-if").hidden = $("ask-what-if").hidden = !event.control;
    $("pace").title = event.control ? "" : "This server may not be slowed down from a page (live.control).";
  }
  if (event.event === "now" && !ready) setReady(true);
  if (event.event === "lost") message(`This page was too slow: it lost ${event.frames} frames, and shows the state anew.`, true);
  dirty = true;
}
// A browser keeps a page that is left, for its Back button. The page must not keep one of the browser's six connections too.
let connection = new AbortController();
window.addEventListener("pagehide", () => connection.abort());
window.addEventListener("pageshow", (event) => { if (event.persisted) window.location.reload(); });
async function watch() {
  for (;;) {
    connection = new AbortController();
    try {
      const response = await server.fetch(`live?viewer=${viewer}`, undefined, { signal: connection.signal });
      status("connected");
      $("key-form").hidden = true;
      bad = "";
      for await (const data of events(response)) for (const line of data.split("\n")) if (line) take(line);
      bad = "The server closed the connection.";
    } catch (error) {
      if (connection.signal.aborted) return;
      if (error.status === 401) { askForKey(server.key ? error.message : ""); return; }
      bad = error.status ? error.message : "The server can't be reached.";
    }
    setReady(false);
    status(`${bad} Trying again …`, true);
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}
function askForKey(error) {
  status("locked");
  $("key-form").hidden = false;
  $("key-error").textContent = error;
  $("key").focus();
}
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  server.key = $("key").value;
  $("key").value = "";
  watch();
});

// ---- pace and workloads ----

async function pace(body) {
  try { await server.fetch("live/pace", body); } catch (error) { message(error.message, true); }
}
$("pause").addEventListener("click", () => pace({ do: model.pace.paused ? "resume" : "pause" }));
$("one-step").addEventListener("click", () => { select(null); dirty = true; pace({ do: "step" }); });
$("delay").addEventListener("change", () => pace({ do: "delay", seconds: +$("delay").value }));
$("follow").addEventListener("click", () => select(null));

// Scroll to a place that is not on the screen: on a phone, the timeline is below the chat.
function show(e, block = "nearest") {
  const { top, bottom } = e.getBoundingClientRect();
  if (bottom > innerHeight || top < 0) e.scrollIntoView({ block });
}

const running = new Workload(server, chat);
let begun = null; // the step with which the last workload began
running.changed = (failed) => {
  $("stop-workload").disabled = !running.open;
  if (failed) message(failed, true);
};
async function start(name, edition) {
  const { bursts, words, smallPool } = workload(name, model.spec, edition), { prompt, cached } = model.totals;
  const live = "To see it live, start a server with make serve ARGS=num_pages=64, and press the button there.";
  if (smallPool && !model.server.control) { message(words + live); return null; }
  message(smallPool ? `${words}So ${bursts[0].prompts.length} requests run now, and the simulated engine repeats them with ${smallPool} pages. ${live}` : words);
  select(null);
  show($("message"), "start");
  begun = model.lastLaunched + 1;
  const at = begun, ended = await running.start(bursts);
  await settled(() => !model.open.size && model.lastLaunched >= at);
  if (!ended || at !== begun) return null;
  if (smallPool) await whatIf.askFor({ at, num_pages: smallPool });
  else if (name === "long") whatIf.prepare({ at, scheduler: "mixed", max_prefill_tokens: 64 });
  const first = [...model.requests.values()].filter((req) => req.added >= at && req.chunks.length).slice(0, bursts[0].chats ? bursts[0].chats.length : 0);
  return { at, first, cached: model.totals.cached - cached, prompt: model.totals.prompt - prompt };
}
async function run(name, edition, delay) {
  const slow = delay && model.server.control && !model.pace.delay;
  if (slow) await pace({ do: "delay", seconds: delay });
  const done = await start(name, edition);
  if (slow) await pace({ do: "delay", seconds: 0 });
  return done;
}
// Wait until the page has the events of the requests that have ended.
async function settled(isSo) {
  for (let i = 0; i < 80 && !isSo(); i++) await new Promise((done) => setTimeout(done, 50));
}
for (const button of document.querySelectorAll("#workloads [data-workload]")) button.addEventListener("click", () => run(button.dataset.workload));
new Guide({ model, chat, board, whatIf, run, settled, changed: () => { dirty = true; } });
setReady(false);
$("stop-workload").addEventListener("click", () => running.stop());

// ---- saving, theme, keys ----

$("save-trace").addEventListener("click", () => message(recording.saveTrace()));
$("save-page").addEventListener("click", async () => message(await savePage(recording, chat.transcript())));
const THEME = "minisgl-live-theme", root = document.documentElement;
try { if (localStorage.getItem(THEME)) root.dataset.mdColorScheme = localStorage.getItem(THEME); } catch { /* no storage */ }
$("theme").addEventListener("click", () => {
  const now = root.dataset.mdColorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "slate" : "default");
  root.dataset.mdColorScheme = now === "slate" ? "default" : "slate";
  try { localStorage.setItem(THEME, root.dataset.mdColorScheme); } catch { /* no storage */ }
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  const { steps } = model, i = chosen ? steps.findIndex((step) => step.s === chosen.step) : steps.length - 1;
  const to = { ArrowLeft: i - 1, ArrowRight: i + 1, PageUp: i - 10, PageDown: i + 10, Home: 0, End: steps.length - 1 }[event.key];
  if (to !== undefined && steps.length && !event.target.closest("#chat")) {
    event.preventDefault();
    select({ step: steps[Math.max(0, Math.min(to, steps.length - 1))].s, uid: chosen ? chosen.uid : undefined });
  }
  if (event.key === "Escape") select(null);
  if (event.key === "p" && !$("pause").disabled) $("pause").click();
  if (event.key === "n" && !$("one-step").disabled) $("one-step").click();
});

window.minisglLive = { model, chat, recording, history, board }; // for tests, and for the curious in the console
watch();
