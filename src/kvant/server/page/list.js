// The list of conversations. The one that is shown can be renamed and exported there.

import { button, element } from "./dom.js";

export class ConversationList {
  // Of actions each is called when its button is used: select(id), remove(id), rename(title), download(form).
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.seen = "";
    this.renamed = null; // the id of the conversation whose title is being edited
  }

  // entries: [{id, title}]. Nothing is touched unless something changed, so that the keyboard's place stays.
  show(entries, current) {
    const seen = JSON.stringify([current, entries.map(({ id, title }) => [id, title])]);
    if (seen === this.seen || (this.renamed !== null && this.renamed === current)) return;
    this.renamed = null;
    this.seen = seen;
    this.root.replaceChildren(...entries.map((entry) => this.item(entry, entry.id === current)));
  }

  item({ id, title }, isCurrent) {
    const name = title || "Untitled";
    const { select, remove, download } = this.actions;
    const open = button(name, () => select(id), { className: "open" });
    const label = `Delete ${name}`;
    const gone = button("×", () => remove(id), { className: "remove", title: "Delete", "aria-label": label });
    const item = element("li", {}, open, gone);
    if (!isCurrent) return item;
    open.setAttribute("aria-current", "true");
    const rename = button("Rename", () => this.rename(id, title, item));
    const markdown = button("Markdown", () => download("md"), { title: "Download as Markdown" });
    const json = button("JSON", () => download("json"), { title: "Download as JSON" });
    item.append(element("div", { className: "actions" }, rename, markdown, json));
    return item;
  }

  rename(id, title, item) {
    this.renamed = id;
    const field = element("input", { value: title, maxLength: 100, "aria-label": "Title" });
    const end = (text) => {
      this.renamed = null;
      if (text && text !== title) this.actions.rename(text);
      else form.replaceWith(...parts);
      this.root.querySelector(".actions button")?.focus();
    };
    const parts = [...item.children];
    const save = element("button", { type: "submit", textContent: "Save" });
    const buttons = element("div", { className: "actions" }, save, button("Cancel", () => end("")));
    const form = element("form", { className: "rename" }, field, buttons);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      end(field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end("");
    });
    item.replaceChildren(form);
    field.select();
  }
}
