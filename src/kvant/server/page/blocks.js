// The blocks of a markdown text, as plain objects.

export const DEEPEST = 8; // lists in lists, bold in links and the like
const MOST_COLUMNS = 50;

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
