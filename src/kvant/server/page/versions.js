// The versions of an answer. The message is the version that is shown; `before` and `after` have the others in their
// order, each with the messages that followed it as `rest`.

export const number = ({ before = [] }) => before.length + 1;
export const count = ({ before = [], after = [] }) => before.length + 1 + after.length;

function taken(messages, place) {
  const [{ content, thinking, seconds, note, error, before = [], after = [] }, ...rest] = messages.splice(place);
  return { before, version: { content, thinking, seconds, note, error, rest }, after };
}

// Takes an answer and what follows it out of the messages. Returns what the next version of the answer begins with.
export function setAside(messages, place) {
  const { before, version, after } = taken(messages, place);
  const isEmpty = !version.content && !version.thinking && !version.rest.length;
  return { before: [...before, ...(isEmpty ? [] : [version]), ...after], after: [] };
}

// Puts the version before (-1) or after (1) an answer in its place, with the messages that followed that version.
export function step(messages, place, by) {
  const { before, version, after } = taken(messages, place);
  const all = [...before, version, ...after];
  const at = before.length + by;
  const { rest, ...shown } = all[at];
  messages.push({ ...shown, role: "assistant", before: all.slice(0, at), after: all.slice(at + 1) }, ...rest);
}

// Whether what was stored are versions; isGood: whether a message is one.
export function areVersions({ before = [], after = [] }, isGood) {
  const isVersion = ({ rest, ...version }) => isGood({ ...version, role: "assistant" }) && rest.every(isGood);
  return Array.isArray(before) && Array.isArray(after) && [...before, ...after].every(isVersion);
}
