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
  const evicted = step.events.filter((each) => each.event === "evict").reduce((sum, each) => sum + each.pages.length, 0);
  let text = `In step ${step.s}, ${list(parts)}`;
  for (const [reason, because] of [["ended", "the step was launched before the engine had read the token that ended it"],
                                   ["retracted", `it was retracted in step ${step.s + 1}, before this result was read, and computes it again later`]]) {
    const lost = step.rows.filter((row) => row.lost === reason).map((row) => row.uid);
    if (lost.length === 1) text += `; the token of request ${lost[0]} is discarded: ${because}`;
    else if (lost.length) text += `; the tokens of ${list(lost.slice(0, 4).map((uid) => `request ${uid}`))}${lost.length > 4 ? " and others" : ""} are discarded: ${because.replace(" it was", " they were").replace("ended it", "ended them").replace("computes it", "compute them")}`;
  }
  const { retracted } = step;
  if (retracted.length) text += `; ${list(retracted.slice(0, 4).map((uid) => `request ${uid}`))} ${retracted.length === 1 ? "was" : "were"} retracted before it: the pool had no free page, so ${retracted.length === 1 ? "it gave its pages back and waits" : "they gave their pages back and wait"} again`;
  if (evicted) text += `; the cache gave up ${plural(evicted, "old page")} to make room`;
  if (step.waiting.length) text += `; ${step.waiting.length === 1 ? `request ${step.waiting[0]} waits` : `${step.waiting.length} requests wait`} ${why(model, step)}`;
  return text + ".";
}

// Why a prompt of this many tokens found this many in the cache, in a few words; "" if there is nothing to explain.
export function whyCached(prompt, hit, size) {
  if (hit) return hit < prompt ? `only whole pages of ${size} tokens are kept` : "";
  if (prompt <= size) return `only whole pages of ${size} tokens are kept, and before its last token, this prompt fills none`;
  return `no earlier text began with the same ${size} tokens, which are one page`;
}

// What became of the guide's requests, in words. `first` are requests of the model that read something for the first time.
export function guideFirst(req, size) {
  const [first, last] = [req.chunks.length ? req.chunks[0][2] : undefined, req.made.at(-1)];
  if (first === undefined) return "";
  const head = req.hit ? `${req.hit} of its ${req.prompt} tokens were still in the cache from an earlier chat (green), so step ${first} computed the other ${req.prompt - req.hit}.`
    : `Step ${first} computed all ${req.prompt} tokens of the prompt (orange).`;
  return `${head} Steps ${req.made[1] ?? last} to ${last} computed one token of the answer each (blue).` + (Math.floor((req.prompt + req.output - 1) / size) ? " The tree holds its whole pages." : "");
}
export function guideClass(first, cached, prompt) {
  const was = first.filter((req) => req.hit > 0).length, share = `${cached.toLocaleString("en")} of the ${prompt.toLocaleString("en")} prompt tokens came from the cache.`;
  if (!was) return `The first two readers computed their handbooks; ${share}`;
  return `Both handbooks were still in the cache from the last time, so their first readers computed only the questions (green): ${share}`.replace("Both handbooks were", was < 2 ? "One handbook was" : "Both handbooks were");
}

// What a simulation without a cache found: counts first, which are exact, then the estimated times.
export function guideWhatIf({ counts, rows }) {
  const number = (n) => n.toLocaleString("en"), time = rows.find(([name]) => name.startsWith("time to first token"));
  return `With the cache, ${number(counts.was.computed)} prompt tokens were computed, and ${number(counts.was.cached)} came from it. Without one, ${number(counts.would.computed)} would be computed. ` +
    `The estimated median time to the first token is about ${time[1]} ms with the cache, and about ${time[2]} ms without it.`;
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
