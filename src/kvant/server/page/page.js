// The page: which conversation is shown, what is being answered, and how the server is.

import { answer, ServerError } from "./client.js";
import { askForKey, learnModel, listen } from "./connection.js";
import { element } from "./dom.js";
import { download } from "./export.js";
import { ConversationList } from "./list.js";
import { AnswerView, sends, userView } from "./messages.js";
import * as store from "./store.js";
import * as versions from "./versions.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SHORTEST_MS = 250; // of an answer whose tokens a second are told: pieces come together
const at = (id) => document.getElementById(id);

let shown = store.newConversation();
const jobs = new Map(); // answers under way: conversation -> {controller, view}
const list = new ConversationList(at("list"), { select, remove, rename, download: (form) => download(shown, form) });

// --- The conversation that is shown

function show(conversation) {
  shown = conversation;
  at("system").value = shown.system;
  for (const name of NUMBERS) at(name).value = shown.sampling[name] ?? "";
  markNumbers();
  showChanged();
  showMessages();
  showList();
  history.replaceState(null, "", shown.revision ? `#${shown.id}` : location.pathname);
}

function showMessages() {
  const job = jobs.get(shown);
  at("spoken").replaceChildren();
  at("welcome").hidden = shown.messages.length > 0;
  const views = shown.messages.map((message, place) => {
    if (message.role === "user") return userView(message, (text) => edit(place, text));
    const growing = Boolean(job) && place === shown.messages.length - 1;
    const onStep = (by) => showVersion(place, by);
    const spoken = growing ? speak : undefined;
    const view = new AnswerView(message, { onRetry: () => retry(place), onStep, spoken });
    view.show(!growing);
    if (growing) job.view = view;
    return view.root;
  });
  at("messages").replaceChildren(...views);
  showButtons();
  scrollToEnd();
}

function showButtons() {
  const busy = jobs.has(shown);
  const focused = document.activeElement;
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  if (focused === at("send") || focused === at("stop")) focusText(); // it is hidden now
}

function showChanged() {
  const names = Object.keys(shown.sampling).map((name) => `${name.replaceAll("_", "-")} ${shown.sampling[name]}`);
  at("changed").textContent = [shown.system ? "prompt set" : "", ...names].filter(Boolean).join(", ");
}

function showList() {
  list.show(store.list(), shown.id);
}

function select(id) {
  const job = [...jobs.keys()].find((conversation) => conversation.id === id);
  const found = job ?? store.read(id);
  if (found) show(found);
  fold();
  focusText();
}

function startNew() {
  const { system, sampling } = shown;
  show({ ...store.newConversation(), system, sampling: { ...sampling } });
  fold();
  focusText();
}

function remove(id) {
  for (const [conversation, { controller }] of jobs) if (conversation.id === id) controller.abort();
  const back = store.remove(id);
  if (id === shown.id) show(store.newConversation());
  else showList();
  notice("Deleted.", "Undo", () => {
    back();
    select(id);
  });
  focusText();
}

function rename(title) {
  shown.title = title;
  save(shown);
}

function save(conversation) {
  const id = conversation.id;
  const problem = store.write(conversation);
  if (problem) notice(problem);
  if (conversation === shown) history.replaceState(null, "", `#${conversation.id}`);
  if (conversation.id !== id) notice("Another tab has changed this conversation. This one goes on as a copy.");
  showList();
}

// --- Asking and answering

const titleOf = (text) => text.split("\n", 1)[0].slice(0, 60);

function send(text) {
  if (!shown.title) shown.title = titleOf(text);
  shown.messages.push({ role: "user", content: text });
  run(shown);
}

function edit(place, text) {
  stop();
  const [message] = shown.messages.splice(place);
  if (place === 0 && shown.title === titleOf(message.content)) shown.title = ""; // else it was renamed
  send(text);
  focusText();
}

function retry(place) {
  stop();
  run(shown, versions.setAside(shown.messages, place));
  focusText();
}

