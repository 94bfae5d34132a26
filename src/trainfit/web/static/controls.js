// The recipe's panel: model, what is trained, the main fields, and below them every field of the recipe.

import { h } from "./dom.js";
import { Fields } from "./form.js";
import { Refused } from "./source.js";
import { flat, get, modelName, set } from "./state.js";

const LABELS = {
  "hardware.gpu": "GPU", "hardware.count": "GPUs", "batch.micro": "Batch", "batch.seq": "Sequence",
  "batch.accumulate": "Accumulate", precision: "Precision", recompute: "Recompute", "optimizer.name": "Optimizer",
};
const NARROW = ["hardware.count", "batch.micro", "batch.seq", "batch.accumulate"];
const LETTERS = "ABCD";

export class Controls {
  constructor(app, form) {
    this.app = app;
    this.form = form;
    this.opened = new Set();
    this.filter = "";
    this.fields = new Fields(app.schema, app.page, (path, value, options = {}) => this.give(path, value, options));
    form.addEventListener("submit", event => event.preventDefault());
  }

  give(path, value, { redraw = false } = {}) {
    this.app.change(set(this.app.recipe, path, value));
    if (redraw) this.draw();
    else this.mark(path);
  }

  // Show in other controls of the same field what was given in one of them; nothing else is drawn anew, so that
  // the control that is clicked next is still there.
  mark(path) {
    const { recipe } = this.app;
    const value = get(recipe, path);
    for (const row of this.form.querySelectorAll(`[data-path="${CSS.escape(path)}"]`)) {
      row.dataset.changed = String(value !== undefined);
      const place = row.querySelector(":scope > .value");
      if (row.contains(document.activeElement) || row.classList.contains("model") || !place) continue;
      const id = row.querySelector(":scope > label").htmlFor;
      const about = row.querySelector(":scope > .about")?.id;
      place.replaceChildren(this.fields.control(path, this.fields.schema.at(path), value, { id, about, recipe }));
    }
    this.count();
  }

  // How many fields of each section are set.
  count() {
    for (const place of this.form.querySelectorAll("[data-count]")) {
      const name = place.dataset.count;
      const section = name === "every" ? this.app.recipe : { [name]: this.app.recipe[name] };
      const number = Object.keys(flat(section)).filter(path => path !== "model.config" && path !== "model.name" && get(this.app.recipe, path) !== undefined).length;
      place.textContent = number ? `${number} set` : "";
    }
  }

  draw() {
    const { form } = this;
    const focused = document.activeElement;
    const at = form.contains(focused) ? [...form.querySelectorAll("input, select, button, summary")].indexOf(focused) : -1;
    const path = focused?.closest?.("[data-path]")?.dataset.path;
    const isMain = focused?.closest?.(".main-fields") !== null;
    for (const one of form.querySelectorAll("details")) (one.open ? this.opened.add(one.dataset.section) : this.opened.delete(one.dataset.section));
    form.replaceChildren(...(this.app.source.isLive ? this.live() : this.chosen()).filter(Boolean));
    for (const one of form.querySelectorAll("details")) one.open = this.opened.has(one.dataset.section);
    this.search();
    this.count();
    if (at < 0) return;
    const rows = path ? [...form.querySelectorAll(`[data-path="${CSS.escape(path)}"]`)] : [];
    const row = rows.find(one => (one.closest(".main-fields") !== null) === isMain) ?? rows[0];
    (row?.querySelector("input, select") ?? form.querySelectorAll("input, select, button, summary")[at])?.focus({ preventScroll: true });
  }

  slots() {
    const { app } = this;
    if (app.recipes.length < 2) return null;
    return h("div", { class: "slots", role: "group", "aria-label": "Recipe to edit" }, app.recipes.map((_, at) => h("button", {
      type: "button", "aria-pressed": String(at === app.selected), "aria-label": `Recipe ${LETTERS[at]}`, onclick: () => app.select(at),
    }, LETTERS[at])));
  }

  live() {
    const { app } = this;
    const rows = app.page.main_fields.map(path => {
      const row = this.fields.row(path, app.recipe, { label: LABELS[path], isMain: true });
      if (NARROW.includes(path)) row.classList.add("narrow");
      if (path === "hardware.gpu") row.classList.add("half");
      return row;
    });
    const filter = h("input", { type: "search", id: "filter", placeholder: "Find a field", value: this.filter, "aria-label": "Find a field", oninput: () => { this.filter = filter.value; this.search(); } });
    return [this.slots(), this.model(), h("div", { class: "main-fields" }, this.trained(), rows),
      h("details", { class: "every", "data-section": "every" }, h("summary", {}, h("span", {}, "All fields"), h("span", { class: "changed", "data-count": "every" })), filter, this.fields.sections(app.recipe),
        h("div", { class: "row" }, h("button", { type: "button", onclick: () => this.reset() }, "Reset all")))];
  }

  reset() {
    this.app.change(structuredClone(this.app.page.default));
    this.draw();
  }

