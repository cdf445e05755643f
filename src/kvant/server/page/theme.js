// Light or dark: what this browser's user chose here, or else what the system has.

const KEY = "kvant.theme";
const SYSTEM = "(prefers-color-scheme: dark)";
const MEDIA = { system: SYSTEM, light: "not all", dark: "all" }; // of the dark style sheet
const SCHEMES = { system: "light dark", light: "light", dark: "dark" }; // of the browser's own controls
const watchers = [];
const field = document.getElementById("theme");

// Calls back when the colours have changed.
export function watchTheme(callback) {
  watchers.push(callback);
}

function apply(theme) {
  field.value = theme;
  document.getElementById("dark").media = MEDIA[theme];
  document.querySelector("meta[name=color-scheme]").content = SCHEMES[theme];
  for (const callback of watchers) callback();
}

const known = (theme) => (Object.hasOwn(MEDIA, theme ?? "") ? theme : "system");

function stored() {
  try {
    return known(localStorage.getItem(KEY));
  } catch {
    return "system"; // the browser stores nothing
  }
}

field.addEventListener("change", () => {
  apply(field.value);
  try {
    if (field.value === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, field.value);
  } catch {
    // The choice ends with the page.
  }
});
addEventListener("storage", ({ key, newValue }) => key === KEY && apply(known(newValue))); // another tab
matchMedia(SYSTEM).addEventListener("change", () => watchers.forEach((callback) => callback()));
apply(stored());
