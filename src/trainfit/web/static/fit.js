// The first view: does it fit, how fast is it, what does it cost; up to four recipes side by side.

import { barScale, legend, memoryBar, timeBudget, timeline } from "./charts.js";
import { copyButton, h, table, unseen } from "./dom.js";
import { bytes, count, digits, dollars, gib, percent, readCount, seconds, whole } from "./format.js";
import { more } from "./more.js";
import { differences, modelName } from "./state.js";

const LETTERS = "ABCD";

export function fitView(app) {
  const answer = app.answerOf(app.selected);
  const entry = app.entryOf(app.selected);
  const top = h("div", { class: "top" }, head(entry), app.compareButton());
  if (!answer) return [top, ...(app.recipes.length > 1 ? [compared(app)] : [])];
  return [
    top, app.recipes.length > 1 ? compared(app) : alone(app, answer),
    answer.estimate.fits ? null : wouldFit(app, entry),
    h("div", { class: "columns" },
      h("section", {}, h("h2", {}, heading("Memory over the step", answer)), course(app, entry)),
      answer.estimate.time ? h("section", {}, h("h2", {}, heading(answer.estimate.loop ? "Time of an update" : "Time of the step", answer)), timeBudget(answer.estimate), utilisation(answer)) : null),
    more(answer.estimate), cost(app, answer), details(answer),
  ];
}

const heading = (text, answer) => (answer.estimate.num_gpus > 1 ? `${text}, of one GPU` : text);

// The verdict, or what is known so far.
function head(entry) {
  const { answer, error, progress } = entry;
  if (error) {
    return h("section", { class: "head", "data-state": "refused" }, h("p", { class: "verdict refused" }, "Not a recipe that works"),
      h("p", { class: "why" }, error.field ? h("code", {}, error.field) : null, error.field ? ": " : "", error.problem, error.remedy ? `; ${error.remedy}` : ""));
  }
  if (!answer) return h("section", { class: "head", "data-state": "waiting" }, h("p", { class: "verdict waiting" }, "Predicting"), status(progress));
  const { estimate } = answer;
  const verdict = estimate.fits ? "Fits" : answer.headroom_bytes >= 0 ? "Does not fit safely" : "Does not fit";
  return h("section", { class: "head", "data-state": progress ? "stale" : "done" },
    h("p", { class: `verdict ${estimate.fits ? "good" : "bad"}` }, verdict),
    h("p", { class: "why" }, answer.verdict.replace(/^[A-Z ]+ /, "")),
    progress ? status(progress) : h("p", { class: "subject" }, answer.subject));
}

function status(progress) {
  const place = h("span", {}, progress?.words ?? "asking");
  progress?.places.push(place);
  return h("p", { class: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), place);
}

function alone(app, answer) {
  const { estimate } = answer;
  return h("section", { class: "main" }, memoryBar(answer, app.page.colors, barScale([answer])), scaleLine(answer), legend(answer, app.page.colors), figures(estimate, answer));
}

function scaleLine(answer) {
  const scale = barScale([answer]);
  const line = h("div", { class: "scale", "aria-hidden": "true" }, h("span", {}, "0"));
  const mark = h("span", { class: "at" }, `the card ${gib(answer.estimate.device_bytes)} GiB`);
  mark.style.right = `${100 - (answer.estimate.device_bytes / scale) * 100}%`;
  line.append(mark);
  return line;
}

function figures(estimate, answer) {
  const money = estimate.cost;
  const bounds = estimate.bounds.step_s;
  const items = [
    ["on the device", bytes(answer.highest.device), `${bytes(estimate.peak_allocated_bytes)} allocated`],
    ["tokens a second", whole(estimate.tokens_per_s), estimate.num_gpus > 1 ? `${estimate.num_gpus} GPUs together` : ""],
    ["MFU", percent(estimate.mfu), `HFU ${percent(estimate.hfu)}`],
    ["a step", seconds(estimate.step_s), bounds ? `${seconds(bounds.low)} to ${seconds(bounds.high)}` : ""],
    ["a million tokens", dollars(money?.per_million_tokens), money ? "" : "no price is known"],
    ["an hour", dollars(money?.per_hour), money ? `${dollars(money.price_per_gpu_hour)} a GPU` : ""],
  ];
  const note = estimate.fits ? null : h("p", { class: "note" }, "Speed and cost are those it would have if it fitted.");
  return [h("dl", { class: "figures" }, items.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value), more ? h("dd", { class: "more" }, more) : null))), note];
}