function showVersion(place, by) {
  stop();
  versions.step(shown.messages, place, by);
  save(shown);
  const { scrollTop } = at("scroll");
  showMessages();
  at("scroll").scrollTop = scrollTop;
  const buttons = [...at("messages").children[place].querySelectorAll(".versions button:enabled")];
  buttons.at(by > 0 ? -1 : 0).focus();
}

function stop() {
  const job = jobs.get(shown);
  job?.controller.abort();
  jobs.delete(shown);
}

function requestBody({ system, sampling, messages }) {
  const whole = messages.filter(({ role, content }) => role === "user" || content); // an answer may have failed
  const sent = whole.map(({ role, content }) => ({ role, content }));
  if (system.trim()) sent.unshift({ role: "system", content: system });
  return { messages: sent, stream: true, stream_options: { include_usage: true }, ...sampling };
}

// Has the last message of a conversation answered. `others`: the versions that the answer had before.
async function run(conversation, others = {}) {
  const message = { role: "assistant", content: "", thinking: "", ...others };
  const body = requestBody(conversation);
  const job = { controller: new AbortController(), view: null };
  const { signal } = job.controller;
  conversation.messages.push(message);
  jobs.set(conversation, job);
  save(conversation);
  if (conversation === shown) showMessages();
  const timing = { begun: performance.now(), first: null, thought: null };
  let usage = null;
  let reason = null;
  let saved = performance.now();
  try {
    body.model = await learnModel();
    for await (const piece of answer(body, signal)) {
      const now = performance.now();
      if (piece.text || piece.thinking) timing.first ??= now;
      if (piece.thinking) message.thinking += piece.thinking;
      if (piece.text) {
        if (message.thinking && timing.thought === null) {
          timing.thought = now;
          message.seconds = Number(((now - timing.first) / 1000).toFixed(1));
        }
        message.content += piece.text;
      }
      usage = piece.usage ?? usage;
      reason = piece.reason ?? reason;
      if (now - saved > 1000) {
        saved = now;
        save(conversation);
      }
      job.view?.update(keepAtEnd);
    }
    const several = !at("model-choice").hidden; // then a conversation can have answers of different models
    message.note = [...(several ? [body.model] : []), describe(timing, usage, reason)].join(" · ");
  } catch (error) {
    if (signal.aborted) message.note = "Stopped.";
    else message.error = explain(error);
  }
  finish(conversation, message, job);
}

function finish(conversation, message, job) {
  if (jobs.get(conversation) === job) jobs.delete(conversation);
  // It may have been taken out by an edit, or its conversation deleted, while it ended.
  if (!conversation.messages.includes(message)) return;
  if (!message.content) message.note ??= "An empty answer.";
  const gone = conversation.revision !== null && store.read(conversation.id) === null && job.controller.signal.aborted;
  if (!gone) save(conversation);
  if (conversation !== shown) return;
  const stays = isAtEnd();
  job.view?.show(true);
  showButtons();
  if (stays) scrollToEnd();
}

