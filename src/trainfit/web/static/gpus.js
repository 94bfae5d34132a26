// The recipe on every kind of GPU: does it fit, and what do tokens cost.

import { h, table, unseen } from "./dom.js";
import { dollars, gib, percent, readCount, whole } from "./format.js";
import { get, modelName, set } from "./state.js";

export function gpusView(app) {
  const key = JSON.stringify([app.recipe, "gpus"]);
  if (app.gpus?.key !== key) {
    app.gpus?.controller.abort();
    app.gpus = { key, rows: {}, controller: new AbortController(), isDone: false, errors: {} };
    ask(app, app.gpus);
  }
  const { rows, errors, isDone } = app.gpus;
  const tokens = readCount(app.state.tokens || "1M");
  const known = app.page.gpus.filter(one => rows[one.name] || errors[one.name]);
  const money = name => (rows[name]?.estimate.cost?.per_million_tokens ?? Infinity) * (tokens / 1e6);
  const ordered = [...known].sort((one, other) => (Boolean(rows[other.name]?.estimate.fits) - Boolean(rows[one.name]?.estimate.fits)) || (money(one.name) - money(other.name)) || ((rows[other.name]?.estimate.tokens_per_s ?? 0) - (rows[one.name]?.estimate.tokens_per_s ?? 0)));
  const dearest = Math.max(1e-12, ...ordered.filter(one => rows[one.name]?.estimate.fits).map(one => money(one.name)).filter(Number.isFinite));
  const price = app.state.tokens ? `$ / ${app.state.tokens} tokens` : "$ / M tokens";
  const columns = [["GPU", ""], ["verdict", ""], [price, "number"], [unseen("cost as a bar"), "wide"], ["GiB", "number"], ["tokens/s", "number"], ["MFU", "number"], ["$/h", "number"], [unseen("take it"), "number"]];
  const body = ordered.map(one => {
    const answer = rows[one.name];
    if (!answer) return { cells: [one.title, h("span", { class: "note" }, errors[one.name]), "", "", "", "", "", "", ""], attributes: {} };
    const { estimate } = answer;
    const cost = estimate.cost ? (tokens / 1e6) * estimate.cost.per_million_tokens : null;
    const bar = h("div", { class: "cost-bar", "aria-hidden": "true" });
    if (estimate.fits && cost) bar.append(h("i", { width_percent: (cost / dearest) * 100 }));
    const take = h("button", { type: "button", "aria-label": `Take ${one.title}`, onclick: () => app.take(set(app.recipe, "hardware.gpu", one.name)) }, "Take");
    return {
      attributes: { "data-fits": String(estimate.fits) },
      cells: [h("span", { title: one.basis === "measured" ? "steps were measured on it" : "modelled: no step was measured on it" }, one.title.replace(/^(NVIDIA|AMD) /, ""), one.basis === "measured" ? h("span", { class: "note" }, " measured") : null),
        h("span", { class: estimate.fits ? "good" : "bad" }, estimate.fits ? "fits" : "does not fit"), estimate.fits ? dollars(cost) : cost ? `(${dollars(cost)})` : "–", bar,
        `${gib(answer.highest.device)} of ${gib(estimate.device_bytes)}`, whole(estimate.tokens_per_s), percent(estimate.mfu), dollars(estimate.cost?.per_hour), take],
    };
  });
  const left = app.page.gpus.length - known.length;
  const state = isDone ? `${known.length} kinds of GPU, the cheapest first; in brackets if it fitted.` : `${known.length} of ${app.page.gpus.length} kinds of GPU`;
  return [h("h2", {}, `${modelName(app.recipe)} on ${get(app.recipe, "hardware.count") ?? 1} GPU${(get(app.recipe, "hardware.count") ?? 1) > 1 ? "s" : ""} of each kind`),
    h("p", { class: "status", role: "status" }, !isDone && left ? h("span", { class: "spinner", "aria-hidden": "true" }) : null, state),
    body.length ? table("Cost by GPU", columns, body, { class: "gpus" }) : null];
}

async function ask(app, run) {
  const own = get(app.recipe, "hardware.gpu");
  const every = [...app.page.gpus].sort((one, other) => (other.name === own) - (one.name === own) || (other.price_per_hour !== null) - (one.price_per_hour !== null));
  for (const one of every) {
    if (run.controller.signal.aborted) return;
    try {
      run.rows[one.name] = await app.source.ask("predict", { recipe: set(app.recipe, "hardware.gpu", one.name) }, { signal: run.controller.signal });
    } catch (error) {
      if (error.name === "AbortError") return;
      run.errors[one.name] = error.message;
    }
    if (app.state.view === "gpus" && app.gpus === run) app.render();
  }
  run.isDone = true;
  if (app.state.view === "gpus" && app.gpus === run) app.render();
}
