// Markdown as DOM nodes, while it is still being written. Text only ever becomes text: there is no way to markup.
//
// Blocks: paragraphs, headings, lists, quotes, code between fences, tables and rules. In a line: code, bold, italic,
// struck, and links to http and https. Everything else stays as it was written. A line's end is a line's end.

const DEEPEST = 8; // lists in lists, bold in links and the like
const MOST_COLUMNS = 50;
const PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

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
      if (!isLast || ended) this.onBlock(this.last.textContent);
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

// The blocks of a text. Each has a kind and the place in the text where it starts.
export function parse(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  let place = 0; // of line i in the text
  let i = 0;
  const next = () => {
    place += lines[i].length + 1;
    return lines[i++];
  };
  while (i < lines.length) {
    const line = lines[i];
    const start = place;
    let found;
    if (!line.trim()) {
      next();
    } else if ((found = fence(line))) {
      next();
      const content = [];
      let closed = false;
      while (i < lines.length && !closed) {
        closed = closes(lines[i], found);
        const own = next();
        if (!closed) content.push(outdent(own, found.indent));
      }
      blocks.push({ kind: "code", start, language: found.language, text: content.join("\n") });
    } else if ((found = heading(line))) {
      next();
      blocks.push({ kind: "heading", start, ...found });
    } else if (isRule(line)) {
      next();
      blocks.push({ kind: "rule", start });
    } else if (isQuote(line) && depth < DEEPEST) {
      const content = [];
      while (i < lines.length && isQuote(lines[i])) content.push(next().trimStart().slice(1).replace(/^ /, ""));
      blocks.push({ kind: "quote", start, blocks: parse(content.join("\n"), depth + 1) });
    } else if ((found = bullet(line)) && depth < DEEPEST) {
      const block = { kind: "list", start, ordered: found.ordered, first: found.number, items: [] };
      while (i < lines.length) {
        const own = bullet(lines[i]);
        if (!own || own.ordered !== found.ordered || own.mark !== found.mark || isRule(lines[i])) break;
        const content = [next().slice(own.width)];
        while (i < lines.length && continues(lines, i, own.width)) content.push(outdent(next(), own.width));
        block.items.push(parse(content.join("\n"), depth + 1));
        let ahead = i; // empty lines between items
        while (ahead < lines.length && !lines[ahead].trim()) ahead++;
        if (ahead < lines.length && ahead > i && bullet(lines[ahead])?.mark === found.mark) while (i < ahead) next();
      }
      blocks.push(block);
    } else if ((found = table(lines, i))) {
      const block = { kind: "table", start, alignments: found, rows: [] };
      const width = found.length;
      block.rows.push(cells(next(), width));
      next();
      while (i < lines.length && lines[i].includes("|")) block.rows.push(cells(next(), width));
      blocks.push(block);
    } else {
      const content = [next().trimStart()];
      while (i < lines.length && lines[i].trim() && !begins(lines, i, depth)) content.push(next().trimStart());
      blocks.push({ kind: "paragraph", start, text: content.join("\n").trimEnd() });
    }
  }
  return blocks;
}

const indentOf = (line) => line.length - line.trimStart().length;
const outdent = (line, width) => line.slice(Math.min(width, indentOf(line)));
const isQuote = (line) => indentOf(line) < 4 && line.trimStart().startsWith(">");

function begins(lines, i, depth) {
  const line = lines[i];
  if (fence(line) || heading(line) || isRule(line)) return true;
  if (depth < DEEPEST && (isQuote(line) || (bullet(line) && !/^\s*\d+[.)]/.test(line)))) return true;
  return depth < DEEPEST && bullet(line)?.number === 1;
}

// Whether a line still belongs to a list's item whose text begins at column `width`.
function continues(lines, i, width) {
  if (lines[i].trim()) {
    return indentOf(lines[i]) >= width || (Boolean(lines[i - 1].trim()) && !bullet(lines[i]) && !begins(lines, i, 0));
  }
  for (let ahead = i; ahead < lines.length; ahead++) if (lines[ahead].trim()) return indentOf(lines[ahead]) >= width;
  return false;
}

function fence(line) {
  const text = line.trimStart();
  const mark = text[0];
  if ((mark !== "`" && mark !== "~") || indentOf(line) > 3) return null;
  let count = 0;
  while (text[count] === mark) count++;
  const language = text.slice(count).trim();
  if (count < 3 || (mark === "`" && language.includes("`"))) return null;
  return { mark, count, indent: indentOf(line), language: language.split(/\s/, 1)[0].slice(0, 40) };
}

function closes(line, { mark, count }) {
  const text = line.trim();
  return text.length >= count && indentOf(line) < 4 && [...text].every((character) => character === mark);
}

