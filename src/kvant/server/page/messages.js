// A message as it is shown: one's own, or an answer that may still be growing.

import { button, copy, element } from "./dom.js";
import { Markdown } from "./markdown.js";
import { count, number } from "./versions.js";

// One's own message. onEdit(text) is called with what it was changed to.
export function userView(message, onEdit) {
  const body = element("div", { className: "body own", textContent: message.content });
  const actions = element("div", { className: "actions" });
  const view = element("article", { className: "message user", "aria-label": "You" }, body, actions);
  const copying = button("Copy", () => copy(message.content, copying));
  const editing = button("Edit", () => {
    const area = element("textarea", { value: message.content, "aria-label": "Your message", rows: 3 });
    const leave = () => {
      form.replaceWith(body, actions);
      editing.focus();
    };
    const send = element("button", { type: "submit", textContent: "Send" });
    const buttons = element("div", { className: "buttons" }, send, button("Cancel", leave));
    const form = element("form", { className: "edit" }, area, buttons);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) onEdit(area.value.trim());
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      } else if (sends(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    actions.remove();
    body.replaceWith(form);
    area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight / 2)}px`;
    area.focus();
  });
  actions.append(copying, editing);
  return view;
}

// Whether a key in a text field means: send. Not while a text of several keys is being composed.
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function versionSwitch(message, onStep) {
  const [at, all] = [number(message), count(message)];
  const back = button("‹", () => onStep(-1), { disabled: at === 1, "aria-label": "Previous version" });
  const on = button("›", () => onStep(1), { disabled: at === all, "aria-label": "Next version" });
  const place = element("span", { textContent: `${at} of ${all}` });
  return element("div", { className: "versions", role: "group", "aria-label": "Versions" }, back, place, on);
}

// An answer. update() shows what its message has become.
export class AnswerView {
  // onRetry() is called to have it answered again, onStep(by) to see the version before (-1) or after (1) this one, and
  // spoken(text) with each block that has ended.
  constructor(message, { onRetry, onStep, spoken }) {
    this.message = message;
    this.frame = 0;
    this.body = element("div", { className: "body" });
    this.thought = element("div", { className: "body" });
    this.summary = element("summary", { textContent: "Thinking" });
    this.thinking = element("details", { className: "thinking", hidden: true }, this.summary, this.thought);
    this.wait = element("p", { className: "wait", "aria-hidden": "true" }, element("i"), element("i"), element("i"));
    this.note = element("p", { className: "note" });
    const copying = button("Copy", () => copy(message.content, copying));
    const buttons = [copying, button("Retry", onRetry)];
    if (count(message) > 1) buttons.push(versionSwitch(message, onStep));
    this.actions = element("div", { className: "actions" }, ...buttons, this.note);
    this.text = new Markdown(this.body, spoken);
    this.thoughts = new Markdown(this.thought);
    const parts = [this.thinking, this.body, this.wait, this.actions];
    this.root = element("article", { className: "message answer", "aria-label": "Answer" }, ...parts);
  }

  // Soon, and once for all that comes until then.
  update(onShown) {
    this.frame ||= requestAnimationFrame(() => {
      this.show(false);
      onShown();
    });
  }

  show(ended) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { content, thinking, seconds, note, error } = this.message;
    this.thinking.hidden = !thinking;
    if (thinking) {
      this.thoughts.update(thinking);
      this.summary.textContent = content || ended ? `Thought${seconds ? ` for ${seconds} s` : ""}` : "Thinking";
    }
    this.text.update(content, ended);
    this.wait.hidden = ended;
    this.root.classList.toggle("growing", !ended);
    this.root.setAttribute("aria-busy", String(!ended));
    this.actions.hidden = !ended;
    this.note.textContent = error || note || "";
    this.note.classList.toggle("error", Boolean(error));
  }
}