  model() {
    const { app } = this;
    const list = h("datalist", { id: "models" }, app.page.models.flatMap(one => [h("option", { value: one.name }, one.published ? `${one.published} parameters` : ""), ...one.hub.map(name => h("option", { value: name }, one.name))]));
    const isNamed = typeof get(app.recipe, "model.config") === "string";
    const input = h("input", { type: "text", id: "model", list: "models", spellcheck: "false", value: modelName(app.recipe), placeholder: "name or Hub id", "aria-describedby": "model-problem" });
    input.addEventListener("change", () => {
      const name = input.value.trim();
      if (name && name !== modelName(app.recipe)) app.change(set(set(app.recipe, "model.name", undefined), "model.config", name));
    });
    input.addEventListener("focus", () => input.select());
    return h("div", { class: "field model", "data-path": "model.config" }, h("label", { for: "model" }, "Model"),
      h("button", { type: "button", id: "paste", onclick: () => this.paste() }, "Paste or load…"), h("div", { class: "value" }, input, list),
      isNamed ? null : h("p", { class: "about" }, "from a pasted config.json"), h("p", { class: "problem", id: "model-problem", hidden: true }));
  }

  trained() {
    const { app } = this;
    const adapter = get(app.recipe, "adapter"), quantize = get(app.recipe, "quantize");
    const now = !adapter ? "full" : quantize ? "qlora" : adapter.kind === "lora" ? "lora" : "other";
    const select = h("select", { id: "trained" }, [["full", "all weights"], ["lora", "LoRA"], ["qlora", "QLoRA (nf4)"], ...(now === "other" ? [["other", adapter.kind]] : [])].map(([value, text]) => h("option", { value, selected: value === now }, text)));
    select.addEventListener("change", () => {
      const kept = adapter ?? { kind: "lora" };
      let recipe = set(app.recipe, "adapter", select.value === "full" ? undefined : kept);
      recipe = set(recipe, "quantize", select.value === "qlora" ? quantize ?? "nf4" : undefined);
      app.change(recipe);
      this.draw();
    });
    return h("div", { class: "field half" }, h("label", { for: "trained" }, "Train"), h("div", { class: "value" }, select));
  }

  // Show only rows that have the words of the filter.
  search() {
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const every = this.form.querySelector(".every");
    if (!every) return;
    for (const row of every.querySelectorAll(".field")) {
      const text = `${row.dataset.path} ${row.textContent}`.toLowerCase();
      row.hidden = words.length > 0 && !words.every(word => text.includes(word));
    }
    for (const one of every.querySelectorAll("details")) {
      const rows = [...one.querySelectorAll(".field")];
      one.hidden = words.length > 0 && rows.every(row => row.hidden);
      if (words.length) one.open = !one.hidden;
    }
  }

  showProblem(error) {
    for (const one of this.form.querySelectorAll(".problem")) one.hidden = true;
    for (const one of this.form.querySelectorAll("[aria-invalid]")) {
      one.removeAttribute("aria-invalid");
    }
    if (!error?.field) return;
    const rows = [...this.form.querySelectorAll("[data-path]")].filter(row => row.dataset.path === error.field || error.field.startsWith(`${row.dataset.path}.`));
    for (const row of rows) {
      const place = row.querySelector(":scope > .problem");
      if (!place) continue;
      place.textContent = `${error.problem}; ${error.remedy}`;
      place.hidden = false;
      row.querySelector("input, select")?.setAttribute("aria-invalid", "true");
    }
  }

  paste() {
    const { app } = this;
    const dialog = document.getElementById("dialog");
    const area = h("textarea", { id: "pasted", rows: "14", spellcheck: "false", placeholder: "A model's config.json, or a recipe in YAML or JSON" });
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const shipped = h("select", { id: "shipped" }, h("option", { value: "" }, "choose"), Object.keys(app.page.recipes).map(name => h("option", { value: name }, name)));
    shipped.addEventListener("change", () => {
      if (shipped.value) use(JSON.stringify(app.page.recipes[shipped.value]));
    });
    const use = async text => {
      try {
        const { recipe } = await app.source.ask("paste", { text }); // Which writes short forms out.
        const isConfig = Object.keys(recipe).length === 1;
        dialog.close();
        app.take(isConfig ? { ...app.recipe, model: recipe.model } : recipe);
      } catch (error) {
        problem.textContent = error instanceof Refused ? error.message : "The server does not answer.";
        problem.hidden = false;
      }
    };
    dialog.replaceChildren(h("form", { method: "dialog", onsubmit: event => { event.preventDefault(); use(area.value); } },
      h("h2", { id: "dialog-title" }, "Paste a model or a recipe"), h("label", { for: "pasted" }, "config.json, or a recipe"), area, problem,
      h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Use it"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
        h("label", { for: "shipped", class: "push" }, "or a shipped recipe"), shipped)));
    dialog.showModal();
    area.focus();
  }

  // Of a static page: a choice for each of its axes.
  chosen() {
    const { app } = this;
    const now = app.source.choices(app.recipe) ?? app.page.axes.map(() => 0);
    return [this.slots(), h("div", { class: "main-fields" }, app.page.axes.map((axis, number) => {
      const id = `axis-${number}`;
      const select = h("select", { id }, axis.values.map((one, at) => h("option", { value: String(at), selected: at === now[number] }, one.label)));
      select.addEventListener("change", () => {
        const places = now.map((at, other) => (other === number ? Number(select.value) : at));
        app.change(app.source.recipeOf(places));
        this.draw();
      });
      return h("div", { class: "field", "data-path": axis.fields[0] }, h("label", { for: id }, axis.label), h("div", { class: "value" }, select));
    })), h("p", { class: "about" }, "Computed beforehand, for these choices. Any other model or field, searches and error texts need trainfit serve (pip install 'trainfit[web]').")];
  }
}
