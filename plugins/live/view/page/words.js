// What the page says about a step, in plain sentences, and the words that pages hold.

import { CACHE } from "./model.js";

export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const list = (words) => words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;

// One plain sentence on a step.
export function explain(model, step) {
  const decode = step.rows.filter((row) => row.kind === "decode"), verify = step.rows.filter((row) => row.kind === "verify");
  const prefill = step.rows.filter((row) => row.kind === "prefill"), parts = [];
  if (decode.length) parts.push(decode.length === 1 ? `request ${decode[0].uid} computed its next token` : `${decode.length} requests computed their next token together`);
  for (const row of verify.slice(0, 2)) parts.push(`request ${row.uid} checked ${plural(row.drafts, "draft token")}` + (row.accepted === null ? "" : ` and kept ${row.accepted}`));
  if (verify.length > 2) parts.push(`${verify.length - 2} more requests checked draft tokens`);
  for (const row of prefill.slice(0, 3)) {
    const cached = row.admitted && row.cached ? `, because ${row.cached} of its tokens were in the cache` : "";
    parts.push(`request ${row.uid} computed ${row.cached || row.start ? "only " : ""}${plural(row.count, "prompt token")}${row.start && !cached ? ` from position ${row.start} on` : ""}${cached}`);
  }
  if (prefill.length > 3) parts.push(`${plural(prefill.length - 3, "more prompt")} computed`);
  const lost = step.rows.filter((row) => row.lost).map((row) => row.uid);
  const retracted = step.events.filter((each) => each.event === "retract").map((each) => each.uid);
  const evicted = step.events.filter((each) => each.event === "evict").reduce((sum, each) => sum + each.pages.length, 0);
  let text = `In step ${step.s}, ${list(parts)}`;
  if (lost.length) {
    const ended = lost.every((uid) => (model.requests.get(uid) || {}).reason) ? "had ended" : "had ended or left the batch";
    text += lost.length === 1 ? `; the token of request ${lost[0]} is` : `; ${lost.length} tokens are`;
    text += ` discarded: this step was launched before the engine knew that the request${lost.length === 1 ? "" : "s"} ${ended}`;
  }
  if (retracted.length) text += `; ${retracted.length === 1 ? `request ${retracted[0]}` : `${retracted.length} requests`} had to give the pages back and wait again, because the pool was full`;
  if (evicted) text += `; the cache gave up ${plural(evicted, "old page")} to make room`;
  if (step.waiting.length) text += `; ${step.waiting.length === 1 ? `request ${step.waiting[0]} waits` : `${step.waiting.length} requests wait`} ${why(model, step)}`;
  return text + ".";
}

// What the waiting requests of a step wait for.
export function why(model, step) {
  const options = model.header ? model.header.options : {}, rows = model.spec.max_running_requests || Infinity;
  const admitted = step.rows.filter((row) => row.kind === "prefill").reduce((sum, row) => sum + row.count, 0);
  const running = new Set([...step.rows.map((row) => row.uid)]).size;
  if (running >= rows) return `for one of the ${rows} rows of the request pool`;
  if (options.max_prefill_tokens && admitted >= options.max_prefill_tokens) return "because the step has no room for more prompt tokens";
  const next = model.requests.get(step.waiting[0]), pool = step.pool;
  if (next && pool && Math.ceil(model.length(next) / model.spec.page_size) > pool.free + pool.evictable) return "for free pages";
  return "for the next step";
}

// The text of a page in a state of the model, or "". `texts` are [uid, a function that returns the texts of its
// tokens] of known requests, the newest first.
export function wordsOfPage(model, page, texts) {
  const size = model.spec.page_size;
  for (const [uid, tokens] of texts) {
    const req = model.requests.get(uid);
    if (!req) continue;
    const table = req.table.length ? req.table : req.reason && req.lastTable ? req.lastTable : [];
    const cached = req.cachedPages.indexOf(page), i = cached >= 0 ? cached : table.indexOf(page);
    if (i < 0) continue;
    // After its end a request owns nothing: its pages still hold its words only while the cache has them.
    if (req.reason && (model.owner[page] !== CACHE || req.lastSerials[i] !== model.serials[page])) continue;
    return tokens().slice(i * size, Math.min((i + 1) * size, model.length(req))).join("");
  }
  return "";
}
// The texts of all tokens of a turn.
export const textsOf = (turn) => [...(turn.prompt || []), ...turn.tokens.map((entry) => entry.token)];
