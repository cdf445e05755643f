// OpenAI's client for Node.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  CITIES, KEY, KEYED_URL, MODEL, STORY, TOOL_RESULT, URL_, WEATHER, WEATHER_SCHEMA, main, raises, running, until,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: "any", maxRetries: 0 });
const tool = { type: "function", function: { name: "weather", description: "Weather.", parameters: WEATHER_SCHEMA } };
const Animal = z.object({ name: z.enum(["Pip", "Max", "Luna"]), legs: z.number().int().min(2).max(4), happy: z.boolean() });

const ask = (options = {}) =>
  client.chat.completions.create({
    model: MODEL, messages: [{ role: "user", content: STORY }], temperature: 0, max_tokens: 40, ...options,
  });

await main({
  async chat() {
    const answer = await ask();
    assert.match(answer.choices[0].message.content, /Pip/);
    assert.equal(answer.choices[0].finish_reason, "length");
    assert.equal(answer.usage.completion_tokens, 40);
    assert.deepEqual((await client.models.list()).data.map((model) => model.id), [MODEL]);
  },

  async stream() {
    let text = "";
    let usage;
    let chunks = 0;
    for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
      chunks += 1;
    }
    assert.equal(text, (await ask()).choices[0].message.content);
    assert.equal(usage.completion_tokens, 40);
    assert.ok(chunks > 20);
  },

  async tools() {
    const messages = [{ role: "user", content: WEATHER }];
    const forced = { messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
    const { message, finish_reason } = (await ask(forced)).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.tool_calls[0].function.name, "weather");
    assert.ok(CITIES.includes(JSON.parse(message.tool_calls[0].function.arguments).city));
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: TOOL_RESULT };
    const second = await ask({ messages: [...messages, message, result], tools: [tool], tool_choice: "none" });
    assert.ok(second.choices[0].message.content);
  },

  async streamed_tools() {
    const stream = client.chat.completions.stream({
      model: MODEL, messages: [{ role: "user", content: WEATHER }], temperature: 0, tools: [tool],
      tool_choice: "required", parallel_tool_calls: false,
    });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    assert.ok(CITIES.includes(JSON.parse(message.tool_calls[0].function.arguments).city));
  },

  async structure() {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages: [{ role: "user", content: STORY }], temperature: 0,
      response_format: zodResponseFormat(Animal, "animal"),
    });
    Animal.parse(answer.choices[0].message.parsed);
  },

  async responses() {
    const given = { model: MODEL, input: STORY, temperature: 0, max_output_tokens: 40 };
    const answer = await client.responses.create(given);
    assert.match(answer.output_text, /Pip/);
    assert.equal(answer.status, "incomplete");
    let text = "";
    for await (const event of await client.responses.create({ ...given, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, answer.output_text);
    const parsed = await client.responses.parse({ model: MODEL, input: STORY, text: { format: zodTextFormat(Animal, "animal") } });
    Animal.parse(parsed.output_parsed);
  },

  async errors() {
    const bad = await raises(OpenAI.BadRequestError, ask({ temperature: 9 }), "temperature");
    assert.equal(bad.status, 400);
    const { response } = await ask({ nobody_knows: 1 }).withResponse();
    assert.equal(response.headers.get("x-kvant-ignored"), "nobody_knows");
    await raises(OpenAI.NotFoundError, ask({ model: "gpt-4" }));
    const keyed = new OpenAI({ baseURL: `${KEYED_URL}/v1`, apiKey: KEY, maxRetries: 0 });
    assert.equal((await keyed.models.list()).data[0].id, MODEL);
    await raises(OpenAI.AuthenticationError, keyed.withOptions({ apiKey: "wrong" }).models.list());
  },

  async a_stream_that_is_aborted() {
    const stream = await ask({ stream: true, max_tokens: 1500, ignore_eos: true });
    let chunks = 0;
    for await (const chunk of stream) {
      assert.equal(chunk.object, "chat.completion.chunk");
      if (++chunks === 3) {
        assert.equal(await running(), 1);
        stream.controller.abort();
      }
    }
    assert.ok(chunks >= 3 && chunks < 750, `${chunks} chunks`); // what was on its way still comes
    await until(async () => (await running()) === 0, 2000, "the aborted stream's request has ended");
  },
});
