// The scheduler's state, rebuilt from the events of a trace: requests, pages, page tables, steps in flight.
// It does what minisgl/trace/state.py does, and keeps the last steps for the timeline. It draws nothing.

import { Tree } from "./tree.js";

export const FREE = -1, RETIRING = -2, CACHE = -3;
export const KEPT_STEPS = 600;
const KEPT_REQUESTS = 400, RATE_SECONDS = 5;
const GRAMMAR_ERROR = "The grammar of the request";

// ---- the state ------------------------------------------------------------------------------------------------

export class Model {
  constructor() {
    this.header = null;
    this.lostFrames = 0;
    this.pace = { paused: false, delay: 0 };
    this.server = { model: "", control: false, text: false };
    this.pageTokens = new Map(); // with the text of all requests: cached page -> token ids
    this.clear();
  }
  clear() {
    const spec = this.header ? this.header.spec : { num_pages: 0, page_size: 16 };
    this.spec = spec;
    this.requests = new Map(); // uid -> request, ended ones too: the last KEPT_REQUESTS
    this.open = new Set(); // uids, by arrival
    this.running = new Set(); // uids, by admission
    this.owner = new Int32Array(spec.num_pages).fill(FREE);
    this.refs = new Int32Array(spec.num_pages);
    this.serials = new Float64Array(spec.num_pages); // page -> the number of its last allocation: tells whether it still holds the same tokens
    this.numAllocations = 0;
    this.highest = -1; // the last page that was ever used
    this.tree = new Tree();
    this.inFlight = [];
    this.retiring = [];
    this.unlocks = [];
    this.lastLaunched = this.lastRead = -1;
    this.failed = false;
    this.pool = null; // the last event `pool`
    this.steps = []; // the last steps, for the timeline
    this.stepAt = new Map();
    this.pending = []; // events since the last launch
    this.totals = { admitted: 0, cached: 0, prompt: 0, retractions: 0, evicted: 0, output: 0 };
    this.rate = []; // [time, tokens] of the last seconds
    this.ttfts = [];
    this.gaps = [];
    this.now = 0;
    this.numAdmissions = this.numAdded = 0;
  }

  // A model of the same state, which goes on by itself. It has no timeline, and does not know which step made a token.
  copy() {
    const to = new Model();
    Object.assign(to, this, {
      requests: new Map(), open: new Set(this.open), running: new Set(this.running), owner: this.owner.slice(), refs: this.refs.slice(),
      serials: this.serials.slice(), tree: this.tree.copy(), inFlight: [...this.inFlight], retiring: [...this.retiring],
      unlocks: [...this.unlocks], steps: [], stepAt: new Map(), pending: [...this.pending], totals: { ...this.totals }, rate: [], ttfts: [],
      gaps: [], pageTokens: new Map(this.pageTokens),
    });
    for (const [uid, req] of this.requests) // ended requests change no more
      to.requests.set(uid, req.reason ? req : { ...req, table: [...req.table], ids: req.ids && [...req.ids], made: [], how: [], chunks: [] });
    return to;
  }
  countPool() { return { free: this.count(FREE), cached: this.count(CACHE), evictable: this.evictable(), retiring: this.count(RETIRING) }; }

  // Apply an event. Unknown events are ignored.
  apply(event) {
    const apply = this["on_" + event.event];
    if (event.t !== undefined && event.t > this.now) this.now = event.t;
    if (apply) apply.call(this, event);
  }

  // ---- events that a trace does not have ----

