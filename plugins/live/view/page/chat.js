// The chat: it streams answers, and shows each token with its origin, its log-probability and its alternatives.

import { html } from "./draw.js";
import { events } from "./stream.js";
import { textsOf, whyCached, wordsOfPage } from "./words.js";

const ORIGINS = {
  cached: "a prompt token whose KV was in the cache", computed: "a prompt token that was computed",
  decoded: "computed one by one", accepted: "a draft token that the model accepted", unknown: "its step is not known yet, or this page did not see it",
};

export class Chat {
  // `select({step, uid})` lights a step up.
  constructor(server, model, viewer, select) {
    Object.assign(this, { server, model, viewer, select, turns: [], number: 0, sending: () => {}, shown: null, control: null, ids: new Map(), texts: new Map(), others: [] });
    this.log = document.getElementById("turns");
    this.about = document.getElementById("token");
    for (const id of ["ask", "prompt", "send", "stop", "new-chat", "system", "temperature", "seed", "max-tokens", "origins"]) this[id] = document.getElementById(id);
    this.ask.addEventListener("submit", (event) => { event.preventDefault(); this.send_(); });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send_(); }
    });
    this.stop.addEventListener("click", () => this.control && this.control.abort());
    this["new-chat"].addEventListener("click", () => { if (this.control) this.control.abort(); this.clear(); this.prompt.focus(); });
    const leave = (event) => { if (this.shown && !this.about.contains(event.target) && !(event.target.closest && event.target.closest(".tokens"))) this.hide(); };
    document.addEventListener("pointerdown", leave);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.hide(); });
    document.addEventListener("scroll", () => { const { shown } = this; if (shown && shown.kept) this.describe(shown.line, shown.index); else if (shown) this.hide(); }, { capture: true, passive: true });
    this.origins.addEventListener("change", () => this.log.querySelectorAll(".tokens").forEach((e) => e.classList.toggle("plain", !this.origins.checked)));
  }
  clear() {
    if (this.control) this.control.abort();
    this.turns = [];
    this.log.replaceChildren();
    this.hide();
  }
  // An id of a request: the server tells only this page which number the engine gives the request.
  newId() { return `live.${this.viewer}.${++this.number}`; }
  // Know the words of the prompts of a workload's request: texts of tokens, in the order of its choices.
  follow(id, prompts) {
    prompts.forEach((prompt, index) => this.others.push({ id, index, prompt, tokens: [] }));
    this.others.splice(0, this.others.length - 64);
  }
  own(event) { this.ids.set(event.id, event.uids); }

  async send_() {
    const words = this.prompt.value.trim();
    if (!words || this.control || this.send.disabled) return null;
    this.prompt.value = "";
    this.sending();
    const messages = [];
    if (this.system.value.trim()) messages.push({ role: "system", content: this.system.value });
    for (const turn of this.turns) messages.push({ role: "user", content: turn.user }, { role: "assistant", content: turn.answer });
    messages.push({ role: "user", content: words });
    const turn = { user: words, answer: "", id: "", prompt: null, tokens: [], failed: false };
    this.turns.push(turn);
    const user = html(this.log, "div", "turn user"), answer = html(this.log, "div", "turn assistant");
    html(user, "span", "who", "You");
    html(user, "span", "", words);
    turn.promptBox = html(user, "details", "prompt");
    html(turn.promptBox, "summary", "", "the prompt as the engine sees it");
    html(answer, "span", "who", "Answer");
    const line = this.tokenLine(answer, turn, "tokens", "Tokens of the answer");
    this.log.scrollTop = this.log.scrollHeight;
    this.control = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    this.tokenize(messages, turn);
    try {
      const body = { messages, stream: true, logprobs: true, top_logprobs: 4, temperature: +this.temperature.value || 0, stream_options: { include_usage: true } };
      if (this.seed.value !== "") body.seed = Math.trunc(+this.seed.value);
      if (+this["max-tokens"].value >= 1) body.max_tokens = Math.trunc(+this["max-tokens"].value);
      const headers = { "X-Request-Id": this.newId() };
      const response = await this.server.fetch("v1/chat/completions", body, { headers, signal: this.control.signal });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        turn.id = chunk.id || turn.id;
        for (const choice of chunk.choices || []) this.add(turn, choice, line);
        if (chunk.usage) turn.usage = chunk.usage;
      }
    } catch (error) {
      if (error.name !== "AbortError") { html(answer, "p", "bad", error.message); turn.failed = true; }
      else html(answer, "span", "who", "stopped");
    }
    this.control = null;
    this.send.disabled = false;
    this.stop.disabled = true;
    if (turn.failed && !turn.answer) this.turns.pop();
    return turn;
  }
  // Send these words. Return the turn when its answer has ended.
  say(words) {
    this.prompt.value = words;
    return this.send_();
  }
  add(turn, choice, line) {
    turn.answer += (choice.delta && choice.delta.content) || "";
    const down = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    for (const entry of (choice.logprobs && choice.logprobs.content) || []) {
      turn.tokens.push(entry);
      this.token(line, entry.token, turn.tokens.length - 1);
    }
    if (down) this.log.scrollTop = this.log.scrollHeight;
    this.mark(turn);
  }
  async tokenize(messages, turn) {
    try {
      const found = await this.server.json("tokenize", { messages, return_token_strs: true });
      turn.prompt = found.token_strs || [];
      turn.promptLine = this.tokenLine(turn.promptBox, turn, "prompt", "Tokens of the prompt");
      turn.prompt.forEach((text, i) => this.token(turn.promptLine, text, i));
      this.mark(turn);
    } catch { turn.promptBox.hidden = true; } // the server has no such route
  }

  // ---- tokens ----

  tokenLine(parent, turn, kind, label) {
    const line = html(parent, "div", "tokens" + (this.origins.checked ? "" : " plain"));
    line.tabIndex = 0;
    line.setAttribute("role", "group");
    line.setAttribute("aria-label", `${label}. Left and right choose a token, Enter shows its step.`);
    line.turn = turn;
    line.kind = kind;
    turn[kind + "Line"] = line;
    let at = -1;
    const go = (i) => {
      at = Math.max(0, Math.min(i, line.children.length - 1));
      this.describe(line, at);
    };
    const under = (event) => [...line.children].indexOf(event.target);
    // Only a pointer that moves opens the box: text that streams under it does not. A click keeps the box open.
    line.addEventListener("mousemove", (event) => { const i = under(event); if (i >= 0 && (event.movementX || event.movementY) && !(this.shown && this.shown.kept)) this.describe(line, i, false); });
    line.addEventListener("mouseleave", () => { if (this.shown && !this.shown.kept) this.hide(); });
    line.addEventListener("click", (event) => { const i = under(event); if (i >= 0) { go(i); this.choose(line, i); } });
    line.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: line.children.length - 1 }[event.key];
      if (to !== undefined) { event.preventDefault(); event.stopPropagation(); go(to); }
      if (event.key === "Enter" && at >= 0) { event.preventDefault(); this.choose(line, at); }
    });
    return line;
  }
  token(line, text, index) {
    const special = /^<\|.*\|>$/.test(text) || text === "";
    const e = html(line, "span", "tok" + (special ? " special" : ""), text === "" ? "∅" : text);
    e.dataset.index = index;
  }
  uidOf(turn) { return (this.ids.get(turn.id) || [])[turn.index || 0]; } // undefined until the server has told it
  // Where a token came from, and the step that made it.
  origin(turn, kind, index) {
    const req = this.model.requests.get(this.uidOf(turn));
    if (!req) return { origin: "unknown", step: undefined };
    if (kind === "tokens") {
      const step = req.made[index];
      return step === undefined || step < 0 ? { origin: "unknown", step: undefined } : { origin: req.how[index], step };
    }
    if (req.hit < 0) return { origin: "unknown", step: undefined };
    if (index < req.hit) return { origin: "cached", step: req.chunks.length ? req.chunks[0][2] : undefined };
    const chunk = req.chunks.find(([from, to]) => index >= from && index < to);
    return chunk ? { origin: "computed", step: chunk[2] } : { origin: "unknown", step: undefined };
  }
  // Colour the tokens whose origin has become known.
  mark(turn) {
    for (const kind of ["tokens", "prompt"]) {
      const line = turn[kind + "Line"];
      for (const e of line ? line.children : []) {
        if (e.dataset.origin) continue;
        const { origin } = this.origin(turn, kind, +e.dataset.index);
        if (origin !== "unknown") { e.dataset.origin = origin; e.classList.add(origin); }
      }
    }
    const req = this.model.requests.get(this.uidOf(turn));
    if (req && req.hit >= 0 && turn.promptBox) {
      const hit = Math.min(req.hit, req.prompt);
      turn.promptBox.firstChild.textContent = `the prompt as the engine sees it: ${req.prompt} tokens, ${hit} from the cache${hit ? `, so only ${req.prompt - hit} were computed` : ""}`;
      const why = whyCached(req.prompt, hit, this.model.spec.page_size);
      if (why) turn.promptBox.firstChild.textContent += ` (${why})`;
    }
    if (req && turn.prompt) this.texts.set(req.uid, turn);
  }
  markAll() {
    for (const turn of this.turns.slice(-3)) this.mark(turn);
    if (this.shown && this.shown.origin === "unknown") this.describe(this.shown.line, this.shown.index, this.shown.kept);
    for (const turn of this.others) if (this.model.requests.has(this.uidOf(turn))) this.texts.set(this.uidOf(turn), turn);
  }
  choose(line, index) {
    const { step } = this.origin(line.turn, line.kind, index);
    this.log.querySelectorAll(".tok.at").forEach((e) => e.classList.remove("at"));
    line.children[index].classList.add("at");
    this.select({ step, uid: this.uidOf(line.turn) });
  }
  hide() { this.shown = null; this.about.hidden = true; }
  describe(line, index, kept = true) {
    if (!line.isConnected || !line.children[index]) { this.hide(); return; }
    const { origin, step } = this.origin(line.turn, line.kind, index), entry = line.kind === "tokens" ? line.turn.tokens[index] : null;
    const text = entry ? entry.token : line.turn.prompt[index];
    this.shown = { line, index, kept, origin };
    this.about.hidden = false;
    this.about.replaceChildren();
    html(this.about, "strong", "", JSON.stringify(text));
    html(this.about, "span", "", ` ${line.kind === "tokens" ? "output" : "prompt"} token ${index}: ${ORIGINS[origin]}${step === undefined ? "" : `, in step ${step}`}`);
    const table = entry ? html(this.about, "table") : null, seen = new Set();
    for (const each of entry ? [entry, ...(entry.top_logprobs || [])] : []) {
      if (seen.has(each.token)) continue;
      seen.add(each.token);
      const row = html(table, "tr");
      html(row, "td", "", (each === entry ? "→ " : "") + JSON.stringify(each.token));
      html(row, "td", "", `${(100 * Math.exp(each.logprob)).toFixed(1)} %`);
      html(row, "td", "", `log ${each.logprob.toFixed(2)}`);
    }
    // Below the token, or above it, so that it covers no other column.
    const place = line.children[index].getBoundingClientRect(), box = this.about.getBoundingClientRect();
    const under = place.bottom + 6 + box.height <= innerHeight;
    this.about.style.top = `${Math.max(4, under ? place.bottom + 6 : place.top - box.height - 6)}px`;
    this.about.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.width - 8))}px`;
  }
  // The text of a page in a state of the model, if a chat of this page has it.
  wordsOf(page, model) { return wordsOfPage(model, page, [...this.texts].reverse().map(([uid, turn]) => [uid, () => textsOf(turn)])); }
  transcript() {
    return this.turns.map((turn) => ({ user: turn.user, answer: turn.answer, uid: this.uidOf(turn), prompt: turn.prompt, tokens: turn.tokens }));
  }
}
