// The npm package `openai`.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { KEY, MODEL, Person, URL, USER, run } from "./cases.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const given = { model: MODEL, messages: USER, temperature: 0, max_tokens: 100 };

await run({
  async chat() {
    return (await client.chat.completions.create(given)).choices[0].message.content;
  },
  async stream() {
    const pieces = [];
    for await (const chunk of await client.chat.completions.create({ ...given, stream: true })) {
      pieces.push(chunk.choices[0].delta.content ?? "");
    }
    return pieces;
  },
  async schema() {
    const response_format = zodResponseFormat(Person, "person");
    return (await client.chat.completions.parse({ ...given, response_format })).choices[0].message.parsed;
  },
});
