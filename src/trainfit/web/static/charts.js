// Plots as SVG, without a library. Each is described in words too, and its numbers stand in a table nearby.

import { bytes, gib, percent, seconds } from "./format.js";
import { h, s } from "./dom.js";

export const CATEGORIES = ["weights", "gradients", "optimizer", "activations", "temporary", "communication", "workspace", "kv_cache"];
const OUTSIDE = "#7d8792";
const UNUSED = "#cfd5db";

// Parts of what a step takes on the device, with colours: categories, what the allocator cannot use, the context.
export function parts(answer, colors) {
  const { estimate } = answer;
  const found = CATEGORIES.map(name => ({ name: name.replace("kv_cache", "KV cache"), size: estimate.breakdown[name], color: colors[name] })).filter(one => one.size > 0);
  const unused = estimate.peak_reserved_bytes - estimate.peak_allocated_bytes;
  const outside = estimate.peak_device_bytes - estimate.peak_reserved_bytes;
  if (unused > 0) found.push({ name: "fragmentation", size: unused, color: UNUSED });
  if (outside > 0) found.push({ name: "CUDA context", size: outside, color: OUTSIDE });
  const more = answer.highest.device - estimate.peak_device_bytes;
  if (more > 0) found.push({ name: "possible more", size: more, color: "var(--bad)" });
  return found;
}

// One bar against the card: `scale` bytes are its width.
export function memoryBar(answer, colors, scale) {
  const { estimate } = answer;
  const shown = parts(answer, colors);
  const device = estimate.device_bytes;
  const label = `${bytes(answer.highest.device)} of ${bytes(device)}: ${shown.map(one => `${one.name} ${bytes(one.size)}`).join(", ")}`;
  const bar = h("div", { class: "bar", role: "img", "aria-label": label });
  bar.append(h("div", { class: "card", width_percent: (device / scale) * 100 }));
  const filled = h("div", { class: "filled", width_percent: Math.min(100, (answer.highest.device / scale) * 100) });
  for (const one of shown) {
    const part = h("div", { class: "part", width_percent: (one.size / answer.highest.device) * 100, title: `${one.name} ${bytes(one.size)}` });
    part.style.background = one.color;
    filled.append(part);
  }
  bar.append(filled);
  const limit = h("div", { class: "limit" });
  limit.style.left = `${(device / scale) * 100}%`;
  bar.append(limit);
  return bar;
}

export const barScale = answers => Math.max(...answers.map(one => Math.max(one.estimate.device_bytes, one.highest.device)));

export function legend(answer, colors) {
  return h("ul", { class: "legend" }, parts(answer, colors).map(one => {
    const key = h("i", { "aria-hidden": "true" });
    key.style.background = one.color;
    return h("li", {}, key, `${one.name} `, h("b", {}, `${gib(one.size, one.size < 2 ** 30 ? 2 : 1)}`));
  }));
}

