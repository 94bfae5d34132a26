// The text of an OutOfMemoryError, explained.

import { keyed } from "./charts.js";
import { h } from "./dom.js";
import { status } from "./fit.js";
import { bytes } from "./format.js";

export function oomView(app) {
  if (!app.source.isLive) return [h("h2", {}, "Out of memory"), h("p", { class: "note" }, "Reading an error's text needs trainfit serve, or the command: trainfit explain error.txt.")];
  const one = (app.oom ??= { text: "", run: null });
  one.form ??= input(app, one);
  return [one.form, found(one.run)];
}

function input(app, one) {
  const area = h("textarea", { id: "oom-text", rows: "7", spellcheck: "false", value: one.text, placeholder: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …", oninput: () => { one.text = area.value; } });
  const explain = () => {
    one.run?.controller.abort();
    one.run = app.asked("oom", { text: one.text.slice(-200_000) });
    app.render();
  };
  const form = h("form", { onsubmit: event => { event.preventDefault(); explain(); } }, h("label", { for: "oom-text" }, "The error, or a log that ends in it"), area,
    h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Explain"), h("button", { type: "button", onclick: () => { one.text = area.value = app.page.oom_example; explain(); } }, "Show an example")));
  return h("section", {}, h("h2", {}, "Out of memory"), form);
}

function found(run) {
  if (!run) return null;
  if (run.error) return h("p", { class: "why bad" }, run.error.message);
  if (!run.value) return status(run.progress);
  const { message, sizes, advice } = run.value;
  const list = h("dl", { class: "budget two" }, sizes.flatMap(one => [h("dt", {}, one.title), h("dd", {}, bytes(one.bytes))]));
  return h("div", {}, message.capacity ? bar(message) : null, list, h("h2", {}, "What it means"), h("ul", { class: "notes" }, advice.map(text => h("li", {}, text))));
}

function bar(message) {
  const cached = Math.max(0, (message.reserved ?? 0) - (message.allocated ?? 0));
  const others = message.others ?? 0;
  const free = message.free ?? 0;
  const known = (message.allocated ?? 0) + cached + others + free;
  const parts = [["allocated by PyTorch", "#2f6fb2", message.allocated ?? 0], ["reserved and unused", "#b9c2cc", cached], ["another process", "#8b6bb1", others], ["CUDA context and others", "#7d8792", Math.max(0, message.capacity - known)], ["free", "transparent", free]].filter(([, , size]) => size > 0);
  const whole = parts.reduce((sum, [, , size]) => sum + size, 0);
  const filled = h("div", { class: "filled", width_percent: 100 }, parts.map(([name, color, size]) => {
    const part = h("div", { class: "part", width_percent: (size / whole) * 100, title: `${name} ${bytes(size)}` });
    part.style.background = color;
    return part;
  }));
  return h("div", {}, h("div", { class: "bar", role: "img", "aria-label": parts.map(([name, , size]) => `${name} ${bytes(size)}`).join(", ") }, filled),
    h("ul", { class: "legend" }, parts.filter(([, color]) => color !== "transparent").map(([name, color]) => h("li", {}, keyed(color, name)))));
}
