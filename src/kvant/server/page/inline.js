// What is in a line of markdown: code, emphasis, links. Text only ever becomes text.

import { DEEPEST } from "./blocks.js";
import { element } from "./dom.js";

const PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";

// Appends a text's nodes to an element, which it returns.
export function inline(text, into, depth) {
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
      const fits = (at) => text[at - 1] !== "`" && text[at + mark.length] !== "`";
      const close = search(text, mark, i + mark.length, missing, fits);
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
  const bracketed = text[i] === "<";
  if (bracketed && text[start + found[0].length] !== ">") return 0;
  const address = bracketed ? found[0] : withoutEnd(found[0]);
  const node = anchor(address);
  if (!node) return 0;
  node.textContent = address;
  return add(node, start + address.length + (bracketed ? 1 : 0));
}

// An address without the marks behind it that belong to the sentence.
function withoutEnd(address) {
  let end = address.length;
  while (".,;:!?*_~)]".includes(address[end - 1]) && !(address[end - 1] === ")" && address.includes("("))) end--;
  return address.slice(0, end);
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
  return element("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" });
}
