// Draws the model: numbers, timeline, the step in words, queue, tree and page map. Text is set as textContent only.

import { CACHE, FREE, KEPT_STEPS, RETIRING } from "./model.js";
import { explain, plural, why } from "./words.js";

const NS = "http://www.w3.org/2000/svg", HUES = 8, MAX_LINES = 28, MAX_CELLS = 1024, FEW_CELLS = 256, MAX_NODES = 60;
const hue = (uid) => "q" + (((uid % HUES) + HUES) % HUES);
const seconds = (s) => s === null ? "–" : s < 0.9995 ? `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(2)} s`;
const oneLine = (words) => words.replace(/\s+/g, " ").trim();
const readable = (words) => oneLine(words.replace(/<\|im_start\|>(\w+)/g, " $1:").replace(/<\|[^|]*\|>/g, " "));

export function html(parent, tag, cls, words) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (words !== undefined) e.textContent = words;
  if (parent) parent.appendChild(e);
  return e;
}
function svg(parent, tag, attributes, words) {
  const e = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes || {})) if (value !== undefined) e.setAttribute(key, value);
  if (words !== undefined) e.textContent = words;
  if (parent) parent.appendChild(e);
  return e;
}
function button(e, label, act) {
  for (const [key, value] of [["tabindex", 0], ["role", "button"], ["aria-label", label], ["data-key", label]]) e.setAttribute(key, value);
  e.classList.add("hit");
  e.addEventListener("click", act);
  e.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(event); }
  });
}

export class Board {
  // `select(what)` is called with {step, uid} when something is chosen. `wordsOf(page, model)` returns a page's text or "".
  constructor(root, model, history, select, wordsOf) {
    Object.assign(this, { root, model, history, select, wordsOf, seen: model, isPast: false, when: "", mark: null });
    this.panels = {};
    for (const [name, title, wide] of [["numbers", "Numbers", true], ["timeline", "Batch timeline", true], ["step", "Step", true],
                                       ["tree", "Radix tree", false], ["pages", "Page map", false], ["queue", "Requests", true]]) {
      const box = html(root, "section", `panel ${name}` + (wide ? " wide" : ""));
      const head = html(box, "h2", "", title);
      head.id = `panel-${name}`;
      box.setAttribute("aria-labelledby", head.id);
      this.panels[name] = { box, head, body: html(box, "div", "body") };
    }
    this.numbers = this.makeNumbers(this.panels.numbers.body);
    this.makeEarlier(this.panels.timeline);
    this.cells = [];
  }
  draw(chosen) {
    this.chosen = chosen;
    const past = chosen && chosen.step !== undefined ? this.history.at(chosen.step) : null;
    Object.assign(this, { seen: past || this.model, isPast: past !== null, when: past ? ` at step ${chosen.step}` : "" });
    for (const name of ["queue", "tree", "pages"]) this.panels[name].box.classList.toggle("past", this.isPast);
    const focused = document.activeElement && this.root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    this.drawNumbers();
    this.drawTimeline();
    this.drawStep();
    this.drawQueue();
    this.drawTree();
    this.drawPages();
    if (focused !== undefined && document.activeElement === document.body) {
      const again = [...this.root.querySelectorAll("[data-key]")].find((e) => e.dataset.key === focused);
      if (again) again.focus({ preventScroll: true });
    }
  }
  // What is shown beside the present, in words, or "".
  get notice() {
    const step = this.chosen ? this.chosen.step : undefined;
    if (!this.chosen) return "";
    if (step === undefined) return `Request ${this.chosen.uid} is marked.`;
    if (this.isPast) return `Tree, pages and requests are as they were when step ${step} was launched.`;
    return `The events of step ${step} are no longer kept: tree, pages and requests are shown as they are now.`;
  }
  // The step that is shown: the chosen one, the first one that the guide points at, or the last with a result that counts.
  shown() {
    const { steps, stepAt, open } = this.model, useful = (step) => step.rows.some((row) => !row.lost);
    return (this.chosen && stepAt.get(this.chosen.step)) || (this.mark && stepAt.get(this.mark.from)) || (open.size ? steps.at(-1) : steps.findLast(useful) || steps.at(-1));
  }

  // ---- numbers ----

