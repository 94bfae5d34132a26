// The recipes that are compared, as sparse data: only fields that were set. They stand in the address after #.

const UNSAFE = new Set(["__proto__", "constructor", "prototype"]);
const WHOLE = new Set(["model.config", "recompute", "quantize", "objective.arguments"]);
export const MOST_RECIPES = 4;
const LONGEST_ADDRESS = 200_000;

export function get(data, path) {
  return path.split(".").reduce((found, name) => (found !== null && typeof found === "object" && Object.hasOwn(found, name) ? found[name] : undefined), data);
}

// A copy of data with the field set; undefined removes it, and sections that become empty.
export function set(data, path, value) {
  const [name, ...rest] = path.split(".");
  if (UNSAFE.has(name)) return data;
  const copy = data !== null && typeof data === "object" && !Array.isArray(data) ? { ...data } : {};
  if (rest.length) {
    const inner = set(copy[name], rest.join("."), value);
    if (Object.keys(inner).length) copy[name] = inner;
    else delete copy[name];
  } else if (value === undefined) delete copy[name];
  else copy[name] = value;
  return copy;
}

// Dotted field -> value. What is one value (a config) stays whole.
export function flat(data, prefix = "") {
  const found = {};
  for (const [name, value] of Object.entries(data)) {
    const path = prefix + name;
    if (value !== null && typeof value === "object" && !Array.isArray(value) && !WHOLE.has(path)) Object.assign(found, flat(value, `${path}.`));
    else found[path] = value;
  }
  return found;
}

export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

// Fields in which the recipes differ from the first one, as text.
export function differences(first, other, defaultOf) {
  const before = flat(first), after = flat(other), found = [];
  for (const name of new Set([...Object.keys(after), ...Object.keys(before)])) {
    if (!same(before[name], after[name])) found.push(`${name}: ${name === "model.config" ? modelName(other) : shown(after[name] ?? defaultOf(name))}`);
  }
  return found;
}

const shown = value => (value === undefined || value === null ? "none" : typeof value === "string" ? value : JSON.stringify(value));

export function modelName(recipe) {
  const config = get(recipe, "model.config");
  if (typeof config === "string") return config;
  return get(recipe, "model.name") ?? config?._name_or_path ?? config?.model_type ?? "pasted config";
}

const written = value => (typeof value === "string" && !isJson(value) ? value : JSON.stringify(value));
function isJson(text) {
  try { JSON.parse(text); return true; } catch { return false; }
}

export function address(state) {
  const parts = state.recipes.map(recipe => new URLSearchParams(
    Object.entries(flat(recipe)).map(([name, value]) => [name === "model.config" ? "model" : name, written(value)])).toString());
  const more = new URLSearchParams();
  if (state.view !== "fit") more.set("view", state.view);
  if (state.selected) more.set("selected", state.selected);
  if (state.tokens) more.set("tokens", state.tokens);
  return `#${[...parts, ...(more.size ? [`?${more}`] : [])].join(";")}`;
}

// The state of an address, or null where it holds none.
export function fromAddress(hash, views) {
  if (hash.length < 2 || hash.length > LONGEST_ADDRESS || !hash.includes("=")) return null;
  const recipes = [], state = { view: "fit", selected: 0, tokens: "" };
  for (const part of hash.slice(1).split(";")) {
    if (part.startsWith("?")) {
      const more = new URLSearchParams(part.slice(1));
      if (views.includes(more.get("view"))) state.view = more.get("view");
      state.selected = Number.parseInt(more.get("selected") ?? "0", 10) || 0;
      state.tokens = (more.get("tokens") ?? "").slice(0, 20);
    } else if (part && recipes.length < MOST_RECIPES) {
      let recipe = {};
      for (const [name, text] of new URLSearchParams(part)) {
        let value = text;
        try { value = JSON.parse(text); } catch { /* Plain text. */ }
        recipe = set(recipe, name === "model" ? "model.config" : name, value);
      }
      if (Object.keys(recipe).length) recipes.push(recipe);
    }
  }
  if (!recipes.length) return null;
  state.selected = Math.min(Math.max(0, state.selected), recipes.length - 1);
  return { ...state, recipes };
}