function heading(line) {
  const found = /^ {0,3}(#{1,6})(?:[ \t]|$)/.exec(line);
  if (!found) return null;
  const text = line.slice(found[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return { level: found[1].length, text: end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text };
}

function isRule(line) {
  const marks = line.replaceAll(/[ \t]/g, "");
  return marks.length >= 3 && indentOf(line) < 4 && "-*_".includes(marks[0]) && [...marks].every((c) => c === marks[0]);
}

function bullet(line) {
  const found = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|\t|$)/.exec(line);
  if (!found) return null;
  const ordered = found[2].length > 1;
  const mark = found[2].at(-1);
  return { ordered, mark, number: ordered ? parseInt(found[2], 10) : null, width: found[0].length || 2 };
}

// The alignment of each column, if line i is the head of a table.
function table(lines, i) {
  if (!lines[i].includes("|") || i + 1 >= lines.length || !/^[ |:\t-]+$/.test(lines[i + 1])) return null;
  const marks = cells(lines[i + 1], MOST_COLUMNS);
  const head = cells(lines[i], MOST_COLUMNS);
  if (marks.length !== head.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
}

function cells(line, most) {
  const text = line.trim();
  const found = [];
  let own = "";
  for (let i = text.startsWith("|") ? 1 : 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") own += text[++i];
    else if (text[i] === "|") {
      found.push(own.trim());
      own = "";
    } else own += text[i];
  }
  if (own.trim() || !text.endsWith("|")) found.push(own.trim());
  return found.slice(0, most);
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

// Puts a text on the clipboard and says so on the button.
export async function copy(text, button) {
  const before = (button.dataset.before ??= button.textContent);
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copyByHand(text) ? "Copied" : "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

// Without https, and not on this machine, a page has no clipboard but this one.
function copyByHand(text) {
  const area = element("textarea", { value: text, className: "hidden" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

// Appends a text's nodes to an element, which it returns.
function inline(text, into, depth) {
  const missing = new Set(); // marks that do not occur again: they are searched for once
  let plain = "";
  const flush = () => {
    if (plain) into.append(plain);
    plain = "";
  };
  const add = (node, end) => {
    flush();
    into.append(node);
    return end;
  };
  let i = 0;
  while (i < text.length) {
    const character = text[i];
    let end = 0; // of what was found at i
    if (character === "\\" && i + 1 < text.length && PUNCTUATION.includes(text[i + 1])) {
      plain += text[i + 1];
      end = i + 2;
    } else if (character === "\n") {
      end = add(element("br"), i + 1);
    } else if (character === "`") {
      const mark = repeated(text, i, 1e9);
      const close = search(text, mark, i + mark.length, missing, (at) => text[at - 1] !== "`" && text[at + mark.length] !== "`");
      if (close > 0) {
        const code = text.slice(i + mark.length, close).replaceAll("\n", " ");
        const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
        end = add(element("code", { textContent: padded ? code.slice(1, -1) : code }), close + mark.length);
      } else {
        plain += mark;
        end = i + mark.length;
      }
    } else if ("*_~".includes(character) && depth < DEEPEST) {
      end = emphasis(text, i, missing, depth, add);
    } else if ((character === "[" || (character === "!" && text[i + 1] === "[")) && depth < DEEPEST) {
      end = link(text, i, missing, depth, add);
    } else if ((character === "h" || character === "<") && !/\w/.test(text[i - 1] ?? "")) {
      end = bareLink(text, i, add);
    }
    if (!end) plain += character;
    i = end || i + 1;
  }
  flush();
  return into;
}

function repeated(text, i, most) {
  let end = i;
  while (end - i < most && text[end] === text[i]) end++;
  return text.slice(i, end);
}

// The first place from i on where a mark fits; 0 if there is none.
function search(text, mark, i, missing, fits) {
  if (missing.has(mark)) return 0;
  for (let at = text.indexOf(mark, i); at >= 0; at = text.indexOf(mark, at + 1)) if (fits(at)) return at;
  missing.add(mark);
  return 0;
}

const EMPHASIS = { "*": ["em"], _: ["em"], "**": ["strong"], __: ["strong"], "***": ["strong", "em"], "~~": ["del"] };

function emphasis(text, i, missing, depth, add) {
  const mark = repeated(text, i, 3);
  const names = EMPHASIS[mark];
  const behind = text[i + mark.length];
  if (!names || behind === undefined || /\s/.test(behind)) return 0;
  if (mark[0] === "_" && /\w/.test(text[i - 1] ?? "")) return 0;
  const fits = (at) =>
    at > i + mark.length &&
    !/\s/.test(text[at - 1]) &&
    text[at - 1] !== "\\" &&
    text[at - 1] !== mark[0] &&
    text[at + mark.length] !== mark[0] &&
    (mark[0] !== "_" || !/\w/.test(text[at + mark.length] ?? ""));
  const close = search(text, mark, i + mark.length, missing, fits);
  if (!close) return 0;
  const outer = element(names[0]);
  const inner = names[1] ? outer.appendChild(element(names[1])) : outer;
  inline(text.slice(i + mark.length, close), inner, depth + 1);
  return add(outer, close + mark.length);
}

// [label](address), and an image in the same form: it becomes a link, for nothing is fetched.
function link(text, i, missing, depth, add) {
  const start = text[i] === "!" ? i + 2 : i + 1;
  const middle = search(text, "](", start, missing, () => true);
  if (!middle) return 0;
  const end = text.indexOf(")", middle);
  const label = text.slice(start, middle);
  if (end < 0 || label.includes("[")) return 0;
  const address = text.slice(middle + 2, end).trim().split(/\s/, 1)[0];
  const node = anchor(address);
  if (!node) return 0;
  inline(label || address, node, DEEPEST);
  return add(node, end + 1);
}

function bareLink(text, i, add) {
  const start = text[i] === "<" ? i + 1 : i;
  const found = /^https?:\/\/[^\s<>"'`]{1,2000}/i.exec(text.slice(start, start + 2010));
  if (!found) return 0;
  if (text[i] === "<") {
    if (text[start + found[0].length] !== ">") return 0;
  }
  let address = found[0];
  if (text[i] !== "<") while (/[.,;:!?*_~)\]]$/.test(address) && !(address.endsWith(")") && address.includes("("))) address = address.slice(0, -1);
  const node = anchor(address);
  if (!node) return 0;
  node.textContent = address;
  return add(node, start + address.length + (text[i] === "<" ? 1 : 0));
}

// A link to the web that tells the other side nothing; null for any other address.
function anchor(address) {
  let url;
  try {
    url = new URL(address); // without a base: a relative address is none
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  return element("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank", referrerPolicy: "no-referrer" });
}
