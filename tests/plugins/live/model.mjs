// Feeds the page's models with lines of standard input, "name {…}", and answers "name ?" with the summary of that model,
// "name lost" with its discarded rows and their reasons,
// and "name at N" with its summary as it was when step N was launched, or null. Arguments: the paths of model.js and history.js.
import { createInterface } from "node:readline";
const { Model } = await import(process.argv[2]), { History } = await import(process.argv[3]);
const models = new Map();
for await (const line of createInterface({ input: process.stdin })) {
  const name = line.slice(0, line.indexOf(" ")), text = line.slice(line.indexOf(" ") + 1);
  if (!models.has(name)) { const model = new Model(); models.set(name, [model, new History(model)]); }
  const [model, history] = models.get(name);
  if (text === "?") console.log(JSON.stringify(model.summary()));
  else if (text === "lost") console.log(JSON.stringify(model.steps.flatMap((step) => step.rows.filter((row) => row.lost).map((row) => [step.s, row.uid, row.lost]))));
  else if (text.startsWith("at ")) { const past = history.at(+text.slice(3)); console.log(JSON.stringify(past && past.summary())); }
  else { const event = JSON.parse(text); model.apply(event); history.add(event, text); }
}
