// The connection to the server: it listens to the pool, tries again where it breaks, and asks for a key.

import { hasKey, live, models, ServerError, setKey } from "./client.js";
import { element } from "./dom.js";
import { Panel } from "./panel.js";

const LONGEST_WAIT_S = 8; // between two tries to reach the server
const at = (id) => document.getElementById(id);
const panel = new Panel();
const CHOICE = "kvant.model"; // the name that was chosen last, in this browser
let modelName = null;

// The name of the model that answers.
export async function learnModel() {
  return modelName ?? (await askForModel());
}

async function askForModel() {
  const names = await models();
  const chosen = storedChoice();
  showModel(names.includes(chosen) ? chosen : names[0]);
  const options = names.map((name) => element("option", { textContent: name, selected: name === modelName }));
  at("model-choice").replaceChildren(...options);
  at("model-choice").hidden = names.length < 2;
  at("model").hidden = names.length > 1;
  return modelName;
}

function showModel(name) {
  modelName = name;
  at("model").textContent = name;
  document.title = `${name} · kvant`;
}

function storedChoice() {
  try {
    return localStorage.getItem(CHOICE);
  } catch {
    return modelName; // the browser stores nothing
  }
}

at("model-choice").addEventListener("change", () => {
  showModel(at("model-choice").value);
  try {
    localStorage.setItem(CHOICE, modelName);
  } catch {
    // It counts until the page is left.
  }
  listening?.abort();
});

const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
let listening = null; // ends what listens to the server
let wake = () => {}; // ends a wait for a key

// Listens as long as the page is seen: a browser has six connections to a server, for all tabs together.
export async function listen() {
  let wait = 0.5;
  for (;;) {
    while (document.hidden) {
      await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
    }
    listening = new AbortController();
    try {
      const name = await askForModel();
      panel.clear();
      for await (const state of live(name, listening.signal)) {
        wait = 0.5;
        connected("");
        if (state.loaded) panel.take(state);
        else panel.showNotLoaded();
      }
    } catch (error) {
      if (listening.signal.aborted) continue;
      if (!(error instanceof ServerError)) throw error;
      if (error.status === 401) {
        connected("No key");
        const asked = new Promise((done) => (wake = done));
        askForKey(hasKey() ? "This key was refused." : "");
        await asked;
        continue;
      }
      if (error.status === 0) panel.clear();
      connected(error.status === 0 ? "No connection, trying again" : error.message);
      await sleep(error.retryAfter ?? wait);
      wait = Math.min(2 * wait, LONGEST_WAIT_S);
    }
  }
}

function connected(problem) {
  if (at("connection").textContent !== problem) at("connection").textContent = problem;
  document.body.classList.toggle("offline", problem !== "");
}

export function askForKey(problem) {
  at("key-button").hidden = false;
  at("key-error").textContent = problem;
  if (!at("key-dialog").open) at("key-dialog").showModal();
  at("key").value = "";
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  if (setKey(at("key").value.trim())) {
    wake();
    return;
  }
  event.preventDefault();
  at("key-error").textContent = "A key has letters, digits and signs of ASCII, and no spaces.";
});
at("key-cancel").addEventListener("click", () => at("key-dialog").close());
at("key-button").addEventListener("click", () => askForKey(""));
document.addEventListener("visibilitychange", () => document.hidden && listening?.abort());
