// Controls of a recipe, made from its JSON schema: every field has one.

import { h } from "./dom.js";
import { get, same } from "./state.js";
import { isOf, titled } from "./schema.js";

const NOT_SHOWN = new Set(["model.config", "model.name"]);
let numIds = 0;

// Fields of the whole form. `change(path, value)` is called with undefined where the default is chosen.
export class Fields {
  constructor(schema, page, change) {
    this.schema = schema;
    this.page = page;
    this.change = change;
  }

  // A labelled control for a path, such as batch.micro.
  row(path, recipe, { label = path.split(".").at(-1).replaceAll("_", " "), isMain = false } = {}) {
    const node = this.schema.at(path);
    const id = `f-${path.replaceAll(".", "-")}${isMain ? "-main" : ""}-${numIds++}`;
    const value = get(recipe, path);
    const inner = h("div", { class: "value" });
    const row = h("div", { class: "field", "data-path": path, "data-changed": value !== undefined },
      h("label", { for: id }, label), inner);
    const about = !isMain && node.description ? h("p", { class: "about", id: `${id}-about` }, node.description) : null;
    inner.append(this.control(path, node, value, { id, about: about?.id, recipe }));
    if (about) row.append(about);
    row.append(h("p", { class: "problem", id: `${id}-problem`, hidden: true }));
    return row;
  }

  // The control of a node: that of its one kind, or a choice of kinds with the chosen one's control below.
  control(path, node, value, options) {
    const kinds = this.schema.kinds(node);
    const shown = value === undefined ? node.default : value;
    if (path === "hardware.gpu") return this.gpus(path, shown, options);
    if (kinds.length === 1) return this.single(path, kinds[0], shown, options);
    const simple = kinds.filter(kind => ["enum", "null", "boolean"].includes(kind.type));
    const others = kinds.filter(kind => !simple.includes(kind));
    const numbers = others.filter(kind => ["integer", "number", "string"].includes(kind.type));
    if (others.length === 1 && numbers.length === 1 && simple.every(kind => kind.type === "null")) {
      return this.single(path, others[0], shown, { ...options, isOptional: true });
    }
    return this.union(path, node, simple, others, shown, options);
  }

  union(path, node, simple, others, shown, options) {
    const choices = simple.flatMap(kind => (kind.type === "null" ? [[null, "none"]] : kind.type === "boolean" ? [[true, "yes"], [false, "no"]] : kind.values.map(one => [one, String(one)])));
    const select = h("select", { id: options.id, "aria-describedby": options.about });
    for (const [one, text] of choices) select.append(h("option", { value: JSON.stringify(one), selected: same(one, shown) }, text));
    for (const [at, kind] of others.entries()) {
      const isChosen = isOf(kind, shown) && !choices.some(([one]) => same(one, shown));
      select.append(h("option", { value: `kind-${at}`, selected: isChosen }, titled(kind.node) || kind.type));
    }
    select.addEventListener("change", () => {
      const at = select.value.startsWith("kind-") ? Number(select.value.slice(5)) : -1;
      const chosen = at < 0 ? JSON.parse(select.value) : this.example(others[at]);
      this.change(path, same(chosen, node.default) ? undefined : chosen, { redraw: true });
    });
    const kind = others.find(one => isOf(one, shown));
    const isOther = kind && !choices.some(([one]) => same(one, shown));
    const below = isOther ? this.single(path, kind, shown, { ...options, id: `${options.id}-inner`, label: `${path} value` }) : null;
    return below ? h("div", { class: "union" }, select, below) : select;
  }

  single(path, kind, shown, options) {
    const { node } = kind;
    if (kind.type === "object") return this.object(path, node, shown, options);
    if (kind.type === "enum") return this.select(path, kind.values, shown, node, options);
    if (kind.type === "boolean") {
      const box = h("input", { type: "checkbox", id: options.id, "aria-describedby": options.about });
      box.checked = shown === true;
      box.addEventListener("change", () => this.give(path, box.checked));
      return box;
    }
    if (kind.type === "integer" || kind.type === "number") return this.number(path, kind, shown, options);
    if (kind.type === "array" && node.items && this.schema.kinds(node.items)[0].type === "enum") return this.boxes(path, this.schema.kinds(node.items)[0].values, shown ?? [], options);
    const isText = kind.type === "string";
    const isList = kind.type === "array" && node.items?.type === "string";
    const input = h("input", {
      type: "text", id: options.id, spellcheck: "false", "aria-describedby": options.about, "aria-label": options.label,
      value: isText ? shown ?? "" : isList ? (shown ?? []).join(", ") : shown === undefined ? "" : JSON.stringify(shown),
      placeholder: isList ? "names, with commas" : isText ? "" : "JSON",
    });
    input.addEventListener("change", () => {
      if (isText) return this.give(path, input.value || undefined);
      if (isList) return this.give(path, input.value.split(",").map(one => one.trim()).filter(Boolean));
      try {
        this.give(path, input.value.trim() ? JSON.parse(input.value) : undefined);
      } catch {
        this.change(path, input.value, {});
      }
    });
    return input;
  }

