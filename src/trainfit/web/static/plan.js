// The fastest recipe that fits: a search, its frontier of memory against speed, and what was not chosen.

import { frontier } from "./charts.js";
import { h, table, unseen } from "./dom.js";
import { status } from "./fit.js";
import { bytes, dollars, gib, percent, whole } from "./format.js";
import { flat, get, modelName, set } from "./state.js";

const QUESTION = ["model.config", "model.name", "hardware.gpu", "hardware.count", "hardware.nodes", "hardware.price_per_hour", "batch.seq", "seed"];
const USUALLY_OPEN = ["batch.micro", "batch.accumulate", "recompute", "compile", "attention", "loss", "block_kernels", "optimizer.name", "optimizer.implementation"];

export function planView(app) {
  if (!app.source.isLive) return [h("h2", {}, "Fastest"), h("p", { class: "note" }, "A search needs trainfit serve, or the command: trainfit plan.")];
  const options = (app.plan ??= { tune: "", keep: false, memory: "", held: {}, run: null });
  if (options.recipe !== app.recipe) Object.assign(options, { recipe: app.recipe, form: inputs(app, options) });
  options.form.querySelector("button").textContent = options.run?.progress ? "Stop" : "Find the fastest";
  return [options.form, found(app, options)];
}

// The heading and the goal; they stay as they are until the recipe changes.
function inputs(app, options) {
  const { recipe } = app;
  const held = Object.keys(flat(recipe)).filter(name => !QUESTION.includes(name) && name !== "model.weights");
  const boxes = held.map(name => {
    const box = h("input", { type: "checkbox", id: `keep-${name}`, onchange: () => { options.held[name] = box.checked; } });
    box.checked = options.held[name] ?? !USUALLY_OPEN.includes(name);
    return h("label", { for: `keep-${name}` }, box, h("code", {}, `${name}: ${JSON.stringify(get(recipe, name)).replaceAll('"', "")}`));
  });
  const tune = h("select", { id: "tune", onchange: () => { options.tune = tune.value; } },
    [["", "as the recipe says"], ["full", "all weights"], ["lora", "LoRA"], ["qlora", "QLoRA"]].map(([value, text]) => h("option", { value, selected: value === options.tune }, text)));
  const keep = h("input", { type: "checkbox", id: "keep-quality", onchange: () => { options.keep = keep.checked; } });
  keep.checked = options.keep;
  const memory = h("input", { type: "text", id: "memory", inputmode: "decimal", placeholder: "all", value: options.memory, onchange: () => { options.memory = memory.value.trim(); } });
  const start = h("button", { type: "submit", class: "primary" });
  const form = h("form", { class: "search", onsubmit: event => { event.preventDefault(); search(app, options, held); } },
    h("p", { class: "note" }, `For ${modelName(recipe)}, ${get(recipe, "batch.seq") ?? 1024} tokens, ${get(recipe, "hardware.count") ?? 1} × ${get(recipe, "hardware.gpu") ?? "h200"}. Every field that is not kept may vary.`),
    h("div", { class: "inputs" }, h("div", {}, h("label", { for: "tune" }, "Train"), tune), h("div", {}, h("label", { for: "memory" }, "GiB of each GPU"), memory),
      h("label", { for: "keep-quality", class: "check" }, keep, "Nothing that changes the numerics")),
    boxes.length ? h("fieldset", {}, h("legend", {}, "Keep"), boxes) : null, start);
  return h("section", {}, h("h2", {}, "The fastest recipe that fits"), form);
}

async function search(app, options, held) {
  if (options.run?.progress) {
    options.run.controller.abort();
    options.run = null;
    app.render();
    return;
  }
  const kept = held.filter(name => options.held[name] ?? !USUALLY_OPEN.includes(name));
  let recipe = {};
  for (const name of [...QUESTION, ...kept]) {
    const value = get(app.recipe, name);
    if (value !== undefined) recipe = set(recipe, name, value);
  }
  const content = { recipe, fixed: kept.filter(name => !name.startsWith("model.")), keep_quality: options.keep };
  if (options.tune) content.tune = options.tune;
  if (options.memory) content.memory_gib = Number(options.memory);
  options.run = app.asked("plan", content);
  app.render();
}

function found(app, { run }) {
  if (!run) return null;
  if (run.error) return h("p", { class: "why bad" }, run.error.message);
  if (!run.value) return status(run.progress);
  const { value } = run;
  const best = value.found[0];
  const points = value.frontier.filter(one => one.tokens_per_s).map(one => ({
    x: one.device_bytes, y: one.tokens_per_s, text: one.differs.join(", ") || "the best", one,
    kind: one.device_bytes > value.usable_bytes ? "over" : one.numerics.length ? "changed" : "same", isBest: best !== undefined && one.device_bytes === best.device_bytes && one.tokens_per_s === best.tokens_per_s,
  })).filter(one => one.x < 1.6 * value.limit_bytes);
  const answer = best
    ? h("div", { class: "head" }, h("p", { class: "verdict good" }, `${whole(best.tokens_per_s)} tokens/s`), h("p", { class: "why" }, `${bytes(best.device_bytes)} of ${bytes(value.limit_bytes)}, ${percent(best.mfu)} MFU, ${dollars(best.dollars_per_million)} a million tokens: ${best.changes.join(", ") || "the given recipe"}`),
      h("button", { type: "button", class: "primary", onclick: () => app.take(best.recipe) }, "Take it"))
    : h("div", { class: "head" }, h("p", { class: "verdict bad" }, "Nothing fits"), h("p", { class: "why" }, value.least ? `The least found takes ${bytes(value.least.device_bytes)}: ${value.least.changes.join(", ")}` : ""));
  return h("div", {}, answer,
    points.length > 1 ? [h("h2", {}, "Memory against speed"), frontier(points, { limit: value.limit_bytes, device: "the card", choose: at => app.take(points[at].one.recipe) }),
      h("ul", { class: "legend" }, [["same", "numerics unchanged"], ["changed", "numerics changed"], ["over", "over the limit"]].map(([kind, text]) => h("li", {}, h("i", { class: `dot-key ${kind}`, "aria-hidden": "true" }), text)))] : null,
    value.frontier.length ? table("Frontier", [["differs from the best by", ""], ["GiB", "number"], ["tokens/s", "number"], ["MFU", "number"], [unseen("take it"), "number"]], value.frontier.map(one => [
      h("span", {}, one.differs.join(", ") || "the best", one.numerics.length ? h("span", { class: "note" }, ` ${one.numerics.join(", ")}`) : null), h("span", { class: one.device_bytes > value.usable_bytes ? "bad" : "" }, gib(one.device_bytes)), whole(one.tokens_per_s), percent(one.mfu),
      h("button", { type: "button", onclick: () => app.take(one.recipe), "aria-label": `Take the recipe of ${gib(one.device_bytes)} GiB` }, "Take")])) : null,
    value.rejected.length ? h("details", {}, h("summary", {}, "Not chosen"), h("dl", { class: "about-list" }, value.rejected.flatMap(one => [h("dt", {}, one.choice), h("dd", {}, one.reason)]))) : null,
    h("p", { class: "note" }, `${value.num_ranked.toLocaleString("en-US")} combinations ranked, ${value.num_traced} traced. ${value.assumed}`));
}
