// A conversation as a file to download.

// What was said. Thinking and the other versions of answers are in the JSON alone.
function asMarkdown({ title, system, messages }) {
  const parts = [`# ${title || "Untitled"}`];
  if (system.trim()) parts.push("## System prompt", system);
  for (const { role, content } of messages) parts.push(role === "user" ? "## You" : "## Answer", content);
  return `${parts.join("\n\n")}\n`;
}

function asJson({ title, updated, system, sampling, messages }) {
  const content = { title, updated: new Date(updated).toISOString(), system, sampling, messages };
  return `${JSON.stringify(content, null, 2)}\n`;
}

const FORMS = {
  md: { type: "text/markdown", write: asMarkdown },
  json: { type: "application/json", write: asJson },
};

// Downloads a conversation; the form is "md" or "json".
export function download(conversation, form) {
  const { type, write } = FORMS[form];
  const address = URL.createObjectURL(new Blob([write(conversation)], { type: `${type};charset=utf-8` }));
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name || "conversation"}.${form}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
