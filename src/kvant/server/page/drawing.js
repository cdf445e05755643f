// The pool's pages and the times of tokens, drawn.

const COLOURS = 8; // of answers, --answer-1 and on in the style sheet

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const colourOf = (number) => colour(`answer-${((number - 1) % COLOURS) + 1}`);

// A canvas of a height in CSS pixels, as wide as it is shown, ready to be drawn on; null where it is not shown.
function prepare(canvas, height) {
  const width = Math.floor(canvas.parentElement.clientWidth);
  if (!width || !height) return null;
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// What each page of a part is: null (free), or {kind: "filled" | "cached" | "shared", number, fill: 0 to 1}.
export function pagesOf(facts, part, state, place) {
  const pages = new Array(part.pages).fill(null);
  const own = state.parts[place];
  for (const [first, count] of own.kept) pages.fill({ kind: "cached", fill: 1 }, first, first + count);
  const tokens = new Map(state.sequences.map((sequence) => [sequence.number, sequence.tokens]));
  for (const { number, start, pages: stretches } of own.sequences) {
    let position = start;
    for (const [first, count] of stretches) {
      for (let page = first; page < first + count; page++, position += facts.page_size) {
        const fill = Math.min(1, Math.max(0, (tokens.get(number) - position) / facts.page_size));
        pages[page] = { kind: pages[page] ? "shared" : "filled", number, fill };
      }
    }
  }
  return pages;
}

const TALLEST = 190; // CSS pixels of a grid
const LARGEST = 20; // of a page
const SMALLEST = 3;

// Pages as squares, in rows. More than fit are drawn several to a square.
export function drawGrid(canvas, pages) {
  const width = canvas.parentElement.clientWidth;
  let size = LARGEST;
  const rowsFor = (count, own) => Math.ceil(count / Math.max(1, Math.floor((width + 1) / own)));
  while (size > SMALLEST && rowsFor(pages.length, size) * size > TALLEST) size--;
  let each = 1; // pages a square
  while (rowsFor(Math.ceil(pages.length / each), size) * size > TALLEST) each++;
  const squares = Math.ceil(pages.length / each);
  const ready = prepare(canvas, rowsFor(squares, size) * size);
  if (!ready) return each;
  const { context } = ready;
  const columns = Math.max(1, Math.floor((width + 1) / size));
  const inner = size > 5 ? size - 2 : size - 1;
  const look = { free: colour("free"), cached: colour("cached"), shared: colour("shared") };
  for (let square = 0; square < squares; square++) {
    const [x, y] = [(square % columns) * size, Math.floor(square / columns) * size];
    const held = pages.slice(square * each, (square + 1) * each).filter(Boolean);
    const page = held[0];
    if (!page) {
      context.fillStyle = look.free;
      context.fillRect(x, y, inner, inner);
      continue;
    }
    context.fillStyle = page.kind === "filled" ? colourOf(page.number) : look[page.kind];
    context.globalAlpha = 0.28; // reserved
    context.fillRect(x, y, inner, inner);
    context.globalAlpha = 1;
    const fill = held.reduce((sum, own) => sum + own.fill, 0) / each;
    const height = Math.round(inner * fill * 2) / 2;
    context.fillRect(x, y + inner - height, inner, height);
  }
  return each;
}

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000];
const HEIGHT = 110;

// The time of each token, [number, at, milliseconds], over the last seconds up to `now`.
export function drawTimes(canvas, tokens, now, seconds) {
  const ready = prepare(canvas, HEIGHT);
  if (!ready) return;
  const { context, width, height } = ready;
  const bottom = height - 16;
  const left = 52;
  const highest = Math.max(0, ...tokens.map(([, , ms]) => ms));
  const top = STEPS.find((step) => step >= highest) ?? highest;
  const y = (ms) => bottom - (ms / top) * (bottom - 6);
  const x = (at) => width - ((now - at) / seconds) * (width - left);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const ms of [0, top / 2, top]) {
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(left, Math.round(y(ms)) + 0.5);
    context.lineTo(width, Math.round(y(ms)) + 0.5);
    context.stroke();
    context.fillStyle = colour("quiet");
    if (highest || !ms) context.fillText(`${ms} ms`, left - 5, Math.max(6, y(ms)));
  }
  context.textAlign = "left";
  context.fillText(`${seconds} s ago`, left, height - 6);
  context.textAlign = "right";
  context.fillText("now", width, height - 6);
  for (const [number, at, ms] of tokens) {
    context.fillStyle = colourOf(number);
    context.fillRect(x(at) - 1, y(ms) - 1.5, 2, 3);
  }
}
