// The panel: what kvant's pool and engine are doing, as the server says.

import { element } from "./dom.js";
import { colourOf, drawGrid, drawTimes, pagesOf } from "./drawing.js";
import { watchTheme } from "./theme.js";

const SECONDS = 20; // of the plot
const RATE_SECONDS = 2; // over which tokens a second are counted
const at = (id) => document.getElementById(id);

export function formatBytes(count) {
  const units = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  for (const [unit, size] of units) if (count >= size) return `${(count / size).toFixed(2)} ${unit}`;
  return `${Math.round(count)} bytes`;
}

// The value below which a part of the values lie, between neighbours in proportion.
export function percentile(values, part) {
  const ordered = [...values].sort((one, other) => one - other);
  const place = (ordered.length - 1) * part;
  const [below, above] = [ordered[Math.floor(place)], ordered[Math.ceil(place)]];
  return below + (above - below) * (place % 1);
}

const formatMs = (ms) => (ms === null ? "–" : `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`);

export class Panel {
  constructor() {
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    watchTheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(at("panel"));
    this.clear();
    this.timer = null;
  }

  // Nothing is known: the server is gone.
  clear() {
    this.facts = this.state = null;
    this.tokens = []; // [number, when, milliseconds or null]
    this.canvases = [];
    at("grids").replaceChildren();
    at("sequences").replaceChildren();
    for (const id of ["held", "reserved", "rate", "running", "waiting", "median", "p95"]) at(id).textContent = "–";
    for (const id of ["format", "brief", "cached"]) at(id).textContent = "";
    at("plot").width = at("plot").width; // wipes it
    at("plot").setAttribute("aria-label", "No token yet");
  }

  // The model takes no memory: it is loaded at its next request.
  showNotLoaded() {
    if (this.facts) this.clear();
    at("reserved").textContent = "Not loaded";
  }

  // What the server says of itself.
  take(state) {
    if (!this.facts) {
      this.facts = state.pool;
      this.showFacts();
    }
    this.state = state;
    this.tokens.push(...state.tokens);
    // The server's clock, as far as this machine knows it.
    this.clock = Math.max(state.time, state.tokens.at(-1)?.[1] ?? 0);
    this.clockAt = performance.now();
    this.draw();
  }

  get now() {
    return this.clock + (performance.now() - this.clockAt) / 1000;
  }

  showFacts() {
    at("reserved").textContent = formatBytes(this.facts.reserved_bytes);
    at("format").textContent = `, at ${this.facts.format}`;
    for (const part of this.facts.parts) {
      const seen = part.window === null ? "" : `, which see the last ${part.window} tokens`;
      const size = `${part.pages} pages of ${this.facts.page_size} tokens`;
      const title = element("h3", { textContent: `${size} in ${part.layers} layers${seen}` });
      const canvas = element("canvas", { role: "img", className: "pages" });
      const note = element("p", { className: "quiet", hidden: true });
      at("grids").append(element("div", {}, title, canvas, note));
      this.canvases.push({ canvas, note });
    }
  }

  draw() {
    clearTimeout(this.timer);
    if (!this.state) return;
    this.showPages();
    this.showSequences();
    this.showSpeed();
    // The plot moves on while there is something on it.
    if (this.tokens.length) this.timer = setTimeout(() => this.draw(), this.calm.matches ? 1000 : 250);
  }

  showPages() {
    let held = 0;
    let cached = 0;
    this.facts.parts.forEach((part, place) => {
      const pages = pagesOf(this.facts, part, this.state, place);
      const count = (kind) => pages.reduce((sum, page) => sum + (page?.kind === kind ? 1 : 0), 0);
      const own = { filled: count("filled"), shared: count("shared"), cached: count("cached") };
      held += (own.filled + own.shared) * part.page_bytes;
      cached += own.cached * part.page_bytes;
      const { canvas, note } = this.canvases[place];
      const each = drawGrid(canvas, pages);
      note.hidden = each === 1;
      note.textContent = `A square is ${each} pages.`;
      const parts = `${own.filled} are one answer's, ${own.shared} are shared and ${own.cached} are cached for reuse`;
      const said = `Of ${part.pages} pages ${parts}`;
      canvas.setAttribute("aria-label", said);
      canvas.title = said;
    });
    const all = this.facts.reserved_bytes;
    at("held").textContent = held ? `${formatBytes(held)} in use by running answers` : "No answer is running";
    at("cached").textContent = cached ? `${formatBytes(cached)} cached for reuse, until room is needed` : "";
    at("brief").textContent = held ? `${Math.ceil((100 * held) / all)} % of ${formatBytes(all)}` : formatBytes(all);
  }

  showSequences() {
    const list = at("sequences");
    const { sequences, prefilling } = this.state;
    while (list.children.length > sequences.length) list.lastChild.remove();
    while (list.children.length < sequences.length) {
      list.append(element("li", {}, element("i", { className: "cell" }), element("span"), element("progress")));
    }
    sequences.forEach(({ number, tokens, reserved }, place) => {
      const [cell, text, bar] = list.children[place].children;
      cell.style.background = colourOf(number);
      const fed = place >= sequences.length - prefilling ? ", its prompt is being read" : "";
      text.textContent = `Answer ${number}: ${tokens} of ${reserved} tokens${fed}`;
      bar.max = reserved;
      bar.value = tokens;
      bar.setAttribute("aria-label", `Answer ${number}`);
    });
  }

  showSpeed() {
    const now = this.now;
    this.tokens = this.tokens.filter(([, when]) => now - when <= SECONDS);
    const times = this.tokens.filter(([, , ms]) => ms !== null);
    const recent = this.tokens.filter(([, when]) => now - when <= RATE_SECONDS);
    const rate = recent.length / RATE_SECONDS;
    at("rate").textContent = rate < 10 ? rate.toFixed(1) : String(Math.round(rate));
    at("running").textContent = this.state.running + this.state.prefilling;
    at("waiting").textContent = this.state.waiting;
    const values = times.map(([, , ms]) => ms);
    const [median, p95] = values.length ? [percentile(values, 0.5), percentile(values, 0.95)] : [null, null];
    at("median").textContent = formatMs(median);
    at("p95").textContent = formatMs(p95);
    const canvas = at("plot");
    drawTimes(canvas, times, now, SECONDS);
    const said = `${values.length} tokens: median ${formatMs(median)}, 95th percentile ${formatMs(p95)}`;
    canvas.setAttribute("aria-label", values.length ? said : "No token in the last 20 seconds");
  }
}
