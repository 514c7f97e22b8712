// A saved page: it replays the events that it contains, step by step. It is put behind the modules that it imports.

import { Model } from "./model.js";
import { History } from "./history.js";
import { textsOf, wordsOfPage } from "./words.js";
import { Board, html } from "./draw.js";

const { lines, transcript } = JSON.parse(document.getElementById("data").textContent);
const recorded = lines.map((line) => JSON.parse(line)), ends = [0]; // ends[i]: the number of events up to step i
recorded.forEach((event, i) => { if (event.event === "batch") ends.push(i); });
ends.push(recorded.length);
ends.shift();

const header = html(document.body, "header"), main = html(document.body, "main");
html(header, "h1", "", "minisgl, a recorded run");
const back = html(header, "button", "", "◀"), next = html(header, "button", "", "▶"), slider = html(header, "input"), where = html(header, "output");
back.setAttribute("aria-label", "Previous step");
next.setAttribute("aria-label", "Next step");
slider.type = "range";
slider.min = 1;
slider.max = ends.length - 1;
slider.setAttribute("aria-label", "Step of the run");
const log = html(main, "section", "");
log.id = "replayed-chat";
for (const turn of transcript) {
  for (const [cls, who, words] of [["user", "You", turn.user], ["assistant", "Answer", turn.answer]]) {
    const box = html(log, "div", `turn ${cls}`);
    html(box, "span", "who", who);
    html(box, "span", "", words);
  }
}
if (!transcript.length) html(log, "p", "soft", "This recording has no chat.");
const place = html(main, "section", "");
place.id = "board";
const model = new Model(), history = new History(model);
let chosen = null, at = 0, done = 0;
const texts = transcript.map((turn) => [turn.uid, () => textsOf(turn)]).reverse();
const board = new Board(place, model, history, (what) => { chosen = what; board.draw(chosen); }, (page, state) => wordsOfPage(state, page, texts));

function show(step) {
  at = Math.max(1, Math.min(step, ends.length - 1));
  if (ends[at] < done) done = 0; // the header begins anew
  for (; done < ends[at]; done++) { model.apply(recorded[done]); history.add(recorded[done], lines[done]); }
  slider.value = at;
  where.textContent = model.steps.length ? `step ${model.steps.at(-1).s}` : "before the first step";
  board.draw(chosen);
}
const move = (step) => { chosen = chosen && chosen.uid !== undefined ? { uid: chosen.uid } : null; show(step); };
slider.addEventListener("input", () => move(+slider.value));
back.addEventListener("click", () => move(at - 1));
next.addEventListener("click", () => move(at + 1));
document.addEventListener("keydown", (event) => {
  if (event.target === slider) return;
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 1, End: ends.length - 1 }[event.key];
  if (to !== undefined) { event.preventDefault(); move(to); }
  if (event.key === "Escape") { chosen = null; board.draw(chosen); }
});
addEventListener("resize", () => board.draw(chosen));
show(ends.length - 1);
