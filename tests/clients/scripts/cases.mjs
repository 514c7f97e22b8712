// The part that the scripts of Node clients share, as cases.py is for Python clients.

import { writeFileSync } from "node:fs";
import { z } from "zod";

export const URL = process.env.MINISGL_URL + "/v1";
export const [MODEL, KEY] = ["tutor", "none"];
export const QUESTION = "What is a KV cache?";
export const USER = [{ role: "user", content: QUESTION }];
export const Person = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(9) });

export const Add = z.object({ a: z.literal([1, 2]), b: z.literal([3, 4]) });

/** Run all cases, or those that the command line names after the file, and write the results to the file. */
export async function run(cases) {
  const [file, ...names] = process.argv.slice(2);
  const results = {};
  for (const name of names.length ? names : Object.keys(cases)) {
    try {
      results[name] = { value: await cases[name]() };
    } catch (error) {
      results[name] = { error: String(error.stack ?? error) + "\n" + JSON.stringify(error.cause ?? error) };
    }
  }
  writeFileSync(file, JSON.stringify(results));
}
