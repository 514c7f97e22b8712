// What if: asks the server for two futures of the recorded run, and shows them side by side.

import { Board, html } from "./draw.js";
import { plural } from "./words.js";

const CHOICES = [
  ["scheduler", "Policy", [["prefill_first", "new prompts before next tokens"], ["mixed", "both in each step"], ["decode_first", "next tokens before new prompts"], ["static", "a new batch only after all have ended"]]],
  ["cache", "Prefix cache", [["radix", "a tree of prefixes"], ["naive", "none"]]],
  ["overlap", "Overlap", [["true", "the host prepares the next step meanwhile"], ["false", "the device waits for the host"]]],
];
const NUMBERS = [["num_pages", "Pages in the pool", "all the memory for KV"], ["page_size", "Page size", "tokens a page holds; the cache keeps whole pages"],
                 ["max_prefill_tokens", "Prompt tokens a step", "longer prompts are computed in pieces"], ["max_running_requests", "Running requests", "the others wait"]];
const RETRACTED = "Retracted: a running request needs a page, and none is free. The youngest request gives its pages back and waits. When it is admitted again, it computes its tokens anew.";

export class WhatIf {
  constructor(root, server, model) {
    Object.assign(this, { root, server, model, fields: new Map(), at: undefined });
    html(root, "p", "soft", "The simulated engine repeats what this server has done since the page was opened, up to a step. Then it goes on with the options that you choose, and with the same tokens.");
    const form = (this.form = html(root, "form")), fields = html(form, "div", "fields");
    const field = (name, label, e, hint) => { const box = html(fields, "label", "", label + " "); box.append(e); e.name = name; this.fields.set(name, e); if (hint) html(box, "small", "hint", hint); };
    const number = () => { const e = document.createElement("input"); Object.assign(e, { type: "number", min: 1, step: 1 }); return e; };
    field("at", "From step", Object.assign(number(), { min: 0 }));
    for (const [name, label, values] of CHOICES) {
      const e = document.createElement("select");
      html(e, "option", "", "as it is").value = "";
      for (const [value, about] of values) html(e, "option", "", `${value}: ${about}`).value = value;
      field(name, label, e);
    }
    for (const [name, label, hint] of NUMBERS) field(name, label, number(), hint);
    this.go = html(form, "button", "", "Go on");
    this.words = html(root, "p");
    this.words.setAttribute("role", "status");
    this.out = html(root, "div", "futures");
    form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
  }
  // Show the present options in the empty fields, and the step that was chosen in the timeline.
  update(chosen) {
    const { spec, steps, header } = this.model, options = header ? header.options : {};
    const first = steps.length ? steps[0].s : 0, at = this.fields.get("at");
    if (chosen && chosen.step !== undefined && chosen.step !== this.at && document.activeElement !== at) at.value = this.at = chosen.step;
    at.placeholder = String(first);
    for (const [name] of NUMBERS) this.fields.get(name).placeholder = String(spec[name] ?? options[name] ?? "");
  }
  // Put these values into the fields.
  prepare(values) { for (const [name, e] of this.fields) e.value = values[name] ?? ""; }
  // Ask with these values in the fields. `found` is called with the answer.
  async askFor(values, found) {
    this.root.open = true;
    this.prepare(values);
    this.root.scrollIntoView({ block: "nearest" });
    await this.ask(found);
  }
  async ask(show = () => {}) {
    const body = { at: this.model.steps.length ? this.model.steps[0].s : 0 };
    for (const [name, e] of this.fields) if (e.value !== "") body[name] = e.type === "number" ? Math.trunc(+e.value) : e.value === "true" ? true : e.value === "false" ? false : e.value;
    this.go.disabled = true;
    this.say("The simulated engine repeats the run …");
    this.out.replaceChildren();
    try {
      const found = await this.server.json("live/what-if", body);
      if (found.error) this.say(found.error, true);
      else { this.show(found); show(found); }
      const { top, bottom } = this.words.getBoundingClientRect();
      if (!found.retraction && (bottom > innerHeight || top < 0)) this.words.scrollIntoView({ block: "start" });
    } catch (error) { this.say(error.message, true); }
    this.go.disabled = false;
  }
  say(words, isBad = false) {
    this.words.textContent = words;
    this.words.classList.toggle("bad", isBad);
  }
  show(found) {
    this.say(found.notes.join(" "), found.misses !== null);
    const other = found.overrides.join(" ") || "the same options", table = html(this.out, "table"), head = html(table, "tr");
    for (const words of [`From step ${found.at} on`, "As it was", other, "Measured"]) html(head, "th", "", words).scope = "col";
    for (const [name, was, would, measured] of found.rows) {
      const row = html(table, "tr", was === would ? "" : "differs");
      html(row, "th", "", name).scope = "row";
      html(row, "td", "", was);
      html(row, "td", "", would);
      html(row, "td", "soft", measured);
    }
    const [first, retraction] = [found.first ?? found.at, found.retraction], isRetraction = retraction && found.counts.was.retractions !== found.counts.would.retractions;
    const told = isRetraction && html(this.out, "p", "", `With ${other}, request ${retraction.uid} is the first to be retracted, before step ${retraction.s} (red cross). ${RETRACTED}`);
    const bar = html(this.out, "div", "group moves"), sides = html(this.out, "div", "sides"), boards = [], known = new Set([...found.was, ...found.would].map((step) => step.s));
    let now = first;
    const choose = (step) => { if (known.has(step)) { now = step; for (const board of boards) board.look(step); } };
    const to = (label, where) => { const e = html(bar, "button", "", label); e.type = "button"; e.addEventListener("click", () => choose(where())); };
    to("◀ Earlier", () => Math.max(now - 5, Math.min(...known)));
    to("Later ▶", () => Math.min(now + 5, Math.max(...known)));
    if (found.first !== null) to("First difference", () => first);
    if (retraction) to("First retraction", () => retraction.s);
    for (const [title, steps] of [["As it was", found.was], [other, found.would]]) boards.push(new Side(sides, title, steps, choose));
    choose(isRetraction ? retraction.s : first);
    if (told) told.scrollIntoView({ block: "start" });
    if (found.first !== null) html(this.out, "p", "soft", `Step ${first} is the first that differs. Click a column to look at the same step of both.`);
  }
}

