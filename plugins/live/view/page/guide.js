// The box "What is a prefix cache?": it runs its four steps, says what happened in each, and marks it in the timeline.

import { guideClass, guideFirst, guideWhatIf, whyCached } from "./words.js";

const $ = (id) => document.getElementById(id);
const FIRST = "What is a prefix cache?", SECOND = "What is a radix cache?";
const anyNumber = () => 1000 + Math.floor(9000 * Math.random());

export class Guide {
  // `run(name, edition)` runs a workload, and returns {at, requests, cached, prompt}, or null if it was stopped.
  constructor({ model, chat, board, whatIf, run, settled, changed }) {
    Object.assign(this, { model, chat, board, whatIf, run, settled, changed, turn: null, at: null });
    $("guide-first").addEventListener("click", () => this.first(FIRST));
    $("guide-anew").addEventListener("click", () => this.first(`${FIRST} (${anyNumber()})`));
    $("guide-second").addEventListener("click", () => this.second());
    $("guide-class").addEventListener("click", () => this.class_(""));
    $("guide-class-anew").addEventListener("click", () => this.class_(`, edition ${anyNumber()}`));
    $("what-if-naive").addEventListener("click", () => this.withoutCache());
    chat.sending = () => this.point(null);
  }
  // Keep these steps in the timeline, with a mark.
  point(from, to = from) {
    this.board.mark = from === null || from === undefined ? null : { from, to };
    this.changed();
  }
  note(words) { $("guide-note").textContent = words; }
  // Return whether a step of the guide can begin; otherwise, say why not.
  isFree() {
    const isBusy = Boolean(this.chat.control), { paused } = this.model.pace;
    this.note(!isBusy ? "" : paused ? "An answer waits, because the server is paused: press Resume, or Stop." : "An answer is still being written: wait for its end, or press Stop.");
    return !isBusy;
  }
  async ask(words) {
    const turn = await this.chat.say(words), request = () => turn && this.model.requests.get(this.chat.uidOf(turn));
    await this.settled(() => turn && (turn.failed || (request() || {}).reason)); // its events may come after its text
    return [turn, request()];
  }
  async first(words) {
    if (!this.isFree()) return;
    this.chat.clear();
    for (const id of ["found-first", "found-turn"]) $(id).textContent = "";
    this.turn = null;
    const [turn, req] = await this.ask(words);
    if (!req || turn.failed) return;
    this.turn = turn;
    $("found-first").textContent = guideFirst(req, this.model.spec.page_size);
    $("guide-anew").hidden = !req.hit;
    if (req.chunks.length) this.point(req.chunks[0][2]);
  }
  async second() {
    if (!this.isFree()) return;
    if (!this.turn || !this.chat.turns.includes(this.turn)) { this.note("Press the first button before: this question goes on with its chat."); return; }
    const [turn, req] = await this.ask(SECOND);
    if (!req || turn.failed) return;
    const why = whyCached(req.prompt, req.hit, this.model.spec.page_size);
    $("found-turn").textContent = `${req.hit} of its ${req.prompt} tokens came from the cache${why ? ` (${why})` : ""}.`;
    if (req.chunks.length) this.point(req.chunks[0][2]);
  }
  async class_(edition) {
    if (!this.isFree()) return;
    for (const id of ["found-class", "found-what-if"]) $(id).textContent = "";
    const done = await this.run("class", edition, 0.1);
    if (!done) return;
    this.at = done.at;
    $("found-class").textContent = guideClass(done.first, done.cached, done.prompt);
    $("guide-class-anew").hidden = !done.first.some((req) => req.hit);
    const steps = done.first.flatMap((req) => req.chunks.slice(0, 1).map((chunk) => chunk[2]));
    if (steps.length) this.point(Math.min(...steps), Math.max(...steps));
  }
  withoutCache() {
    if (!this.isFree()) return;
    if (!this.model.steps.length) { this.note("Nothing has happened yet: press A class of 16 first."); return; }
    this.note("");
    this.whatIf.askFor({ at: this.at ?? this.model.steps[0].s, cache: "naive" }, (found) => { $("found-what-if").textContent = guideWhatIf(found); });
  }
}