  makeNumbers(body) {
    const list = html(body, "dl", "numbers"), out = {};
    for (const [key, name] of [["rate", "tokens a second"], ["ttft", "time to first token"], ["gap", "between tokens"], ["hit", "prompt tokens cached"],
                               ["free", "free pages"], ["running", "running"], ["waiting", "waiting"], ["retractions", "retractions"]]) {
      const box = html(list, "div");
      html(box, "dt", "", name);
      const place = html(box, "dd");
      out[key] = html(place, "span", "", "–");
      if (key === "free") this.poolSize = html(place, "small");
      out[key].dataset.number = key;
    }
    return out;
  }
  drawNumbers() {
    const n = this.model.numbers(), put = (key, words) => { if (this.numbers[key].textContent !== words) this.numbers[key].textContent = words; };
    put("rate", n.rate ? n.rate.toFixed(n.rate < 10 ? 1 : 0) : "0");
    put("ttft", seconds(n.ttft));
    put("gap", seconds(n.gap));
    put("hit", n.hit === null ? "–" : `${Math.round(100 * n.hit)} %`);
    put("free", n.pool.free.toLocaleString("en"));
    this.poolSize.textContent = ` of ${this.model.spec.num_pages.toLocaleString("en")}, ${this.model.spec.page_size} tokens each`;
    put("running", String(n.running));
    put("waiting", String(n.waiting));
    put("retractions", String(n.retractions));
  }

  // ---- timeline ----

