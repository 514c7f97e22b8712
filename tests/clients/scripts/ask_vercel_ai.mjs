// The npm package `ai` with `@ai-sdk/openai-compatible`.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { Add, KEY, MODEL, Person, QUESTION, URL, run } from "./cases.mjs";

const provider = createOpenAICompatible({ name: "minisgl", baseURL: URL, apiKey: KEY, supportsStructuredOutputs: true });
const given = { model: provider(MODEL), prompt: QUESTION, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const providerOptions = { minisgl: { parallel_tool_calls: false } };

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
  async tools() {
    const tools = { add: tool({ description: "Add two numbers.", inputSchema: Add }) };
    const [call] = (await generateText({ ...given, providerOptions, tools, toolChoice: "required" })).toolCalls;
    return { name: call.toolName, arguments: call.input };
  },
  async streamed_tools() {
    const tools = { add: tool({ description: "Add two numbers.", inputSchema: Add }) };
    const [call] = await streamText({ ...given, providerOptions, tools, toolChoice: "required" }).toolCalls;
    return { name: call.toolName, arguments: call.input };
  },
  async agent() {
    const execute = async ({ a, b }) => a + b;
    const tools = { add: tool({ description: "Add two numbers.", inputSchema: Add, execute }) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const result = await generateText({ ...given, providerOptions, tools, stopWhen: stepCountIs(2), prepareStep });
    const [call] = result.steps[0].toolCalls;
    return { call: { name: call.toolName, arguments: call.input }, text: result.text };
  },
  async responses() {
    const model = createOpenAI({ baseURL: URL, apiKey: KEY })(MODEL);
    return (await generateText({ ...given, model })).text;
  },
});
