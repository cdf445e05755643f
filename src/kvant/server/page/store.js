// Conversations, in this browser. Each has an entry of its own, so that two tabs do not write over each other.

import { areVersions } from "./versions.js";

const PREFIX = "kvant.conversation.";
const MOST = 100; // conversations; the oldest goes
const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];

const known = new Map(); // id -> {id, title, updated}, of what is stored
const kept = new Map(); // id -> text, of what the browser did not store

export function newConversation() {
  return { id: identifier(), revision: null, title: "", updated: Date.now(), system: "", sampling: {}, messages: [] };
}

function identifier() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function stored(id) {
  if (kept.has(id)) return kept.get(id);
  try {
    return localStorage.getItem(PREFIX + id);
  } catch {
    return null;
  }
}

// A conversation, or null if there is none or what is stored is not one.
export function read(id) {
  return decode(id, stored(id));
}

function decode(id, text) {
  try {
    const found = JSON.parse(text);
    const isText = (value) => typeof value === "string";
    if (![found.title, found.system, found.revision].every(isText) || !Number.isFinite(found.updated)) return null;
    const roles = ["user", "assistant"];
    const isGood = (message) => {
      const { role, content, thinking = "" } = message;
      return roles.includes(role) && isText(content) && isText(thinking) && areVersions(message, isGood);
    };
    if (!Array.isArray(found.messages) || !found.messages.every(isGood)) return null;
    const { revision, title, updated, system, messages } = found;
    const given = SAMPLING.filter((name) => Number.isFinite(found.sampling?.[name]));
    const sampling = Object.fromEntries(given.map((name) => [name, found.sampling[name]]));
    return { id, revision, title, updated, system, sampling, messages };
  } catch {
    return null;
  }
}

// Reads all that is stored.
export function open() {
  known.clear();
  try {
    for (let i = 0; i < localStorage.length; i++) {
      const name = localStorage.key(i);
      if (name.startsWith(PREFIX)) note(name.slice(PREFIX.length), localStorage.getItem(name));
    }
  } catch {
    // Nothing can be stored; the first write says so.
  }
  for (const [id, text] of kept) note(id, text);
}

function note(id, text) {
  const found = decode(id, text);
  if (found) known.set(id, { id, title: found.title, updated: found.updated });
  else known.delete(id);
}

// What is stored, the newest first.
export function list() {
  return [...known.values()].sort((one, other) => other.updated - one.updated);
}

// Stores a conversation. Where another tab has changed or removed it since it was read, it becomes another one: nothing
// of either is lost. Returns a sentence on what went wrong, or null.
export function write(conversation) {
  const before = stored(conversation.id);
  const revision = before === null ? null : decode(conversation.id, before)?.revision;
  if (revision !== conversation.revision) conversation.id = identifier();
  conversation.revision = identifier();
  conversation.updated = Date.now();
  const { id, ...content } = conversation;
  const text = JSON.stringify(content);
  note(id, text);
  try {
    localStorage.setItem(PREFIX + id, text);
    kept.delete(id);
  } catch (error) {
    kept.set(id, text);
    const full = error?.name === "QuotaExceededError";
    return `The browser ${full ? "has no room left" : "stores nothing"}: what is new here is gone with the tab.`;
  }
  for (const { id: oldest } of list().slice(MOST)) if (oldest !== id) remove(oldest);
  return null;
}

// Removes a conversation. Returns a function that brings it back.
export function remove(id) {
  const text = stored(id);
  known.delete(id);
  kept.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // It was never stored.
  }
  return () => {
    try {
      localStorage.setItem(PREFIX + id, text);
    } catch {
      kept.set(id, text);
    }
    note(id, text);
  };
}

// Calls back when another tab has changed something: with the conversation's id, or null if all may have changed.
export function watch(callback) {
  window.addEventListener("storage", (event) => {
    if (event.storageArea !== localStorage) return;
    if (event.key === null) {
      open();
      callback(null);
    } else if (event.key.startsWith(PREFIX)) {
      const id = event.key.slice(PREFIX.length);
      note(id, event.newValue);
      callback(id);
    }
  });
}
