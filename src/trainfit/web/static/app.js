// The page: one state, drawn anew after each change; answers are asked for as soon as a recipe changes.

import { announce, copy, h, replaced } from "./dom.js";
import { fitView } from "./fit.js";
import { Controls } from "./controls.js";
import { gpusView } from "./gpus.js";
import { oomView } from "./oom.js";
import { planView } from "./plan.js";
import { Schema } from "./schema.js";
import { Refused, source } from "./source.js";
import { MOST_RECIPES, address, fromAddress, same } from "./state.js";
import { ultrascaleView } from "./ultrascale.js";

const VIEWS = {
  fit: ["Fit", fitView], plan: ["Fastest", planView], gpus: ["GPUs", gpusView],
  ultrascale: ["Ultrascale", ultrascaleView], oom: ["Out of memory", oomView],
};
const PATIENCE_MS = 120; // Quick answers replace what is shown without a moment of waiting.

class App {
  constructor(from) {
    this.source = from;
    this.page = from.page;
    this.schema = new Schema(this.page.schema);
    this.entries = [];
    this.state = fromAddress(location.hash, Object.keys(VIEWS)) ?? this.opened();
    this.controls = new Controls(this, document.getElementById("controls"));
    this.answer = document.getElementById("answer");
    window.addEventListener("hashchange", () => this.followAddress());
    this.tabs();
    this.controls.draw();
    this.refresh();
  }

  opened() {
    return { view: "fit", selected: 0, tokens: "", recipes: [structuredClone(this.page.default)] };
  }

  get recipes() { return this.state.recipes; }
  get selected() { return this.state.selected; }
  get recipe() { return this.recipes[this.selected]; }
  entryOf(at) { return this.entries[at]; }
  answerOf(at) { return this.entries[at]?.answer; }

  // Changes of the state

  change(recipe) {
    this.recipes[this.selected] = recipe;
    this.saveAddress();
    this.refresh();
  }

  take(recipe) {
    this.state.view = "fit";
    this.change(recipe);
    this.tabs();
    this.controls.draw();
    this.answer.focus({ preventScroll: true });
    window.scrollTo({ top: 0 });
  }

  select(at) {
    this.state.selected = at;
    this.saveAddress();
    this.controls.draw();
    this.render();
  }

  add() {
    if (this.recipes.length >= MOST_RECIPES) return;
    this.recipes.push(structuredClone(this.recipe));
    this.state.selected = this.recipes.length - 1;
    this.saveAddress();
    this.refresh();
    this.controls.draw();
    this.render();
    announce("A recipe was added; the controls change it");
  }

  remove(at) {
    this.recipes.splice(at, 1);
    this.entries[at]?.stop();
    this.entries.splice(at, 1);
    this.state.selected = Math.min(this.selected, this.recipes.length - 1);
    this.saveAddress();
    this.controls.draw();
    this.refresh();
    this.render();
  }

  show(view) {
    this.state.view = view;
    if (view !== "gpus") {
      this.gpus?.controller.abort();
      this.gpus = null;
    }
    this.saveAddress();
    this.tabs();
    this.render();
  }

  saveAddress() {
    const now = address(this.state);
    if (now !== location.hash) history.replaceState(null, "", now);
  }

  followAddress() {
    const found = fromAddress(location.hash, Object.keys(VIEWS));
    if (!found || same(found, this.state)) return;
    this.state = found;
    this.tabs();
    this.controls.draw();
    this.refresh();
  }

  // Questions

