// The server's side of the page: its interface, by addresses relative to the page.

const KEY = "kvant.key"; // for this tab, until it is closed

export class ServerError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status; // 0: there was no answer
    this.retryAfter = retryAfter; // seconds
  }
}

let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // The browser stores nothing; the key is known until the page is left.
}

export const hasKey = () => key !== null;

// Returns whether it can be one: printable ASCII, as a header needs it.
export function setKey(text) {
  if (/[^\x21-\x7e]/.test(text)) return false;
  key = text || null;
  try {
    if (key === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, key);
  } catch {
    // As above.
  }
  return true;
}

async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  let response;
  try {
    const options = { method, headers, signal, cache: "no-store", credentials: "same-origin", redirect: "error" };
    response = await fetch(path, { ...options, body: body && JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError("the server does not answer");
  }
  if (!response.ok) {
    const text = await response.text().catch(() => "");
    const message = messageOf(text) || `the server answered ${response.status}`;
    throw new ServerError(message, response.status, Number(response.headers.get("Retry-After")) || null);
  }
  return response;
}

function messageOf(text) {
  try {
    const { error } = JSON.parse(text);
    return String(error.message ?? error);
  } catch {
    return "";
  }
}

// The names of the models that are served.
export async function models(signal) {
  const response = await request("v1/models", { signal });
  const { data } = await response.json();
  return [...new Set(data.map(({ root }) => String(root)))];
}

// The pieces of an answer, as they come: {text}, {thinking}, {reason} and {usage}.
export async function* answer(body, signal) {
  const response = await request("v1/chat/completions", { body, signal });
  let ended = false;
  for await (const { data } of events(response, signal)) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new ServerError(String(piece.error.message ?? piece.error), 500);
    const choice = piece.choices?.[0];
    if (choice?.delta?.reasoning_content) yield { thinking: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) {
      ended = true;
      yield { reason: choice.finish_reason };
    }
    if (piece.usage) yield { usage: piece.usage };
  }
  if (!ended) throw new ServerError("the connection ended before the answer did");
}

// What a model's pool and engine are doing, a few times a second; {loaded: false} while it is not loaded.
export async function* live(model, signal) {
  for (let known = ""; ; await new Promise((done) => setTimeout(done, 200))) {
    const response = await request(`live?model=${encodeURIComponent(model)}&known=${known}`, { signal });
    const state = await response.json().catch(() => {
      throw new ServerError("the connection was lost");
    });
    known = state.generated ?? "";
    yield state;
  }
}

// Server-sent events. EventSource would do it, but sends no key and no body.
async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new ServerError("the connection was lost");
      }
      if (part.done) return;
      rest += part.value;
      const found = rest.split(/\r?\n\r?\n/);
      rest = found.pop();
      for (const event of found) {
        const data = fields(event, "data");
        if (data.length) yield { name: fields(event, "event")[0] ?? "message", data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function fields(event, name) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith(`${name}:`));
  return lines.map((line) => line.slice(name.length + 1).replace(/^ /, ""));
}