function describe({ begun, first }, usage, reason) {
  const parts = [];
  const ended = performance.now();
  if (usage) {
    const { completion_tokens: tokens, prompt_tokens: prompt } = usage;
    parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    const rate = ((tokens - 1) * 1000) / (ended - first);
    if (first !== null && tokens > 1 && ended - first > SHORTEST_MS) parts.push(`${rate.toFixed(1)} a second`);
    if (first !== null) parts.push(`first after ${Math.round(first - begun)} ms`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(cached ? `${cached} of ${prompt} prompt tokens cached` : `${prompt} prompt tokens`);
  }
  if (reason === "length") parts.push("ended by the limit of tokens");
  return parts.join(" · ");
}

function explain(error) {
  if (!(error instanceof ServerError)) {
    console.error(error);
    return "The page failed at this answer. Reload it.";
  }
  if (error.status === 401) askForKey("");
  const later = error.retryAfter ? `, try again in ${error.retryAfter} s` : "";
  const text = `${error.message}${later}`;
  return `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}

// --- For those who hear the page

function speak(text) {
  at("spoken").append(element("p", { textContent: text }));
  while (at("spoken").children.length > 50) at("spoken").firstChild.remove();
}

function notice(text, label = "", action = null) {
  const [words, button] = at("notice").children;
  at("notice").hidden = false;
  words.textContent = text;
  button.hidden = !label;
  button.textContent = label;
  button.onclick = () => {
    at("notice").hidden = true;
    action();
  };
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => (at("notice").hidden = true), 12_000);
}

// --- The end of the messages stays in sight while one is there

const isAtEnd = () => at("scroll").scrollHeight - at("scroll").scrollTop - at("scroll").clientHeight < 60;
let follows = true;

function scrollToEnd() {
  at("scroll").scrollTop = at("scroll").scrollHeight;
  follows = true;
  at("newest").hidden = true;
}

function keepAtEnd() {
  if (follows) scrollToEnd();
  else at("newest").hidden = isAtEnd();
}

// --- Small and wide screens

const wide = { conversations: matchMedia("(min-width: 900px)"), live: matchMedia("(min-width: 1200px)") };

function unfold() {
  for (const [id, query] of Object.entries(wide)) at(id).open = query.matches;
}

function fold() {
  if (!wide.conversations.matches) at("conversations").open = false;
}

// Not where a keyboard on the screen would come with it.
function focusText() {
  if (!matchMedia("(pointer: coarse)").matches) at("text").focus();
}

function fitText() {
  const area = at("text");
  area.style.height = "auto";
  const most = innerHeight / 3;
  area.style.overflowY = area.scrollHeight > most ? "auto" : "hidden";
  area.style.height = `${Math.min(area.scrollHeight + 2, most)}px`;
}

// --- What is done with the page

at("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || jobs.has(shown)) return;
  at("text").value = "";
  fitText();
  send(text);
});
at("text").addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  at("compose").requestSubmit();
});
at("text").addEventListener("input", fitText);
addEventListener("resize", () => {
  fitText();
  keepAtEnd();
});
at("stop").addEventListener("click", () => jobs.get(shown)?.controller.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("key-dialog").open) jobs.get(shown)?.controller.abort();
});
at("new").addEventListener("click", startNew);
for (const starter of at("starters").querySelectorAll("button")) {
  starter.addEventListener("click", () => {
    send(starter.textContent);
    focusText();
  });
}
at("newest").addEventListener("click", scrollToEnd);
at("scroll").addEventListener("scroll", () => {
  follows = isAtEnd();
  if (follows) at("newest").hidden = true;
});

function changeOptions() {
  shown.system = at("system").value;
  shown.sampling = {};
  for (const name of NUMBERS) {
    const { value, valueAsNumber, validity } = at(name);
    if (value !== "" && validity.valid) shown.sampling[name] = valueAsNumber;
  }
  markNumbers();
  showChanged();
  if (shown.messages.length) save(shown);
}
for (const name of ["system", ...NUMBERS]) at(name).addEventListener("change", changeOptions);

// Marks the fields whose values are impossible and says why, and leaves the keyboard where it is.
function markNumbers() {
  const wrong = NUMBERS.map(at).filter((field) => !field.validity.valid);
  for (const name of NUMBERS) at(name).setAttribute("aria-invalid", String(wrong.includes(at(name))));
  const label = (field) => field.labels[0].firstChild.data.trim();
  at("wrong").textContent = wrong.map((field) => `${label(field)} is not used: ${field.validationMessage}`).join(" ");
}

addEventListener("pagehide", () => {
  for (const conversation of jobs.keys()) store.write(conversation);
});
store.watch((id) => {
  showList();
  if (jobs.has(shown) || (id !== null && id !== shown.id) || shown.revision === null) return;
  show(store.read(shown.id) ?? store.newConversation());
});
for (const query of Object.values(wide)) query.addEventListener("change", unfold);

unfold();
fitText();
store.open();
show(store.read(location.hash.slice(1)) ?? store.newConversation());
focusText();
listen();
