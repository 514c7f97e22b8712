// The npm package `ai` with `@ai-sdk/openai-compatible`.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText } from "ai";
import { KEY, MODEL, Person, QUESTION, URL, run } from "./cases.mjs";

const provider = createOpenAICompatible({ name: "minisgl", baseURL: URL, apiKey: KEY, supportsStructuredOutputs: true });
const given = { model: provider(MODEL), prompt: QUESTION, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };

await run({
  async chat() {
    return (await generateText(given)).text;
  },
  async stream() {
    const pieces = [];
    for await (const piece of streamText(given).textStream) pieces.push(piece);
    return pieces;
  },
  async schema() {
    return (await generateText({ ...given, output: Output.object({ schema: Person }) })).output;
  },
});