// The memory of a step over time, with what is alive at the moment under the pointer or the arrow keys.
export function timeline(course, colors) {
  const figure = h("div", { class: "plot timeline" });
  const readout = h("div", { class: "readout" });
  const names = CATEGORIES.filter(name => course.alive[name]);
  const total = course.at.map((_, at) => names.reduce((sum, name) => sum + course.alive[name][at], 0));
  const peak = total[course.peak];
  const shownLimit = course.capacity_bytes && peak >= 0.4 * course.capacity_bytes ? course.capacity_bytes : null;
  const highest = Math.max(peak, shownLimit ?? 0) * 1.05;
  const end = Math.max(course.phases.at(-1)?.end ?? 0, course.at.at(-1));
  const begin = course.at[0];
  const time = at => (course.is_timed ? seconds(at) : `${Math.round(at).toLocaleString("en-US")} allocations`);
  let chosen = course.peak;
  const plot = h("div", { class: "canvas", tabindex: "0", role: "slider", "aria-label": "Moment of the step", "aria-valuemin": 0, "aria-valuemax": course.at.length - 1 });
  let cursor = null, scaleX = () => 0;

  function draw() {
    const width = Math.max(280, figure.clientWidth || 800), height = width < 500 ? 200 : 260;
    const left = 44, top = 20, bottom = 22;
    const x = at => left + ((at - begin) / (end - begin || 1)) * (width - left - 1);
    const y = size => top + (1 - size / highest) * (height - top - bottom);
    scaleX = x;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Allocated memory of the step by category: peak ${bytes(peak + course.unsplit_bytes)} in the ${course.phase[course.peak]}` });
    let step = 2 ** 28;
    while (highest / step > 5) step *= 2;
    for (let size = 0; size <= highest; size += step) {
      svg.append(s("line", { x1: left, x2: width, y1: y(size), y2: y(size), class: "grid" }), s("text", { x: left - 6, y: y(size) + 4, "text-anchor": "end" }, gib(size, step < 2 ** 30 ? 2 : 0)));
    }
    svg.append(s("text", { x: 0, y: 11 }, "GiB"));
    let below = course.at.map(() => 0);
    for (const name of names) {
      const above = below.map((size, at) => size + course.alive[name][at]);
      const up = course.at.flatMap((at, n) => [`${x(at).toFixed(1)},${y(above[n]).toFixed(1)}`, `${x(course.at[n + 1] ?? end).toFixed(1)},${y(above[n]).toFixed(1)}`]);
      const down = course.at.flatMap((at, n) => [`${x(at).toFixed(1)},${y(below[n]).toFixed(1)}`, `${x(course.at[n + 1] ?? end).toFixed(1)},${y(below[n]).toFixed(1)}`]).reverse();
      svg.append(s("path", { d: `M${up.join("L")}L${down.join("L")}Z`, fill: colors[name] }));
      below = above;
    }
    for (const one of course.phases) {
      if (x(one.end) - x(one.begin) < 4) continue;
      svg.append(s("line", { x1: x(one.begin), x2: x(one.begin), y1: top - 8, y2: height - bottom, class: "phase" }));
      if (x(one.end) - x(one.begin) > one.name.length * 6.5) svg.append(s("text", { x: x(one.begin) + 4, y: top - 8 }, one.name));
    }
    if (shownLimit) svg.append(s("line", { x1: left, x2: width, y1: y(shownLimit), y2: y(shownLimit), class: "limit" }), s("text", { x: width - 2, y: y(shownLimit) - 5, "text-anchor": "end", class: "limit" }, `limit of the allocator ${gib(shownLimit)}`));
    svg.append(s("text", { x: left, y: height - 6 }, "0"), s("text", { x: width - 2, y: height - 6, "text-anchor": "end" }, time(end)));
    cursor = s("line", { y1: top, y2: height - bottom, class: "cursor" });
    svg.append(cursor, s("circle", { cx: x(course.at[course.peak]), cy: y(peak), r: 4, class: "peak" }));
    plot.replaceChildren(svg);
    choose(chosen);
  }

  function choose(at) {
    chosen = Math.min(course.at.length - 1, Math.max(0, at));
    const alive = names.filter(name => course.alive[name][chosen] > 0).reverse();
    const words = `${course.phase[chosen]}, ${time(course.at[chosen])}: ${bytes(total[chosen])}${chosen === course.peak ? ", the peak" : ""}`;
    plot.setAttribute("aria-valuenow", chosen);
    plot.setAttribute("aria-valuetext", words);
    cursor?.setAttribute("x1", scaleX(course.at[chosen]));
    cursor?.setAttribute("x2", scaleX(course.at[chosen]));
    readout.replaceChildren(h("p", { class: "moment" }, words),
      h("dl", { class: "alive" }, alive.flatMap(name => [h("dt", {}, keyed(colors[name], name.replace("kv_cache", "KV cache"))), h("dd", {}, bytes(course.alive[name][chosen]))])),
      h("dl", { class: "largest" }, course.largest[chosen].flatMap(([name, size]) => [h("dt", {}, course.names[name]), h("dd", {}, bytes(size))])));
  }

  plot.addEventListener("pointermove", event => {
    const at = begin + ((event.offsetX - 44) / Math.max(1, plot.clientWidth - 45)) * (end - begin);
    let near = 0;
    while (near + 1 < course.at.length && course.at[near + 1] <= at) near += 1;
    choose(near);
  });
  plot.addEventListener("keydown", event => {
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10, Home: -1e6, End: 1e6 };
    if (event.key in moves) {
      event.preventDefault();
      choose(chosen + moves[event.key]);
    }
  });
  figure.append(plot, readout);
  watchWidth(figure, draw);
  return figure;
}

export function keyed(color, text) {
  const key = h("i", { class: "key", "aria-hidden": "true" });
  key.style.background = color;
  return [key, text];
}

// Redraw when the width changes, and once it is known.
export function watchWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    if (width) draw();
  }).observe(element);
}

export const TIME_PARTS = [
  ["attention", "#27527f", time => time.attention_s],
  ["other matrix products", "#2f6fb2", time => time.matmul_s - time.attention_s],
  ["memory-bound", "#4a9d7c", time => time.memory_s - time.optimizer_s],
  ["optimizer", "#e07b39", time => time.optimizer_s],
  ["communication", "#8b6bb1", time => time.communication_s],
  ["waiting for the host", "#c4452f", time => time.host_s],
  ["pipeline bubble", "#b9c2cc", time => time.bubble_s],
];

// The parts of a step's time in one bar, and a list with the share of each.
export function timeBudget(estimate) {
  const { time } = estimate;
  const found = TIME_PARTS.map(([name, color, of]) => ({ name, color, value: of(time) })).filter(one => one.value > 0);
  const whole = found.reduce((sum, one) => sum + one.value, 0);
  const bar = h("div", { class: "bar time", role: "img", "aria-label": `A step of ${seconds(estimate.step_s)}: ${found.map(one => `${one.name} ${seconds(one.value)}`).join(", ")}` });
  const filled = h("div", { class: "filled", width_percent: 100 });
  for (const one of found) {
    const part = h("div", { class: "part", width_percent: (one.value / whole) * 100, title: `${one.name} ${seconds(one.value)}` });
    part.style.background = one.color;
    filled.append(part);
  }
  bar.append(filled);
  const list = h("dl", { class: "budget" }, found.flatMap(one => [h("dt", {}, keyed(one.color, one.name)), h("dd", {}, seconds(one.value)), h("dd", { class: "share" }, percent(one.value / whole))]));
  return h("div", {}, bar, list);
}

// Points of memory against speed: {x, y, text, kind, isBest}. `choose(at)` when one is taken.
export function frontier(points, { limit, device, choose }) {
  const figure = h("div", { class: "plot" });
  watchWidth(figure, () => {
    const width = Math.max(280, figure.clientWidth), height = width < 500 ? 260 : 320;
    const left = 52, right = 14, top = 16, bottom = 34;
    const most = Math.max(limit, ...points.map(one => one.x)) * 1.06, fastest = Math.max(...points.map(one => one.y)) * 1.12;
    const x = value => left + (value / most) * (width - left - right);
    const y = value => top + (1 - value / fastest) * (height - top - bottom);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Recipes by memory and speed; the table below has the same" });
    const stepY = rounded(fastest / 4), stepX = rounded(most / 2 ** 30 / 5) * 2 ** 30;
    for (let value = 0; value <= fastest; value += stepY) svg.append(s("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }), s("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toLocaleString("en-US")));
    for (let value = 0; value <= most; value += stepX) svg.append(s("text", { x: x(value), y: height - 18, "text-anchor": "middle" }, gib(value, 0)));
    svg.append(s("text", { x: width - right, y: height - 3, "text-anchor": "end" }, "GiB on the device"), s("text", { x: 0, y: 11 }, "tokens/s"));
    svg.append(s("line", { x1: x(limit), x2: x(limit), y1: top, y2: height - bottom, class: "limit" }), s("text", { x: x(limit) - 5, y: top + 8, "text-anchor": "end", class: "limit" }, `${device} ${gib(limit)}`));
    const ordered = [...points].sort((one, other) => one.x - other.x);
    svg.append(s("polyline", { points: ordered.map(one => `${x(one.x)},${y(one.y)}`).join(" "), class: "front" }));
    for (const [at, one] of points.entries()) {
      const dot = s("circle", { cx: x(one.x), cy: y(one.y), r: one.isBest ? 7 : 5, class: `dot ${one.kind}${one.isBest ? " best" : ""}`, tabindex: "0", role: "button", "aria-label": `${one.text}: ${bytes(one.x)}, ${Math.round(one.y)} tokens a second` }, s("title", {}, `${one.text}\n${bytes(one.x)}, ${Math.round(one.y).toLocaleString("en-US")} tokens/s`));
      dot.addEventListener("click", () => choose(at));
      dot.addEventListener("keydown", event => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          choose(at);
        }
      });
      svg.append(dot);
    }
    figure.replaceChildren(svg);
  });
  return figure;
}

function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return power * ([1, 2, 5, 10].find(one => one * power >= value) ?? 10);
}
