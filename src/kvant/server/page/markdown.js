// Markdown as DOM nodes, while it is still being written. Text only ever becomes text: there is no way to markup.
//
// Blocks: paragraphs, headings, lists, quotes, code between fences, tables and rules. In a line: code, bold, italic,
// struck, and links to http and https. Everything else stays as it was written. A line's end is a line's end.

import { parse } from "./blocks.js";
import { copy, element } from "./dom.js";
import { inline } from "./inline.js";

// Shows a text that grows at its end. A block that has ended is never touched again.
export class Markdown {
  // root: the element it fills. onBlock: called with the text of each block that has ended.
  constructor(root, onBlock = () => {}) {
    this.root = root;
    this.onBlock = onBlock;
    this.done = 0; // where in the text the last block begins
    this.last = null; // its node
    this.lastBlock = null;
  }

  update(text, ended = false) {
    const blocks = parse(text.slice(this.done));
    blocks.forEach((block, place) => {
      const isLast = place === blocks.length - 1;
      if (place === 0 && this.last !== null) this.replace(block);
      else this.append(block);
      if (!isLast || ended) this.onBlock(spoken(this.last).replace(/\n+/g, "\n").trim());
    });
    if (blocks.length > 1) this.done += blocks[blocks.length - 1].start;
  }

  append(block) {
    this.last = render(block, 0);
    this.lastBlock = block;
    this.root.append(this.last);
  }

  replace(block) {
    const before = this.lastBlock;
    if (before.kind === "code" && block.kind === "code" && before.language === block.language) {
      const code = this.last.querySelector("code"); // the copy button keeps its focus
      if (code.textContent !== block.text) code.textContent = block.text;
    } else {
      const node = render(block, 0);
      this.last.replaceWith(node);
      this.last = node;
    }
    this.lastBlock = block;
  }
}

const WITHIN_LINES = new Set(["a", "code", "del", "em", "strong"]);

// What a node says to somebody who hears it: without buttons, and with pauses.
function spoken(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  if (node.className === "bar") return "";
  const text = [...node.childNodes].map(spoken).join("");
  if (["td", "th"].includes(node.localName)) return `${text}, `;
  return WITHIN_LINES.has(node.localName) ? text : `\n${text}\n`;
}

function render(block, depth) {
  switch (block.kind) {
    case "code":
      return renderCode(block);
    case "heading":
      return inline(block.text, element(`h${Math.min(6, block.level + 2)}`), depth); // below the page's own
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...block.blocks.map((own) => render(own, depth + 1)));
    case "list": {
      const list = element(block.ordered ? "ol" : "ul");
      if (block.ordered && block.first !== 1) list.start = block.first;
      for (const blocks of block.items) {
        const item = element("li");
        for (const own of blocks) {
          if (own.kind === "paragraph" && own === blocks[0]) inline(own.text, item, depth + 1);
          else item.append(render(own, depth + 1));
        }
        list.append(item);
      }
      return list;
    }
    case "table": {
      const [head, ...rows] = block.rows.map((row, place) => {
        const line = element("tr");
        block.alignments.forEach((alignment, column) => {
          const cell = inline(row[column] ?? "", element(place ? "td" : "th"), depth + 1);
          cell.className = alignment;
          line.append(cell);
        });
        return line;
      });
      const whole = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
      return element("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": "Table" }, whole);
    }
    default:
      return inline(block.text, element("p"), depth);
  }
}

function renderCode({ language, text }) {
  const code = element("code", { textContent: text });
  const button = element("button", { type: "button", className: "copy", textContent: "Copy" });
  button.addEventListener("click", () => copy(code.textContent, button));
  const pre = element("pre", { tabIndex: 0 }, code);
  return element("div", { className: "code" }, element("div", { className: "bar" }, language || "code", button), pre);
}