  // Ask for the answer of each recipe that has none.
  refresh() {
    const isNew = this.recipes.some((recipe, at) => !this.entries[at] || !same(this.entries[at].recipe, recipe));
    if (isNew) for (const entry of this.entries) entry.postpone("advice");
    for (const [at, recipe] of this.recipes.entries()) {
      const before = this.entries[at];
      if (before && same(before.recipe, recipe)) continue;
      before?.stop();
      this.entries[at] = new Entry(this, recipe, before?.answer);
    }
    for (const entry of this.entries.splice(this.recipes.length)) entry.stop();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.render(), PATIENCE_MS);
  }

  // A question with its progress and later its value or error, drawn when one of these changes.
  // With `known`, an answer that the page has already.
  asked(name, content, known) {
    if (known) return { value: known.error ? null : known, error: known.error ? new Refused(known.error) : null, progress: null, controller: new AbortController() };
    const run = { value: null, error: null, progress: progress(), controller: new AbortController() };
    const { signal } = run.controller;
    this.source.ask(name, content, { signal, progress: found => run.progress?.show(found) }).then(
      value => { run.value = value; },
      error => { run.error = error; },
    ).finally(() => {
      run.progress = null;
      if (run.error?.name === "AbortError") return;
      if (run.error && !(run.error instanceof Refused)) run.error = new Refused({ text: "the server does not answer" });
      clearTimeout(this.timer);
      this.render();
    });
    return run;
  }

  // What a view needs of a recipe beyond its answer: asked for when it is first drawn.
  extra(entry, name) {
    if (entry.run.progress) return { progress: entry.run.progress };
    entry.extras[name] ??= this.asked(name, { recipe: entry.recipe });
    return entry.extras[name];
  }

  // Drawing

  render() {
    clearTimeout(this.timer);
    const focused = focusOf(this.answer);
    replaced(this.answer, VIEWS[this.state.view][1](this).flat(3).filter(Boolean));
    this.answer.dataset.view = this.state.view;
    refocus(this.answer, focused);
    const { run, answer } = this.entries[this.selected];
    this.controls.showProblem(run.error);
    this.answer.setAttribute("aria-busy", String(Boolean(run.progress)));
    if (run.error) announce(`Refused: ${run.error.message}`);
    else if (answer && !run.progress && this.state.view === "fit") announce(answer.verdict);
    document.title = answer && !run.progress && !run.error ? `${answer.estimate.fits ? "Fits" : "Does not fit"}: ${answer.subject.split(",")[0]} · trainfit` : "trainfit";
  }

  tabs() {
    const list = document.getElementById("tabs");
    const names = Object.keys(VIEWS);
    const focused = list.contains(document.activeElement);
    list.replaceChildren(...names.map(name => h("button", {
      type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "answer", "aria-selected": String(name === this.state.view),
      tabindex: name === this.state.view ? "0" : "-1", onclick: () => this.show(name),
      onkeydown: event => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        this.show(names[(names.indexOf(name) + step + names.length) % names.length]);
      },
    }, VIEWS[name][0])));
    if (focused) document.getElementById(`tab-${this.state.view}`).focus();
  }

  compareButton() {
    if (this.recipes.length >= MOST_RECIPES) return null;
    return h("p", { class: "compare-line" }, h("button", { type: "button", id: "compare", onclick: () => this.add() }, "Compare with another"));
  }
}

// A recipe with its answer; until that is there, the one before it is shown.
class Entry {
  constructor(app, recipe, before) {
    this.recipe = recipe;
    this.before = before;
    this.extras = {};
    this.run = app.asked("predict", { recipe });
  }

  get answer() { return this.run.value ?? (this.run.error ? undefined : this.before); }
  get error() { return this.run.error; }
  get progress() { return this.run.progress; }

  // End a long search that a new recipe would have to wait for; it is asked again when it is drawn.
  postpone(name) {
    if (!this.extras[name]?.progress) return;
    this.extras[name].controller.abort();
    delete this.extras[name];
  }

  stop() {
    this.run.controller.abort();
    for (const each of Object.values(this.extras)) each.controller.abort();
  }
}

// Progress that is shown in every place where it was drawn, without drawing anything else anew.
function progress() {
  return {
    text: "", seconds: 0, places: [],
    show(found) {
      Object.assign(this, found);
      for (const place of this.places) place.textContent = this.words;
    },
    get words() { return this.text ? `${this.text}, ${this.seconds.toFixed(0)} s` : "asking"; },
  };
}

function focusOf(root) {
  const element = document.activeElement;
  if (!root.contains(element) || element === root) return null;
  return { element, id: element.id, label: element.getAttribute("aria-label"), text: element.textContent, tag: element.tagName, at: element.selectionStart };
}

function refocus(root, focused) {
  if (!focused || document.activeElement === focused.element) return; // What is typed or marked stays.
  const found = (focused.id && document.getElementById(focused.id))
    || [...root.querySelectorAll(focused.tag)].find(one => (focused.label ? one.getAttribute("aria-label") === focused.label : one.textContent === focused.text));
  if (!found) {
    root.focus({ preventScroll: true });
    return;
  }
  found.focus({ preventScroll: true });
  if (focused.at !== null && focused.at !== undefined && "setSelectionRange" in found) found.setSelectionRange(focused.at, focused.at);
}

function theme() {
  const select = document.getElementById("theme");
  const use = value => {
    if (value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = value;
  };
  let kept = "auto";
  try { kept = localStorage.getItem("theme") ?? "auto"; } catch { /* The browser keeps nothing. */ }
  select.value = ["light", "dark"].includes(kept) ? kept : "auto";
  use(select.value);
  select.addEventListener("change", () => {
    use(select.value);
    try { localStorage.setItem("theme", select.value); } catch { /* As above. */ }
  });
}

theme();
const share = document.getElementById("share");
try {
  const app = new App(await source());
  share.addEventListener("click", async () => {
    app.saveAddress();
    history.replaceState(null, "", address(app.state));
    const done = await copy(location.href);
    share.textContent = done ? "Copied" : "Not copied";
    announce(done ? "The address of these recipes is copied" : "The browser does not allow copying");
    setTimeout(() => { share.textContent = "Copy address"; }, 1500);
  });
} catch (error) {
  document.getElementById("answer").replaceChildren(h("p", { class: "why bad" }, `The page could not start: ${error.message}`));
}