// A row for each recipe: what differs, its bar on one scale, its figures.
function compared(app) {
  const known = app.recipes.map((_, at) => app.answerOf(at)).filter(Boolean);
  const scale = known.length ? barScale(known) : 1;
  const columns = [["recipe", "recipe"], ["memory", "wide"], ["GiB", "number"], ["tokens/s", "number"], ["MFU", "number"], ["step", "number"], ["$ / M tokens", "number"]];
  const rows = app.recipes.map((recipe, at) => {
    const { answer, error, progress } = app.entryOf(at);
    const what = at ? differences(app.recipes[0], recipe, name => app.schema.default(name)).join(", ") || "the same" : `${modelName(recipe)}`;
    const pick = h("button", { type: "button", class: "letter", "aria-pressed": String(at === app.selected), "aria-label": `Edit recipe ${LETTERS[at]}`, onclick: () => app.select(at) }, LETTERS[at]);
    const remove = h("button", { type: "button", class: "quiet", "aria-label": `Remove recipe ${LETTERS[at]}`, onclick: () => app.remove(at) }, "×");
    const name = h("div", { class: "name" }, pick, h("span", {}, what), remove);
    if (!answer) return { cells: [name, error ? h("span", { class: "bad" }, error.message) : status(progress), "", "", "", "", ""], attributes: {} };
    const { estimate } = answer;
    return {
      attributes: { "data-fits": String(estimate.fits), "data-selected": String(at === app.selected) },
      cells: [name, memoryBar(answer, app.page.colors, scale),
        h("span", { class: estimate.fits ? "" : "bad" }, `${gib(answer.highest.device)} of ${gib(estimate.device_bytes)}`),
        whole(estimate.tokens_per_s), percent(estimate.mfu), seconds(estimate.step_s), dollars(estimate.cost?.per_million_tokens)],
    };
  });
  const chosen = app.answerOf(app.selected);
  return h("section", { class: "main" }, table("Recipes side by side", columns, rows, { class: "compare" }), chosen ? legend(chosen, app.page.colors) : null);
}

function wouldFit(app, entry) {
  const box = h("section", { class: "advice" }, h("h2", {}, "What would fit"));
  if (!app.source.isLive) return h("section", { class: "advice" }, h("h2", {}, "What would fit"), h("p", { class: "note" }, "trainfit predict names changes and GPUs with which it fits."));
  const { value, error, progress } = app.extra(entry, "advice");
  if (error) box.append(h("p", { class: "note" }, error.message));
  else if (!value) box.append(status(progress));
  else {
    const found = [...value.changes.map(one => [one, false]), ...value.hardware.map(one => [one, true])];
    if (!value.changes.length) box.append(h("p", { class: "note" }, "On this GPU none of the changes tried makes it fit; Fastest tries more."));
    box.append(found.length ? table("What would fit", [["change", ""], ["GiB", "number"], ["tokens/s", "number"], [unseen("take it"), "number"]], found.map(([one]) => [
      h("span", {}, one.changes.join(", "), one.numerics.length ? h("span", { class: "note" }, ` changes the numerics: ${one.numerics.join(", ")}`) : null, one.host_bytes ? h("span", { class: "note" }, ` pins ${bytes(one.host_bytes)} of host memory for each GPU`) : null),
      gib(one.device_bytes), whole(one.tokens_per_s),
      h("button", { type: "button", onclick: () => app.take(one.recipe), "aria-label": `Take ${one.changes.join(", ")}` }, "Take"),
    ])) : h("p", { class: "note" }, "Nothing that was tried fits."));
    if (!value.is_complete) box.append(h("p", { class: "note" }, "The search stopped after a minute."));
  }
  return box;
}

function course(app, entry) {
  const { value, error, progress } = app.extra(entry, "course");
  if (error) return h("p", { class: "note" }, error.message);
  if (!value) return status(progress);
  entry.plot ??= timeline(value, app.page.colors);
  return entry.plot;
}

