// Anthropic's client for Node.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import {
  CITIES, KEY, KEYED_URL, MODEL, STORY, TOOL_RESULT, URL_, WEATHER, WEATHER_SCHEMA, main, raises,
} from "./checks.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: "any", maxRetries: 0 });
const tool = { name: "weather", description: "Weather.", input_schema: WEATHER_SCHEMA };
const one = { type: "any", disable_parallel_tool_use: true };
const given = { model: MODEL, messages: [{ role: "user", content: STORY }], temperature: 0, max_tokens: 40 };
const ask = (options = {}) => client.messages.create({ ...given, ...options });

await main({
  async message() {
    const answer = await ask();
    assert.match(answer.content[0].text, /Pip/);
    assert.equal(answer.stop_reason, "max_tokens");
    assert.equal(answer.usage.output_tokens, 40);
  },

  async stream() {
    const stream = client.messages.stream(given);
    let text = "";
    stream.on("text", (piece) => (text += piece));
    const final = await stream.finalMessage();
    assert.equal(text, final.content[0].text);
    assert.equal(text, (await ask()).content[0].text);
    assert.equal(final.usage.output_tokens, 40);
  },

  async tools() {
    const messages = [{ role: "user", content: WEATHER }];
    const options = { messages, tools: [tool], tool_choice: one, max_tokens: 200 };
    const first = await ask(options);
    const call = first.content.find((block) => block.type === "tool_use");
    assert.equal(first.stop_reason, "tool_use");
    assert.ok(CITIES.includes(call.input.city));
    const streamed = await client.messages.stream({ ...given, ...options }).finalMessage();
    assert.deepEqual(streamed.content.find((block) => block.type === "tool_use").input, call.input);
    const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: TOOL_RESULT }] };
    const turns = [...messages, { role: "assistant", content: first.content }, result];
    assert.ok((await ask({ messages: turns, tools: [tool], tool_choice: { type: "none" } })).content[0].text);
  },

  async count_tokens() {
    const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages: given.messages });
    const { usage } = await ask();
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },

  async errors() {
    const bad = await raises(Anthropic.BadRequestError, ask({ temperature: 9 }), "temperature");
    assert.equal(bad.error.error.type, "invalid_request_error");
    const { response } = await ask({ nobody_knows: 1 }).withResponse();
    assert.equal(response.headers.get("x-kvant-ignored"), "nobody_knows");
    await raises(Anthropic.NotFoundError, ask({ model: "claude" }));
    const keyed = new Anthropic({ baseURL: KEYED_URL, apiKey: KEY, maxRetries: 0 });
    assert.equal((await keyed.messages.create({ ...given, max_tokens: 4 })).usage.output_tokens, 4);
    const wrong = new Anthropic({ baseURL: KEYED_URL, apiKey: "wrong", maxRetries: 0 });
    await raises(Anthropic.AuthenticationError, wrong.messages.create(given));
  },
});