  on_header(event) { this.header = event; this.clear(); }
  on_server(event) { this.server = event; }
  on_pace(event) { this.pace = { paused: event.paused, delay: event.delay }; }
  on_lost(event) { this.lostFrames += event.frames; }
  on_now(event) {
    const kept = { steps: this.steps, stepAt: this.stepAt };
    this.clear();
    if (kept.steps.length && kept.steps[kept.steps.length - 1].s < event.step) Object.assign(this, kept);
    this.lastLaunched = event.step - 1;
    this.lastRead = event.read;
    this.numAdded = event.added;
    this.numAdmissions = event.admitted;
    for (const each of event.requests) {
      const req = this.makeRequest(each.uid, each.arrival, each.t, each.prompt, each.max, each.added, each.priority);
      Object.assign(req, {
        output: each.output, queued: each.queued, row: each.row, order: each.order, prefill: each.prefill,
        computed: each.computed, cachedPages: each.cached, hit: each.hit, tAdmit: each.admitted, tFirst: each.first,
        retractions: each.retractions, table: each.pages, missed: each.output,
      });
      req.made = new Array(each.output).fill(-1);
      req.how = new Array(each.output).fill("");
      if (event.ids) req.ids = event.ids[each.uid] || null;
      if (each.row >= 0) this.running.add(each.uid);
    }
    this.running = new Set([...this.running].sort((a, b) => this.requests.get(a).order - this.requests.get(b).order));
    let at = 0;
    for (const [value, count] of event.owner) { this.owner.fill(value, at, at + count); at += count; }
    at = 0;
    for (const [value, count] of event.refs) { this.refs.fill(value, at, at + count); at += count; }
    this.tree = Tree.from(event.tree);
    this.inFlight = event.in_flight.map((batch) => this.record(batch));
    this.retiring = event.retiring;
    this.unlocks = event.unlocks;
    this.pageTokens = new Map(event.tokens || []);
    this.pool = this.countPool();
    this.highest = this.owner.findLastIndex((who) => who !== FREE);
  }

  // ---- requests ----

  makeRequest(uid, arrival, t, prompt, max, added, priority) {
    const req = {
      uid, arrival, t, prompt, max, added, priority, output: 0, queued: added, row: -1, order: -1, prefill: 0, computed: 0,
      cachedPages: [], hit: -1, table: [], reason: "", error: "", tAdmit: 0, tFirst: 0, tEnd: 0, tLast: 0, retractions: 0,
      made: [], how: [], chunks: [], missed: 0, ids: null,
    };
    this.requests.set(uid, req);
    this.open.add(uid);
    if (this.requests.size > KEPT_REQUESTS)
      for (const [old, each] of this.requests) if (each.reason) { this.requests.delete(old); break; }
    return req;
  }
  length(req) { return req.prompt + req.output; }
  stateOf(req) {
    if (req.reason) return req.reason;
    if (req.row < 0) return "waiting";
    return req.computed < req.prefill ? "prefill" : "decode";
  }
  waiting() { return [...this.open].filter((uid) => this.requests.get(uid).row < 0); }
  count(owner) { let n = 0; for (const each of this.owner) if (each === owner) n++; return n; }
  evictable() { let n = 0; for (let i = 0; i < this.owner.length; i++) if (this.owner[i] === CACHE && !this.refs[i]) n++; return n; }
  on_add(event) {
    const req = this.makeRequest(event.uid, this.numAdded++, event.t, event.prompt_ids.length, event.max_tokens, event.step, event.priority || 0);
    if (this.server.text) req.ids = [...event.prompt_ids];
    this.pending.push(event);
  }
  on_match(event) {
    const req = this.requests.get(event.uid);
    req.cachedPages = [...event.pages];
    req.prefill = event.num_tokens;
    req.priority = event.priority || 0;
    req.computed = event.pages.length * this.spec.page_size;
    if (req.hit < 0) {
      req.hit = req.computed;
      this.totals.admitted++;
      this.totals.cached += req.hit;
      this.totals.prompt += req.prompt;
    }
    for (const page of event.pages) this.refs[page]++;
    this.tree.lock(event.pages.at(-1), event.step);
    this.pending.push(event);
  }
  on_admit(event) {
    const req = this.requests.get(event.uid);
    req.row = event.req_pool_idx;
    req.order = this.numAdmissions++;
    req.table = [];
    this.running.add(req.uid);
    this.pending.push(event);
  }
  on_retract(event) {
    this.requests.get(event.uid).retractions++;
    this.requests.get(event.uid).queued = event.step;
    this.totals.retractions++;
    this.stop(event);
  }
  on_finish(event) {
    const req = this.requests.get(event.uid);
    req.reason = event.finish_reason;
    req.error = event.error || "";
    req.tEnd = event.t;
    req.lastTable = req.table;
    req.lastSerials = req.table.map((page) => this.serials[page]);
    this.open.delete(req.uid);
    this.failed = this.failed || (req.reason === "error" && !req.error.startsWith(GRAMMAR_ERROR));
    this.stop(event);
  }
  stop(event) {
    const req = this.requests.get(event.uid);
    if (req.row >= 0 && !this.failed) {
      this.unlocks.push([this.lastLaunched, req.cachedPages]);
      this.freeRetired();
    }
    this.running.delete(req.uid);
    req.row = req.order = -1;
    req.computed = req.reason ? req.computed : 0;
    req.cachedPages = [];
    req.table = [];
    this.pending.push(event);
  }

