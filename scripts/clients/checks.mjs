// What the Node programs share: where the server is, what they ask, and a line for each check. See checks.py.

export const { KVANT_URL: URL_, KVANT_KEYED_URL: KEYED_URL, KVANT_KEY: KEY } = process.env;
export const MODEL = "pocket";
export const STORY = "Tell me a story about a fox named Pip.";
export const WEATHER = "What is the weather in Rome?";
export const TOOL_RESULT = "It is sunny.";
export const CITIES = ["Rome", "Oslo"];
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};

// The error of this class that a promise ends with; its text has all the words.
export async function raises(kind, promise, ...words) {
  let error;
  try {
    await promise;
  } catch (raised) {
    error = raised;
  }
  if (!(error instanceof kind)) throw new Error(`no ${kind.name}, but ${error}`);
  for (const word of words) {
    if (!String(error.message).includes(word)) throw new Error(`the error lacks ${word}: ${error.message}`);
  }
  return error;
}

// Wait for something; an error if it does not come.
export async function until(holds, milliseconds, wanted) {
  const deadline = Date.now() + milliseconds;
  while (!(await holds())) {
    if (Date.now() > deadline) throw new Error(`after ${milliseconds} ms still not: ${wanted}`);
    await new Promise((done) => setTimeout(done, 20));
  }
}

// Answers under way.
export async function running() {
  return (await (await fetch(`${URL_}/health`)).json()).running;
}

// Run every check, and say how each ended.
export async function main(checks) {
  let failed = 0;
  for (const [name, check] of Object.entries(checks)) {
    const started = Date.now();
    try {
      await check();
      console.log(`ok     ${name} (${((Date.now() - started) / 1000).toFixed(1)} s)`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED ${name}\n${error.stack}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