function utilisation({ estimate }) {
  const { time } = estimate;
  const busy = estimate.step_s ? (time.matmul_s + time.memory_s) / estimate.step_s : 0;
  const lines = [
    ["GPU busy", percent(busy, 0), "as nvidia-smi prints it"],
    ["model FLOPs", `${digits(estimate.model_flops / 1e12, 4)} TFLOP`, "forward and backward, nothing recomputed"],
    ["hardware FLOPs", `${digits(estimate.hardware_flops / 1e12, 4)} TFLOP`, "executed"],
    ...(time.hidden_communication_s ? [["hidden communication", seconds(time.hidden_communication_s), "while the GPU computes"]] : []),
    ...(estimate.bubble ? [["pipeline bubble", percent(estimate.bubble), "of the GPUs' time, on average"]] : []),
  ];
  return h("dl", { class: "lines" }, lines.flatMap(([name, value, more]) => [h("dt", {}, name), h("dd", {}, value), h("dd", { class: "more" }, more)]));
}

// Time and money of a run over a number of tokens.
function cost(app, { estimate }) {
  if (!estimate.tokens_per_s) return null;
  const input = h("input", { type: "text", id: "tokens", value: app.state.tokens, placeholder: "100B", inputmode: "text", "aria-describedby": "tokens-result" });
  const result = h("p", { id: "tokens-result", class: "result" });
  const show = () => {
    const tokens = readCount(input.value || "1B");
    if (!(tokens > 0)) {
      result.textContent = "Write a number of tokens, such as 100B.";
      return;
    }
    const run = tokens / estimate.tokens_per_s;
    const money = estimate.cost?.per_million_tokens;
    const parts = [`${count(tokens)} tokens: ${seconds(run)}`, `${digits((run / 3600) * estimate.num_gpus)} GPU-hours`];
    if (money !== undefined && money !== null) parts.push(dollars((tokens / 1e6) * money));
    result.textContent = parts.join(", ");
  };
  input.addEventListener("input", () => {
    app.state.tokens = input.value.slice(0, 20);
    app.saveAddress();
    show();
  });
  show();
  return h("section", { class: "run" }, h("h2", {}, "A run"), h("label", { for: "tokens" }, "Tokens"), input, result);
}

function details(answer) {
  const { estimate } = answer;
  const notes = [...answer.notes, ...estimate.warnings];
  const phases = [["after init", estimate.phases.after_init, null], ...["forward", "backward", "optimizer"].map(name => [name, estimate.phases.first[name], estimate.phases.steady[name]])];
  const about = [["precision", answer.precision], ["model", answer.parameters], ["versions", answer.versions], ["compiling", answer.compiling], ...answer.two_peaks, ["recipe", answer.recipe_id]].filter(([, text]) => text);
  return h("section", { class: "details" },
    notes.length ? [h("h2", {}, "Notes"), h("ul", { class: "notes" }, notes.map(text => h("li", {}, text)))] : null,
    h("div", { class: "columns" },
      h("div", {}, h("h2", {}, "Highest allocated memory by phase"), table("Highest allocated memory by phase", [["phase", ""], ["first step", "number"], ["steady step", "number"]],
        phases.map(([name, first, steady]) => [name, bytes(first), steady === null ? "" : bytes(steady)]))),
      h("div", {}, h("h2", {}, "What it holds for"), h("dl", { class: "about-list" }, about.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])))),
    h("details", {}, h("summary", {}, "Assumptions and bounds"), h("ul", { class: "notes" },
      Object.entries(estimate.bounds).map(([name, one]) => h("li", {}, `${name}: ${digits(one.low)} to ${digits(one.high)}: ${one.basis}`)),
      h("li", {}, `FLOPs: ${estimate.flops_convention}`), answer.assumptions.map(text => h("li", {}, text)))),
    h("h2", {}, "Take it along"),
    h("div", { class: "columns" },
      h("div", {}, h("div", { class: "copying" }, h("h3", {}, "Command"), copyButton("Copy command", answer.command)), h("pre", { tabindex: "0" }, answer.command)),
      h("div", {}, h("div", { class: "copying" }, h("h3", {}, "recipe.yaml"), copyButton("Copy recipe", answer.yaml)), h("pre", { tabindex: "0" }, answer.yaml))));
}

export { status };
