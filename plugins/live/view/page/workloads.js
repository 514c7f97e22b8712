// The workloads of the course, as requests of this page.

import { events } from "./stream.js";

const SENTENCES = {
  cooking: "Wash the vegetables before you cut them. Keep the knife sharp, because a dull knife slips. Salt the water before the pasta goes in. Taste the sauce before you serve it. ",
  sailing: "Check the wind before you leave the harbour. Keep the lines coiled, because a loose line trips. Reef the sail before the storm comes. Watch the tide before you anchor. ",
};
const QUESTIONS = ["What comes first?", "What is dangerous?", "Say it in five words.", "What do I need?", "Why?", "What did I forget?", "Is there a rule?", "What would a teacher say?"];
const handbook = (kind, times) => `You answer questions about this handbook. ${SENTENCES[kind].repeat(times)}`;
const chat = (system, question, more) => ({ messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: question }], ...more });

// Return [the requests, what to watch], or [null, why it can't run here].
export function workload(name, spec) {
  const room = spec.max_seq_len || 1024, times = Math.max(1, Math.min(8, Math.floor(room / 160)));
  if (name === "class")
    return [Array.from({ length: 16 }, (_, i) => [i * 60, chat(handbook(i % 2 ? "sailing" : "cooking", times), QUESTIONS[(i >> 1) % QUESTIONS.length], { max_tokens: 40, temperature: 0.8, seed: i })]),
      "Sixteen students ask about two handbooks. Watch the tree: each handbook is there once, and all its readers share its pages. Too fast? Choose a delay, and press it again."];
  if (name === "long")
    return [[...Array.from({ length: 6 }, (_, i) => [0, chat("", QUESTIONS[i], { max_tokens: 80, temperature: 0.8, seed: i })]),
      [700, chat(`${Date.now() % 9973} ${handbook("cooking", Math.max(2, Math.floor(room / 60)))}`.slice(0, room * 2), "What comes first?", { max_tokens: 20 })]],
      "Six short requests are answered when a long prompt comes. Watch the timeline: while the prompt is computed, do the others get their next token? What if the policy were mixed, with 64 prompt tokens a step?"];
  const tokens = spec.num_pages * spec.page_size, each = Math.max(16, Math.floor(room / 2));
  const count = Math.ceil(1.6 * tokens / each);
  if (count > 128) return [null, `The pool holds ${tokens.toLocaleString("en")} tokens, which is too much to fill from a page. Start the server with num_pages=64 and try again, or run A class of 16 and ask what if the pool had 40 pages.`];
  return [Array.from({ length: count }, (_, i) => [i * 30, { prompt: `${i} ${QUESTIONS[i % QUESTIONS.length]}`, max_tokens: Math.max(1, each - 32), ignore_eos: true, temperature: 0.8, seed: i }]),
    "More requests than the pool can hold. Watch the page map fill, and the queue: a request that gets no page is retracted, and waits again."];
}

export class Workload {
  constructor(server, chat) { Object.assign(this, { server, chat, control: null, open: 0, changed: () => {} }); }
  start(requests) {
    this.stop();
    const control = (this.control = new AbortController());
    let failed = "";
    this.open = requests.length;
    for (const [delay, body] of requests) {
      const run = async () => {
        await new Promise((done) => setTimeout(done, delay));
        if (control.signal.aborted) return;
        const id = this.chat.newId(), headers = { "X-Request-Id": id };
        if (body.messages) this.chat.follow(`chatcmpl-${id}`, body.messages);
        const response = await this.server.fetch(body.messages ? "v1/chat/completions" : "v1/completions", { ...body, stream: true }, { headers, signal: control.signal });
        for await (const _ of events(response)) { /* only its work is wanted */ }
      };
      run().catch((error) => { if (error.name !== "AbortError") failed = error.message; }).finally(() => {
        if (this.control !== control) return;
        this.open--;
        if (!this.open) this.control = null;
        this.changed(failed);
      });
    }
    this.changed("");
  }
  stop() {
    if (this.control) this.control.abort();
    this.control = null;
    this.open = 0;
    this.changed("");
  }
}