// The timeline of one future.
class Side {
  constructor(parent, title, steps, choose) {
    const box = html(parent, "section", "panel timeline");
    this.board = Object.assign(Object.create(Board.prototype), {
      model: { steps, stepAt: new Map(steps.map((step) => [step.s, step])) }, chosen: null, mark: null, select: (what) => choose(what.step),
      panels: { timeline: { head: html(box, "h2", "", title), body: html(box, "div", "body") } },
    });
    this.title = title;
    this.words = html(box, "p", "soft");
  }
  look(number) {
    const { board } = this, step = board.model.stepAt.get(number);
    board.chosen = { step: number };
    board.drawTimeline();
    board.panels.timeline.head.textContent = this.title;
    if (!step) { this.words.textContent = `There is no step ${number}.`; return; }
    const prompts = step.rows.filter((row) => row.kind === "prefill"), tokens = prompts.reduce((sum, row) => sum + row.count, 0);
    const parts = [plural(step.rows.length, "row")];
    if (prompts.length) parts.push(`${plural(tokens, "prompt token")} of ${plural(prompts.length, "request")}`);
    const told = step.retracted || [];
    if (told.length) parts.push(`${told.map((uid) => `request ${uid}`).join(", ")} retracted before it, for lack of a free page`);
    if (step.waiting.length) parts.push(`${plural(step.waiting.length, "request")} waiting`);
    this.words.textContent = `Step ${number}: ${parts.join(", ")}.`;
  }
}