  canvas(body, width, height, label) {
    const e = svg(null, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
    body.replaceChildren(e);
    return e;
  }
  drawTimeline() {
    const { body } = this.panels.timeline, { steps } = this.model, wide = Math.max(body.clientWidth, 240), left = 44, cell = 22, top = 4;
    if (!steps.length) { body.replaceChildren(html(null, "p", "soft", "No step yet. Write something in the chat, or start a workload.")); return; }
    const columns = Math.max(6, Math.floor((wide - left - 4) / cell)), { stepAt } = this.model, { mark } = this;
    const chosenAt = this.chosen ? steps.indexOf(stepAt.get(this.chosen.step)) : -1, markAt = mark && !this.chosen ? steps.indexOf(stepAt.get(mark.from)) : -1;
    const middle = chosenAt >= 0 ? chosenAt + Math.floor(columns / 2) : markAt >= 0 ? markAt + columns - 2 : steps.length - 1;
    const last = Math.min(steps.length - 1, Math.max(middle, columns - 1));
    const from = Math.max(0, last - columns + 1), visible = steps.slice(from, last + 1), uids = [];
    for (const step of visible) for (const uid of [...step.rows.map((row) => row.uid), ...step.waiting]) if (!uids.includes(uid)) uids.push(uid);
    uids.sort((a, b) => a - b);
    const chosenUid = this.chosen ? this.chosen.uid : undefined, lines = uids.length > MAX_LINES ? uids.slice(-MAX_LINES) : uids;
    if (chosenUid !== undefined && uids.includes(chosenUid) && !lines.includes(chosenUid)) lines[0] = chosenUid;
    const high = lines.length > 8 ? 14 : 20, labels = new Set(), isNear = (s) => [...labels].some((each) => Math.abs(each - s) < 1 + String(s).length / 2); // what would overlap
    for (const s of [this.chosen && this.chosen.step, mark && mark.from]) if (s !== null && s !== undefined && !isNear(s)) labels.add(s);
    for (const { s } of visible) if (s % 5 === 0 && !isNear(s)) labels.add(s);
    const bottom = top + lines.length * high, y = new Map(lines.map((uid, i) => [uid, top + i * high]));
    const e = this.canvas(body, wide, bottom + 18, "Batch timeline: a column for each step, a line for each request");
    const x = (i) => left + i * cell;
    visible.forEach((step, i) => {
      const at = this.chosen && this.chosen.step === step.s;
      const isMarked = mark && step.s >= mark.from && step.s <= mark.to;
      const column = svg(e, "g", { "data-step": step.s, class: (at ? "column chosen" : "column") + (isMarked ? " marked" : "") });
      svg(column, "rect", { class: "back", x: x(i), y: 0, width: cell, height: bottom + 18 });
      if (isMarked) svg(column, "rect", { class: "mark", x: x(i), y: 0, width: cell, height: 3 });
      if (labels.has(step.s)) svg(column, "text", { class: at || isMarked ? "mid strong" : "soft mid", x: x(i) + cell / 2, y: bottom + 13 }, step.s);
      for (const uid of step.waiting) if (y.has(uid)) svg(column, "path", { class: "wait", d: `M${x(i) + 2} ${y.get(uid) + high / 2}h${cell - 4}` });
      for (const uid of step.retracted || []) if (y.has(uid)) {
        const cross = svg(column, "path", { class: "retracted", d: `M${x(i) + cell / 2 - 4} ${y.get(uid) + high / 2 - 4}l8 8m0 -8l-8 8` });
        svg(cross, "title", {}, `request ${uid} was retracted: it gave its pages back, and waits again`);
      }
      for (const row of step.rows) if (y.has(row.uid)) this.drawRow(column, step, row, x(i), y.get(row.uid), cell, high);
      button(column, `Step ${step.s}`, (event) => this.select({ step: step.s, uid: event.target.dataset && event.target.dataset.uid ? +event.target.dataset.uid : chosenUid }));
    });
    for (const uid of lines) {
      const name = svg(e, "g", { class: chosenUid === uid ? "chosen" : "" });
      svg(name, "circle", { class: hue(uid), cx: 7, cy: y.get(uid) + high / 2, r: 5.5 });
      svg(name, "text", { x: 16, y: y.get(uid) + high / 2 + 4 }, uid);
      button(name, `Request ${uid}`, () => this.select({ step: this.chosen ? this.chosen.step : undefined, uid: chosenUid === uid ? undefined : uid }));
    }
    if (this.drawEarlier) this.drawEarlier(columns);
    const more = uids.length - lines.length;
    this.panels.timeline.head.textContent = "Batch timeline" + (more > 0 ? `, without ${plural(more, "older request")}` : "");
  }
  // Buttons that move the timeline, for those without a keyboard.
  makeEarlier({ box, body }) {
    const bar = html(null, "div", "move"), early = html(bar, "button", "", "◀ Earlier"), late = html(bar, "button", "", "Later ▶");
    box.insertBefore(bar, body);
    let jump = 1;
    const here = () => { // the place of the step that the timeline shows, or of the newest
      const { steps, stepAt } = this.model, i = steps.indexOf(stepAt.get(this.chosen ? this.chosen.step : this.mark ? this.mark.from : undefined));
      return i < 0 ? steps.length - 1 : i;
    };
    const move = (by) => {
      const { steps } = this.model, to = here() + by;
      this.select(to >= steps.length - 1 ? null : { step: steps[Math.max(to, 0)].s, uid: this.chosen ? this.chosen.uid : undefined });
    };
    early.addEventListener("click", () => move(-jump));
    late.addEventListener("click", () => move(jump));
    early.type = late.type = "button";
    this.drawEarlier = (columns) => {
      jump = Math.max(1, Math.floor(columns / 2));
      early.disabled = here() <= 0;
      late.disabled = !this.chosen && !this.mark;
      bar.hidden = !this.model.steps.length;
    };
    bar.hidden = true;
  }
  drawRow(parent, step, row, x, y, cell, high) {
    const tall = high - 4, dim = this.chosen && this.chosen.uid !== undefined && this.chosen.uid !== row.uid ? " dim" : "";
    const words = `request ${row.uid}: ${row.kind === "prefill" ? `${plural(row.count, "prompt token")} from position ${row.start}` : "next token"}` +
      (row.cached && row.admitted ? `, ${row.cached} tokens from the cache` : "") + (row.accepted === null ? "" : `, ${row.accepted} of ${row.drafts} drafts accepted`) +
      (row.lost ? `; its token is discarded, because the request ${row.lost === "retracted" ? "was retracted" : "had ended"}` : "");
    const part = (cls, from, to) => {
      if (to <= from) return;
      const e = svg(parent, "rect", { class: cls + dim, x: x + 1.5, y: y + 2 + tall * from, width: cell - 3, height: tall * (to - from), rx: 2, "data-uid": row.uid, "data-kind": cls });
      svg(e, "title", {}, words);
    };
    if (row.kind === "prefill") {
      const share = row.admitted && row.cached ? row.cached / (row.cached + row.count) : 0;
      part(row.lost ? "lost" : "prefill", 0, 1 - share);
      part("cache", 1 - share, 1);
    } else if (row.kind === "verify" && row.accepted !== null && row.drafts) {
      const own = 1 / (row.drafts + 1), accepted = row.accepted * own;
      part("decode", 0, own);
      part("accepted", own, own + accepted);
      part("rejected", own + accepted, 1);
    } else part(row.lost ? "lost" : "decode", 0, 1);
  }

  // ---- the step in words ----

  drawStep() {
    const { body, head } = this.panels.step, step = this.shown();
    if (this.chosen && this.chosen.step !== undefined && !this.model.stepAt.has(this.chosen.step)) {
      head.textContent = `Step ${this.chosen.step}`;
      body.replaceChildren(html(null, "p", "soft", `This page no longer has step ${this.chosen.step}. It keeps the last ${KEPT_STEPS} steps since it was opened, or since it lost events.`));
      return;
    }
    if (!step) { head.textContent = "Step"; body.replaceChildren(); return; }
    const follows = step === this.model.steps.at(-1);
    const took = step.read === null || step.read === undefined ? "" : `, ${seconds(step.read - step.t)} from its launch to its result`;
    head.textContent = `Step ${step.s}` + (follows ? " (the newest)" : "") + took;
    const out = [html(null, "p", "explain", explain(this.model, step))];
    out[0].id = "explain";
    const uid = this.chosen ? this.chosen.uid : undefined, req = uid === undefined ? null : this.model.requests.get(uid);
    if (req) out.push(html(null, "p", "", this.describe(this.seen.requests.get(uid) || req, step)));
    else if (uid !== undefined) out.push(html(null, "p", "soft", `Request ${uid} ended long ago.`));
    body.replaceChildren(...out);
  }
  describe(req, step) {
    const row = step.rows.find((each) => each.uid === req.uid), parts = [`Request ${req.uid}: ${plural(req.prompt, "prompt token")}`];
    if (req.hit > 0) parts.push(`${req.hit} of them found in the cache`);
    parts.push(`${plural(req.output, "output token")} so far`);
    const before = this.model.steps.find((each) => each.s <= step.s && each.waiting.includes(req.uid)); // a step that it waited for
    if (req.tAdmit) parts.push(`waited ${seconds(Math.max(req.tAdmit - req.t, 0))} before its first step` + (before && !req.retractions ? `, ${why(this.model, { ...before, waiting: [req.uid] })}` : ""));
    else parts.push(`waits ${why(this.seen, { ...step, waiting: [req.uid] })}`);
    if (req.tFirst) parts.push(`first token after ${seconds(req.tFirst - req.t)}`);
    if (req.retractions) parts.push(`retracted ${req.retractions === 1 ? "once" : `${req.retractions} times`}`);
    if (req.reason) parts.push(`ended: ${req.reason}`);
    let text = parts.join("; ") + ".";
    if (row) {
      const others = step.rows.length - 1;
      text += ` In this step it was ${others ? `one of ${step.rows.length} rows` : "alone"}`;
      text += row.kind === "prefill" ? `, and computed positions ${row.start} to ${row.start + row.count - 1}.` : ", and computed one position for its next token.";
    }
    const pages = this.pagesOf(req), sharers = new Set();
    for (const uid of this.seen.running) if (uid !== req.uid) for (const page of this.seen.requests.get(uid).cachedPages) if (pages.includes(page)) sharers.add(uid);
    if (pages.length) text += ` It has ${plural(pages.length, "page")}: ${pages.slice(0, 8).join(", ")}${pages.length > 8 ? ", …" : ""}` + (sharers.size ? `, some of them shared with ${[...sharers].map((each) => `request ${each}`).join(", ")}.` : ".");
    return text;
  }
  pagesOf(req) {
    const pages = (req.table.length ? req.table : req.lastTable || []).filter((page) => page !== undefined);
    return pages;
  }

  // ---- queue ----

  drawQueue() {
    const { body, head } = this.panels.queue, waiting = this.seen.waiting(), running = [...this.seen.running];
    head.textContent = `Requests${this.when}: ${running.length} running, ${waiting.length} waiting`;
    const list = html(null, "ul", "queue");
    const add = (uid, cls) => {
      const req = this.seen.requests.get(uid), item = html(list, "li", cls), chip = html(item, "button", `chip ${hue(uid)}`, String(uid));
      chip.type = "button";
      chip.dataset.key = `queue ${uid}`;
      chip.setAttribute("aria-label", `Request ${uid}`);
      chip.addEventListener("click", () => this.select({ step: this.chosen ? this.chosen.step : undefined, uid }));
      const state = this.seen.stateOf(req);
      const percent = state === "prefill" ? ` ${Math.round(100 * req.computed / Math.max(req.prefill, 1))} %` : "";
      html(item, "span", "", state === "waiting" ? `waits since ${seconds(Math.max(this.seen.now - req.t, 0))}` : `${state}${percent}, ${req.output} of ${req.max} tokens`);
    };
    for (const uid of running.slice(0, 24)) add(uid, "running");
    for (const uid of waiting.slice(0, 24)) add(uid, "waiting");
    const more = Math.max(running.length - 24, 0) + Math.max(waiting.length - 24, 0);
    if (more) html(list, "li", "soft", `and ${more} more`);
    if (!running.length && !waiting.length) html(list, "li", "soft", "No request is open.");
    body.replaceChildren(list);
  }

  // ---- tree ----

  drawTree() {
    const { body, head } = this.panels.tree, nodes = this.seen.tree.nodes(), pages = nodes.reduce((sum, node) => sum + node.pages.length, 0);
    head.textContent = `Radix tree${this.when}: ${plural(nodes.length, "node")}, ${plural(pages, "page")}`;
    if (!nodes.length) { body.replaceChildren(html(null, "p", "soft", "The cache is empty. A prompt of at least one whole page fills it.")); return; }
    let list = nodes;
    if (nodes.length > MAX_NODES) { // those in use, and the ones that were used last, each with its parents
      const kept = new Set();
      for (const node of [...nodes].sort((a, b) => (b.users > 0) - (a.users > 0) || b.step - a.step)) {
        if (kept.size >= MAX_NODES) break;
        for (let each = node; each && each.parent; each = each.parent) kept.add(each);
      }
      list = nodes.filter((node) => kept.has(node));
    }
    const depth = new Map([[this.seen.tree.root, 0]]);
    let deepest = 1;
    for (const node of list) {
      depth.set(node, depth.get(node.parent) + node.parent.pages.length);
      deepest = Math.max(deepest, depth.get(node) + node.pages.length);
    }
    const wide = Math.max(body.clientWidth, 240), unit = Math.max(1.5, Math.min(24, Math.max(wide * 0.4, 80) / deepest)), high = 26, mine = this.chosenPages();
    const e = this.canvas(body, wide, list.length * high + 8, "Radix tree of cached prefixes"), place = new Map();
    const now = this.seen.lastLaunched;
    list.forEach((node, i) => {
      const x = 2 + depth.get(node) * unit, y = 4 + i * high, w = Math.max(node.pages.length * unit - 2, 3);
      place.set(node, y);
      if (place.has(node.parent)) svg(e, "path", { class: "edge", d: `M${x} ${place.get(node.parent) + 18}V${y + 9}` });
      const words = readable(node.pages.slice(0, 4).map((page) => this.wordsOf(page, this.seen)).join("")), age = Math.max(0, now - node.step);
      const g = svg(e, "g", { "data-pages": node.pages.join(" "), "data-users": node.users });
      svg(g, "rect", { class: (node.users ? "cache used" : "idle") + (node.pages.some((page) => mine.has(page)) ? " focus" : ""), x, y, width: w, height: 18, rx: 3 });
      if (unit >= 16) node.pages.forEach((page, k) => svg(g, "text", { class: (node.users ? "on" : "") + " mid small", x: x + (k + 0.5) * unit, y: y + 12.5 }, page));
      const about = `${node.users ? plural(node.users, "user") : age ? `${plural(age, "step")} ago` : "just used"}`;
      const room = Math.floor((wide - x - w - 8) / 6) - about.length - 3;
      const label = words.length > room ? `${words.slice(0, Math.max(room - 1, 0))}…` : words;
      svg(g, "text", { class: "soft small", x: x + w + 6, y: y + 12.5 }, about + (words && room > 3 ? ` · ${label}` : ""));
      svg(g, "title", {}, `${plural(node.pages.length, "page")}: ${node.pages.slice(0, 12).join(", ")}; ${plural(node.users, "user")}; last used in step ${node.step}` + (words ? `\n${words}` : ""));
      g.setAttribute("role", "img");
      g.setAttribute("aria-label", `${plural(node.pages.length, "page")}, ${about}${words ? `: ${words}` : ""}`);
    });
    if (list.length < nodes.length) head.textContent += `, of which ${list.length} are shown`;
    const nameless = list.filter((node) => !this.wordsOf(node.pages[0], this.seen)).length;
    if (nameless && !this.model.server.text) body.prepend(html(null, "p", "soft nameless", `${plural(nameless, "node")} without text: from other pages, or from before this page was opened. live.text=true shows all texts.`));
  }
  chosenPages() {
    const req = this.chosen && this.chosen.uid !== undefined ? this.seen.requests.get(this.chosen.uid) : null;
    return new Set(req ? [...this.pagesOf(req), ...req.cachedPages] : []);
  }

  // ---- page map ----

  drawPages() {
    const { body, head } = this.panels.pages, { owner, refs, spec } = this.seen, total = spec.num_pages, pool = this.seen.pool || this.seen.countPool();
    // Pages are allocated from the first one on: if few of a large pool were ever used, those are drawn one by one.
    const used = this.model.highest + 1, count = total > MAX_CELLS && used <= MAX_CELLS ? Math.min(total, Math.max(FEW_CELLS, Math.ceil(used / 64) * 64)) : total;
    head.textContent = `Page map${this.when}: ${pool.free.toLocaleString("en")} free, ${(total - pool.free - pool.cached - pool.retiring).toLocaleString("en")} of requests, ${pool.cached.toLocaleString("en")} cached`;
    const group = Math.max(1, Math.ceil(count / MAX_CELLS)), cells = Math.ceil(count / group), wide = Math.max(body.clientWidth, 200);
    const size = Math.max(8, Math.min(24, Math.sqrt(wide * 260 / Math.max(cells, 1)))), columns = Math.max(1, Math.floor(wide / size));
    const shape = `${wide} ${cells} ${size}`;
    if (shape !== this.shape || !body.firstChild) {
      this.shape = shape;
      const note = group > 1 ? `a square is ${group} pages, in the colour of most of them` : count < total ? `and ${(total - count).toLocaleString("en")} pages that were never used` : "";
      const e = this.canvas(body, wide, Math.ceil(cells / columns) * size + (note ? 18 : 2), "Page map of the KV pool");
      this.cells = [];
      for (let i = 0; i < cells; i++) {
        const rect = svg(e, "rect", { x: (i % columns) * size + 1, y: Math.floor(i / columns) * size + 1, width: size - 2, height: size - 2, rx: 2 });
        const title = svg(rect, "title");
        rect.addEventListener("click", () => { const uid = this.seen.owner[i * group]; if (uid >= 0) this.select({ step: this.chosen ? this.chosen.step : undefined, uid }); });
        this.cells.push({ rect, title, cls: "", words: "" });
      }
      if (note) svg(e, "text", { class: "soft small", x: 0, y: Math.ceil(cells / columns) * size + 13 }, note);
    }
    const mine = this.chosenPages();
    for (let i = 0; i < cells; i++) {
      let page = i * group, words;
      if (group > 1) {
        const votes = new Map();
        for (let p = page; p < Math.min(page + group, count); p++) { const key = owner[p] === CACHE ? (refs[p] ? -4 : CACHE) : owner[p]; votes.set(key, (votes.get(key) || 0) + 1); }
        const [most] = [...votes].sort((a, b) => b[1] - a[1])[0];
        const used = [...votes].filter(([key]) => key !== FREE).reduce((sum, each) => sum + each[1], 0);
        words = `pages ${page} to ${Math.min(page + group, count) - 1}: ${used} in use`;
        const cls = (most === FREE ? "free" : most === RETIRING ? "retire" : most === -4 ? "cache used" : most === CACHE ? "idle" : hue(most)) + (most === FREE && used ? " partly" : "");
        this.paint(this.cells[i], cls, words);
        continue;
      }
      const who = owner[page], users = refs[page];
      const cls = (who === FREE ? "free" : who === RETIRING ? "retire" : who === CACHE ? (users ? "cache used" : "idle") : hue(who)) + (mine.has(page) ? " focus" : "");
      words = `page ${page}: ` + (who === FREE ? "free" : who === RETIRING ? "becomes free after the steps in flight" : who === CACHE ? `cached, ${plural(users, "user")}` : `request ${who}`);
      const text = who === FREE ? "" : oneLine(this.wordsOf(page, this.seen));
      this.paint(this.cells[i], cls, text ? `${words}\n${text}` : words);
    }
  }
  paint(cell, cls, words) {
    if (cell.cls !== cls) { cell.rect.setAttribute("class", cls); cell.cls = cls; }
    if (cell.words !== words) { cell.title.textContent = words; cell.words = words; }
  }
}