  // ---- pages ----

  on_allocate(event) {
    event.pages.forEach((page, i) => { this.owner[page] = event.owners[i]; this.serials[page] = ++this.numAllocations; this.pageTokens.delete(page); if (page > this.highest) this.highest = page; });
    this.pending.push(event);
  }
  on_evict(event) {
    for (const page of event.pages) { this.owner[page] = FREE; this.pageTokens.delete(page); }
    this.totals.evicted += event.pages.length;
    this.tree.evict(event.pages);
    this.pending.push(event);
  }
  on_free(event) {
    for (const page of event.pages) this.owner[page] = RETIRING;
    this.retiring.push([event.step, event.pages]);
    this.freeRetired();
    this.pending.push(event);
  }
  on_cache(event) {
    const req = this.requests.get(event.uid), fresh = new Set(event.pages), oldEnd = req.cachedPages.at(-1), size = this.spec.page_size;
    for (const page of event.pages) this.owner[page] = CACHE;
    if (req.ids) event.cached_pages.forEach((page, i) => {
      const at = (event.start + i) * size;
      if (fresh.has(page)) this.pageTokens.set(page, req.ids.slice(at, at + size));
    });
    let run = [], parent = oldEnd;
    for (const page of event.cached_pages) {
      if (fresh.has(page)) { run.push(page); continue; }
      if (run.length) this.tree.insert(parent, run, event.step);
      run = [];
      parent = page;
    }
    if (run.length) this.tree.insert(parent, run, event.step);
    for (const page of event.cached_pages) this.refs[page]++;
    req.cachedPages = [...req.cachedPages, ...event.cached_pages];
    this.tree.lock(req.cachedPages.at(-1), event.step);
    this.tree.lock(oldEnd, event.step, -1);
    this.pending.push(event);
  }
  on_pool(event) {
    this.pool = event;
    const last = this.steps.at(-1);
    if (last) last.pool = event;
  }
  freeRetired() {
    while (this.retiring.length && this.retiring[0][0] <= this.lastRead)
      for (const page of this.retiring.shift()[1]) this.owner[page] = FREE;
    while (this.unlocks.length && this.unlocks[0][0] <= this.lastRead) {
      const pages = this.unlocks.shift()[1];
      for (const page of pages) this.refs[page]--;
      this.tree.lock(pages.at(-1), this.lastRead, -1);
    }
  }

  // ---- steps ----

