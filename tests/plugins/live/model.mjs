// Feeds the page's model with lines of standard input, and answers each line "?name" with the summary of that model.
// A line "name {…}" is an event for that model. Arguments: the path of model.js.
import { createInterface } from "node:readline";
const { Model, explain } = await import(process.argv[2]);
const models = new Map();
for await (const line of createInterface({ input: process.stdin })) {
  const name = line.slice(0, line.indexOf(" ")), text = line.slice(line.indexOf(" ") + 1);
  if (!models.has(name)) models.set(name, new Model());
  const model = models.get(name);
  if (text === "?") console.log(JSON.stringify(model.summary()));
  else if (text === "steps") console.log(JSON.stringify(model.steps.map((step) => explain(model, step))));
  else model.apply(JSON.parse(text));
}
