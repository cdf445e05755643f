// Small things that every part of the page needs.

// An element with properties or attributes, and children: nodes and texts.
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

// A button with what it does, and further properties.
export function button(label, action, properties = {}) {
  const made = element("button", { type: "button", textContent: label, ...properties });
  made.addEventListener("click", action);
  return made;
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
