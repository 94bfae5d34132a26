// The Ultrascale Playbook's calculator with its own numbers, beside a traced step, and why they differ.

import { h, table } from "./dom.js";
import { status } from "./fit.js";
import { bytes, count, percent } from "./format.js";

const SLIDERS = { a: "heads", b: "micro-batch", h: "hidden size", h_ff: "feed-forward size", layers: "layers (L)", s: "tokens of a sequence", v: "vocabulary", k: "optimizer bytes a parameter", t: "tensor-parallel ranks", d: "data-parallel ranks" };
const CHOICES = { zero: "ZeRO stage", recomputation: "recomputation", ff_activation: "activation" };
const SWITCHES = { mixed: "mixed precision", sequence_parallel: "sequence parallel" };

export function ultrascaleView(app) {
  const one = (app.widget ??= { preset: "Llama 3 8B", inputs: {}, run: null });
  if (!one.run) {
    one.run = app.asked("widget", { preset: one.preset || undefined, inputs: one.inputs, gpu: app.recipe.hardware?.gpu ?? "h200" });
    one.compared = null;
  }
  one.form ??= inputs(app, one);
  return [one.form, result(app, one)];
}

// The heading and the inputs; they stay as they are until another preset is chosen.
function inputs(app, one) {
  const { widget } = app.page;
  const start = one.preset ? widget.presets[one.preset] : widget.opened;
  const now = { ...start, ...one.inputs };
  const ask = changes => {
    one.run?.controller.abort();
    for (const each of one.compared ?? []) each.run.controller.abort();
    Object.assign(one, { run: null }, changes);
    app.render();
  };
  const change = (name, value) => ask({ inputs: value === start[name] ? without(one.inputs, name) : { ...one.inputs, [name]: value } });
  const preset = h("select", { id: "u-preset", onchange: () => ask({ preset: preset.value, inputs: {}, form: null }) },
    h("option", { value: "", selected: !one.preset }, "as the page opens"), Object.keys(widget.presets).map(name => h("option", { value: name, selected: name === one.preset }, name)));
  const field = (name, text, control) => h("div", {}, h("label", { for: `u-${name}` }, text), control);
  const numbers = Object.entries(SLIDERS).map(([name, text]) => {
    const input = h("input", { type: "text", inputmode: "numeric", id: `u-${name}`, value: now[name], onchange: () => change(name, Number(input.value)) });
    return field(name, text, input);
  });
  const choices = Object.entries(CHOICES).map(([name, text]) => {
    const select = h("select", { id: `u-${name}`, onchange: () => change(name, JSON.parse(select.value)) }, widget.schema.properties[name].enum.map(value => h("option", { value: JSON.stringify(value), selected: value === now[name] }, String(value))));
    return field(name, text, select);
  });
  const switches = Object.entries(SWITCHES).map(([name, text]) => {
    const box = h("input", { type: "checkbox", id: `u-${name}`, onchange: () => change(name, box.checked) });
    box.checked = now[name];
    return h("label", { class: "check", for: `u-${name}` }, box, text);
  });
  return h("section", {}, h("h2", {}, "The Ultrascale Playbook's calculator"),
    h("p", { class: "note" }, "Its inputs and its numbers, unchanged, beside the peak of a traced step. The page writes GB for GiB."),
    h("form", { class: "widget", onsubmit: event => event.preventDefault() }, h("div", { class: "inputs" }, field("preset", "Preset", preset), numbers, choices), h("div", { class: "inputs" }, switches)));
}

const without = (data, name) => Object.fromEntries(Object.entries(data).filter(([key]) => key !== name));

function result(app, one) {
  const { value, error, progress } = one.run;
  if (error) return h("p", { class: "why bad" }, error.message);
  if (!value) return status(progress);
  one.compared ??= value.recipes.map(each => ({ ...each, run: app.asked("predict", { recipe: each.recipe }, each.answer) }));
  const own = Object.fromEntries(value.numbers.map(each => [each.name, each.bytes]));
  const lines = [["activations", "activations"], ["parameters", "weights"], ["gradients", "gradients"], ["optimizer", "optimizer"], [null, "temporary"], [null, "communication"], [null, "workspace"]];
  const columns = [["bytes", ""], ["the calculator", "number"], ...one.compared.map(each => [`traced: ${each.label}`, "number"])];
  const traced = (each, of) => {
    if (each.run.error) return "–";
    return each.run.value ? of(each.run.value) : "…";
  };
  const rows = lines.map(([theirs, ours]) => [theirs ?? ours, theirs ? bytes(own[theirs]) : "not counted", ...one.compared.map(each => traced(each, found => bytes(found.estimate.breakdown[ours])))]);
  rows.push(["fragmentation and CUDA context", "not counted", ...one.compared.map(each => traced(each, found => bytes(found.estimate.peak_device_bytes - found.estimate.peak_allocated_bytes)))]);
  rows.push({ attributes: { class: "sum" }, cells: ["total", bytes(own.total), ...one.compared.map(each => traced(each, found => bytes(found.estimate.peak_device_bytes)))] });
  rows.push(["the calculator, against it", "", ...one.compared.map(each => traced(each, found => signed(own.total / found.estimate.peak_device_bytes - 1)))]);
  rows.push(["parameters counted", count(value.parameters), ...one.compared.map(each => traced(each, found => count(found.estimate.params)))]);
  return h("div", {}, table("The calculator and traced steps", columns, rows, { class: "numbers" }),
    one.compared.map(each => (each.run.error ? h("p", { class: "note" }, `${each.label}: ${each.run.error.message}`) : each.run.value ? null : h("div", {}, h("p", { class: "note" }, each.label), status(each.run.progress)))),
    h("h2", {}, "Why they differ"), h("ul", { class: "notes" }, value.reasons.map(text => h("li", {}, text))),
    h("div", { class: "row" }, one.compared.map(each => h("button", { type: "button", onclick: () => app.take(each.recipe), "aria-label": `Open the recipe of ${each.label}` }, `Open ${each.label}`))));
}

const signed = share => `${share >= 0 ? "+" : "−"}${percent(Math.abs(share))}`;
