// The npm package `openai`.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { Add, KEY, MODEL, Person, QUESTION, URL, USER, run } from "./cases.mjs";

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
  async tools() {
    const function_ = { name: "add", description: "Add two numbers.", parameters: z.toJSONSchema(Add) };
    const forced = { tools: [{ type: "function", function: function_ }], tool_choice: "required" };
    const answer = await client.chat.completions.create({ ...given, ...forced, parallel_tool_calls: false });
    const [call] = answer.choices[0].message.tool_calls;
    return { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
  },
  async agent() {
    const calls = [];
    const add = ({ a, b }) => calls.push({ name: "add", arguments: { a, b } }) && String(a + b);
    const function_ = { function: add, parse: JSON.parse, description: "Add two numbers.", name: "add" };
    const tools = [{ type: "function", function: { ...function_, parameters: z.toJSONSchema(Add) } }];
    const choice = { tools, tool_choice: { type: "function", function: { name: "add" } } };
    const runner = client.chat.completions.runTools({ ...given, ...choice }, { maxChatCompletions: 1 });
    await runner.done();
    const messages = [...runner.messages];
    const answer = await client.chat.completions.create({ ...given, messages, tool_choice: "none" });
    return { call: calls[0], text: answer.choices[0].message.content };
  },
  async responses() {
    const response = await client.responses.create({ model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 100 });
    return response.output_text;
  },
});