  on_batch(event) {
    const rowOf = new Map([...this.running].map((uid) => [this.requests.get(uid).row, this.requests.get(uid)]));
    const [rows, columns, pages] = event.page_table_updates;
    rows.forEach((row, i) => { const req = rowOf.get(row); if (req) req.table[columns[i]] = pages[i]; });
    this.lastLaunched = event.step;
    const step = this.record(event);
    this.inFlight.push(step);
    step.events = this.pending;
    this.pending = [];
    step.waiting = this.waiting();
    step.retracted = step.events.filter((each) => each.event === "retract").map((each) => each.uid);
    this.steps.push(step);
    this.stepAt.set(step.s, step);
    if (this.steps.length > KEPT_STEPS) this.stepAt.delete(this.steps.shift().s);
    for (const row of step.rows) {
      const req = this.requests.get(row.uid);
      req.computed = row.start + (row.kind === "verify" ? 1 : row.count);
      if (row.kind === "prefill") req.chunks.push([row.start, row.start + row.count, step.s]);
      if (!req.tAdmit) req.tAdmit = event.t;
    }
  }
  // One step: its rows, and what its result says later.
  record(event) {
    const end = event.num_decode + (event.drafts ? event.drafts.length : 0);
    const admitted = new Set(this.pending.filter((each) => each.event === "admit").map((each) => each.uid));
    const matched = new Map(this.pending.filter((each) => each.event === "match").map((each) => [each.uid, each.pages.length * this.spec.page_size]));
    const rows = event.uids.map((uid, i) => {
      const kind = i < event.num_decode ? "decode" : i < end ? "verify" : "prefill", rounds = event.rounds || 1;
      const drafts = kind === "verify" ? event.drafts[i - event.num_decode].length * rounds : 0;
      return {
        uid, kind, start: event.num_computed_tokens[i], count: event.num_scheduled_tokens[i] * rounds, drafts, rounds,
        samples: event.num_sampled_tokens[i], cached: matched.get(uid) || 0, admitted: admitted.has(uid),
        order: (this.requests.get(uid) || {}).order, tokens: 0, accepted: null, lost: "",
      };
    });
    return { s: event.step, t: event.t, read: null, rows, waiting: [], retracted: [], events: [], pool: this.pool };
  }
  on_step(event) { // the result of a step
    const step = this.inFlight.shift();
    if (!step) return;
    this.lastRead = event.step;
    this.freeRetired();
    step.read = event.t;
    let gained = 0;
    step.rows.forEach((row, i) => {
      const kept = event.kept ? event.kept[i] : 1;
      const req = this.requests.get(row.uid);
      if (!kept) { row.lost = row.samples > 0 ? (req && !req.reason ? "retracted" : "ended") : ""; return; }
      const run = event.runs ? event.runs[i] : [event.tokens[i]];
      if (!req) return;
      row.tokens = run.length;
      const ends = new Set(); // the places in `run` of tokens that the model sampled itself
      let at = 0;
      for (const n of event.rounds ? event.rounds[i] : [run.length]) { at += n; ends.add(at - 1); }
      row.accepted = row.kind === "verify" ? run.length - ends.size : null;
      run.forEach((_, k) => { req.made.push(step.s); req.how.push(ends.has(k) ? "decoded" : "accepted"); });
      if (req.ids) req.ids.push(...run);
      if (!req.tFirst) { req.tFirst = event.t; this.ttfts.push(event.t - req.t); } else if (req.tLast) this.gaps.push(event.t - req.tLast);
      req.tLast = event.t;
      req.output += run.length;
      gained += run.length;
      if (row.kind === "verify") req.computed = row.start + run.length;
    });
    this.totals.output += gained;
    this.rate.push([event.t, gained]);
    while (this.rate.length && this.rate[0][0] < event.t - RATE_SECONDS) this.rate.shift();
    if (this.ttfts.length > 50) this.ttfts.shift();
    if (this.gaps.length > 500) this.gaps.splice(0, this.gaps.length - 500);
  }

  // ---- numbers ----

  numbers() {
    const last = this.steps.at(-1), pool = this.pool || { free: 0, cached: 0, evictable: 0, retiring: 0 };
    const span = this.rate.length > 1 ? this.rate.at(-1)[0] - this.rate[0][0] : 0;
    const tokens = this.rate.slice(1).reduce((sum, each) => sum + each[1], 0);
    return {
      rate: this.open.size && span > 0 ? tokens / span : 0,
      ttft: median(this.ttfts), gap: median(this.gaps), pool,
      hit: this.totals.prompt ? this.totals.cached / this.totals.prompt : null,
      running: this.running.size, waiting: this.open.size - this.running.size,
      retractions: this.totals.retractions, evicted: this.totals.evicted, rows: last ? last.rows.length : 0,
    };
  }

  // What a test compares with minisgl.trace's state.
  summary() {
    const index = new Map(), nodes = this.tree.nodes();
    nodes.forEach((node, i) => index.set(node, i));
    return {
      requests: [...this.open].map((uid) => {
        const req = this.requests.get(uid);
        return [uid, this.length(req), req.row, req.row >= 0 ? req.order : -1, req.row >= 0 ? req.computed : 0, req.cachedPages, this.stateOf(req), req.queued];
      }),
      running: [...this.running],
      owner: [...this.owner],
      refs: [...this.refs],
      tables: [...this.running].map((uid) => [uid, [...this.requests.get(uid).table]]),
      tree: nodes.map((node) => [index.has(node.parent) ? index.get(node.parent) : -1, node.pages, node.users, node.step]),
      in_flight: this.inFlight.map((step) => step.s),
      retiring: this.retiring,
      launched: this.lastLaunched,
      read: this.lastRead,
    };
  }
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) / 2)];
}
