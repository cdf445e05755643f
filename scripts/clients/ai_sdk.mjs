// The AI SDK with its three providers: chat completions, responses, and messages.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { CITIES, MODEL, STORY, TOOL_RESULT, URL_, WEATHER, main, raises } from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = `${URL_}/v1`;
const models = {
  compatible: createOpenAICompatible({
    name: "kvant", baseURL, apiKey: "any", supportsStructuredOutputs: true, includeUsage: true,
  })(MODEL),
  chat: createOpenAI({ baseURL, apiKey: "any" }).chat(MODEL),
  responses: createOpenAI({ baseURL, apiKey: "any" }).responses(MODEL),
  messages: createAnthropic({ baseURL, apiKey: "any" })(MODEL),
};
const Animal = z.object({ name: z.enum(["Pip", "Max", "Luna"]), legs: z.number().int(), happy: z.boolean() });
const asked = [];
const weather = tool({
  description: "Weather of a city.",
  inputSchema: z.object({ city: z.enum(CITIES) }),
  execute: async ({ city }) => (asked.push(city), TOOL_RESULT),
});
const given = { temperature: 0, maxRetries: 0, maxOutputTokens: 300 };

async function talk(model) {
  const answer = await generateText({ model, prompt: STORY, ...given });
  assert.match(answer.text, /Pip/);
  assert.equal(answer.finishReason, "stop");
  assert.ok(answer.usage.outputTokens > 10);
  const streamed = streamText({ model, prompt: STORY, ...given });
  let text = "";
  let pieces = 0;
  for await (const piece of streamed.textStream) [text, pieces] = [text + piece, pieces + 1];
  assert.equal(text, answer.text);
  assert.ok(pieces > 10);
  assert.equal((await streamed.usage).outputTokens, answer.usage.outputTokens);
}

// The call is forced in the first step; the SDK answers it, and the last step is free.
async function useTools(model) {
  asked.length = 0;
  const { steps } = await generateText({
    model, prompt: WEATHER, tools: { weather }, stopWhen: stepCountIs(2), ...given,
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.ok(asked.length >= 1);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.equal(steps.length, 2);
  assert.ok(steps[1].text);
}

async function structure(model) {
  const { output } = await generateText({ model, prompt: STORY, output: Output.object({ schema: Animal }), ...given });
  Animal.parse(output);
}

async function errors(model) {
  const wrong = generateText({ model, prompt: STORY, ...given, topP: 7 });
  const error = await raises(APICallError, wrong, "top_p");
  assert.equal(error.statusCode, 400);
}

const checks = {};
for (const [name, model] of Object.entries(models)) {
  checks[name] = () => talk(model);
  checks[`${name}_tools`] = () => useTools(model);
  checks[`${name}_structure`] = () => structure(model);
  checks[`${name}_errors`] = () => errors(model);
}
await main(checks);
