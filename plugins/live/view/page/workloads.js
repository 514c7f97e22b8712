// The workloads of the course. The prompts of one burst are one HTTP request: a browser opens only six connections.

import { events } from "./stream.js";

const SENTENCES = {
  cooking: "Wash the vegetables before you cut them. Keep the knife sharp, because a dull knife slips. Salt the water before the pasta goes in. Taste the sauce before you serve it. ",
  sailing: "Check the wind before you leave the harbour. Keep the lines coiled, because a loose line trips. Reef the sail before the storm comes. Watch the tide before you anchor. ",
};
const QUESTIONS = ["What comes first?", "What is dangerous?", "Say it in five words.", "What do I need?", "Why?", "What did I forget?", "Is there a rule?", "What would a teacher say?"];
const MAX_REQUESTS = 128, SMALL_POOL_REQUESTS = 12;
const handbook = (kind, times, edition = "") => `The ${kind} handbook${edition}. ${SENTENCES[kind].repeat(times)}`;
const chat = (system, question) => [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: question }];
const student = (i, times, edition) => chat(handbook(i % 2 ? "sailing" : "cooking", times, edition), QUESTIONS[(i >> 1) % QUESTIONS.length]);
const range = (from, to, make) => Array.from({ length: to - from }, (_, i) => make(from + i));

// Return {bursts: [{after, chats or prompts, …}], words, smallPool}. A burst waits for `after` tokens of the first one. With `smallPool`, the pool of this server is too large
// to be filled from a page: the bursts run, and then the simulated engine repeats them with a pool of that many pages.
// `edition` makes the handbooks new ones.
export function workload(name, spec, edition = "") {
  const size = spec.page_size, room = Math.min(spec.max_seq_len || 1024, spec.num_pages * size), times = Math.max(1, Math.min(8, Math.floor(room / 160)));
  const more = { temperature: 0.8, seed: 1 };
  if (name === "class")
    return { bursts: [{ chats: range(0, 2, (i) => student(i, times, edition)), max_tokens: 40, ...more }, { after: 2, chats: range(2, 16, (i) => student(i, times, edition)), max_tokens: 40, ...more }],
      words: "Sixteen students ask about two handbooks. The first reader of a handbook computes it (orange), unless the cache still has it. The others begin with the same handbook, so they find it in the cache (green), and all use the same pages: the tree has each handbook once, with its users." };
  if (name === "long")
    return { bursts: [{ chats: range(0, 6, (i) => chat("", QUESTIONS[i])), max_tokens: 80, ignore_eos: true, ...more },
                      { after: 60, chats: [chat(`${Date.now() % 9973} ${handbook("cooking", Math.max(2, Math.floor(room / 60)))}`.slice(0, 1.2 * Math.min(room, 8192)), "What comes first?")], max_tokens: 20 }],
      words: "Six short requests are answered when a long prompt comes. Watch the timeline: while the prompt is computed, do the others get their next token? Then open What if, and press Go on: policy mixed, 64 prompt tokens a step." };
  const each = Math.max(16, Math.min(256, Math.floor(room / 2))), needed = Math.ceil((1.6 * spec.num_pages * size) / each);
  const long = (count, tokens) => ({ prompts: range(0, count, (i) => `${i} ${QUESTIONS[i % QUESTIONS.length]}`), max_tokens: tokens, ignore_eos: true, ...more });
  if (needed <= Math.min(MAX_REQUESTS, spec.max_queued || MAX_REQUESTS))
    return { bursts: [long(needed, Math.max(1, each - 32))],
      words: "More requests than the pool can hold. Watch the page map fill, and the queue. If a running request needs a page and none is free, the youngest request is retracted: it gives its pages back, waits again, and later computes its tokens anew. A red cross in the timeline marks that." };
  const tokens = Math.max(8, Math.min(200, each - 32)), smallPool = Math.ceil((0.4 * SMALL_POOL_REQUESTS * (tokens + 16)) / size);
  return { bursts: [long(SMALL_POOL_REQUESTS, tokens)], smallPool,
    words: `The pool of this server holds ${(spec.num_pages * size).toLocaleString("en")} tokens, more than a page can fill. ` };
}

// Counts events, and lets others wait for a number of them.
class Counter {
  constructor() { this.count = 0; this.waiting = []; }
  add(n = 1) {
    this.count += n;
    this.waiting = this.waiting.filter(([number, done]) => { if (this.count >= number) done(); return this.count < number; });
  }
  reaches(number) { return new Promise((done) => { this.waiting.push([number, done]); this.add(0); }); }
}

export class Workload {
  constructor(server, chat) { Object.assign(this, { server, chat, control: null, open: 0, changed: () => {} }); }
  // Send the bursts. Return whether all of them were answered.
  async start(bursts) {
    this.stop();
    const control = (this.control = new AbortController());
    this.open = bursts.length;
    this.changed("");
    let failed = "", ended = true;
    try {
      const ready = [], first = new Counter();
      for (const burst of bursts) ready.push(await this.prepare(burst, control.signal));
      await Promise.all(ready.map(async ({ after, ...each }, i) => {
        await first.reaches(after || 0);
        await this.send(each, control.signal, i ? null : first);
        if (this.control === control) { this.open--; this.changed(""); }
      }));
    } catch (error) {
      ended = false;
      control.abort();
      if (error.name !== "AbortError") failed = error.message;
    }
    if (this.control === control) { this.control = null; this.open = 0; this.changed(failed); }
    return ended;
  }
  // Apply the chat template, whose tokens also tell which words a page holds.
  async prepare({ after, chats, prompts, ...body }, signal) {
    if (!chats) return { after, texts: null, body: { ...body, prompt: prompts } };
    const found = await Promise.all(chats.map((messages) => this.server.json("tokenize", { messages, return_token_strs: true }, { signal })));
    return { after, texts: found.map((each) => each.token_strs || []), body: { ...body, prompt: found.map((each) => each.tokens) } };
  }
  async send({ texts, body }, signal, counter) {
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    const id = this.chat.newId();
    if (texts) this.chat.follow(`cmpl-${id}`, texts);
    const response = await this.server.fetch("v1/completions", { ...body, stream: true }, { headers: { "X-Request-Id": id }, signal });
    try {
      for await (const data of events(response)) { // only its work is wanted
        const error = data !== "[DONE]" && JSON.parse(data).error;
        if (error) throw new Error(error.message);
        if (counter) counter.add();
      }
    } finally { if (counter) counter.add(Infinity); }
  }
  stop() {
    if (this.control) this.control.abort();
    this.control = null;
    this.open = 0;
    this.changed("");
  }
}