  number(path, kind, shown, { id, about, isOptional, label }) {
    const { node } = kind;
    const input = h("input", {
      type: "text", inputmode: kind.type === "integer" ? "numeric" : "decimal", id, "aria-describedby": about, "aria-label": label,
      value: shown ?? "", placeholder: isOptional ? "default" : "", "data-step": kind.type === "integer" ? "1" : "",
    });
    const step = direction => {
      const now = Number(input.value);
      if (kind.type !== "integer" || input.value === "" || !Number.isFinite(now)) return;
      const next = path === "batch.seq" ? (direction > 0 ? now * 2 : Math.floor(now / 2)) : now + direction;
      input.value = Math.max(node.minimum ?? 0, next);
      input.dispatchEvent(new Event("change"));
    };
    input.addEventListener("keydown", event => {
      if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        event.preventDefault();
        step(event.key === "ArrowUp" ? 1 : -1);
      }
    });
    input.addEventListener("change", () => {
      const text = input.value.trim().replaceAll(",", "").replace(/_/g, "");
      const short = /^(\d+)k$/i.exec(text);
      const value = text === "" ? undefined : short ? Number(short[1]) * 1024 : Number(text);
      if (short) input.value = value;
      this.give(path, Number.isNaN(value) ? input.value : value);
    });
    return input;
  }

  select(path, values, shown, node, { id, about, label }) {
    const select = h("select", { id, "aria-describedby": about, "aria-label": label });
    for (const one of values) select.append(h("option", { value: JSON.stringify(one), selected: same(one, shown) }, one === false ? "no" : String(one)));
    select.addEventListener("change", () => this.give(path, JSON.parse(select.value), { redraw: "const" in (node ?? {}) || path === "objective.name" }));
    return select;
  }

  boxes(path, values, shown, { id }) {
    const group = h("div", { class: "boxes", role: "group", id, "aria-label": path });
    for (const one of values) {
      const box = h("input", { type: "checkbox", value: one });
      box.checked = shown.includes(one);
      box.addEventListener("change", () => this.give(path, [...group.querySelectorAll("input:checked")].map(each => each.value)));
      group.append(h("label", {}, box, one));
    }
    return group;
  }

  gpus(path, shown, { id, about }) {
    const select = h("select", { id, "aria-describedby": about });
    for (const vendor of new Set(this.page.gpus.map(one => one.vendor))) {
      const group = h("optgroup", { label: { nvidia: "NVIDIA", amd: "AMD" }[vendor] ?? vendor });
      for (const one of this.page.gpus.filter(each => each.vendor === vendor)) {
        const text = one.title.replace(/^(NVIDIA|AMD) /, "").replace("GeForce ", "");
        group.append(h("option", { value: one.name, selected: one.name === shown }, text));
      }
      select.append(group);
    }
    if (shown !== undefined && !this.page.gpus.some(one => one.name === shown)) select.append(h("option", { value: shown, selected: true }, shown));
    select.addEventListener("change", () => this.change(path, select.value, {}));
    return select;
  }

  // Fields of an object below each other.
  object(path, node, shown, options) {
    const group = h("div", { class: "object", role: "group", "aria-label": path });
    const value = shown ?? {};
    for (const [name, inner] of Object.entries(node.properties)) {
      if (NOT_SHOWN.has(`${path}.${name}`)) continue;
      const field = this.schema.resolved(inner);
      if ("const" in field) continue; // The choice of the kind says it.
      const at = `${path}.${name}`;
      const id = `${options.id}-${name}-${numIds++}`;
      const about = field.description ? h("p", { class: "about", id: `${id}-about` }, field.description) : null;
      const row = h("div", { class: "field", "data-path": at, "data-changed": options.recipe ? get(options.recipe, at) !== undefined : false },
        h("label", { for: id }, name.replaceAll("_", " ")),
        h("div", { class: "value" }, this.control(at, field, value[name], { id, about: about?.id, recipe: options.recipe })));
      if (about) row.append(about);
      row.append(h("p", { class: "problem", id: `${id}-problem`, hidden: true }));
      group.append(row);
    }
    return group;
  }

  give(path, value, options = {}) {
    const node = this.schema.at(path);
    this.change(path, value === undefined || (node && same(value, node.default) && !isRequired(this.schema, path)) ? undefined : value, options);
  }

  // The first value of a kind: what its schema gives as an example, else its required fields' first values.
  example(kind) {
    const { node } = kind;
    if (node.examples) return node.examples[0];
    if (kind.type === "object") return Object.fromEntries((node.required ?? []).map(name => [name, this.example(this.schema.kinds(node.properties[name])[0])]));
    if (kind.type === "enum") return kind.values[0];
    if (kind.type === "array") return [];
    if (kind.type === "integer") return Math.max(node.minimum ?? 1, 1);
    if (kind.type === "number") return 1;
    return kind.type === "boolean" ? true : "";
  }

  // A folded section for each field of the recipe that has fields of its own, and one for all others.
  sections(recipe) {
    const found = [], plain = [];
    for (const [name, inner] of Object.entries(this.schema.root.properties)) {
      const node = this.schema.resolved(inner);
      const hasFields = this.schema.kinds(node).some(kind => kind.type === "object");
      if (!hasFields) plain.push(this.row(name, recipe));
      else found.push(this.section(name, node, recipe));
    }
    return [section("step", "precision, kernels, compilation", plain), ...found];
  }

  section(name, node, recipe) {
    const kinds = this.schema.kinds(node);
    const isPlain = kinds.length === 1;
    const rows = isPlain ? [this.object(name, kinds[0].node, get(recipe, name), { id: `f-${name}`, recipe })] : [this.row(name, recipe)];
    return section(name.replaceAll("_", " "), node.description ?? "", rows, name);
  }
}

function section(title, about, rows, name = title) {
  return h("details", { class: "section", "data-section": name },
    h("summary", {}, h("span", {}, title), h("span", { class: "changed", "data-count": name })),
    about ? h("p", { class: "about" }, about) : null, rows);
}

function isRequired(schema, path) {
  const [name, parent] = [path.split(".").at(-1), path.split(".").slice(0, -1).join(".")];
  if (!parent) return false;
  const node = schema.at(parent);
  return node ? schema.kinds(node).some(kind => kind.node.required?.includes(name)) : false;
}
